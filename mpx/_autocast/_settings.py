"""What an autocast transform was told, and what it keeps while it rewrites a call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._decisions import Decision


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a transform was told; hashable, part of the keys of caches.

    Attributes:
        dtype: The half precision dtype.
        stream: Whether the residual stream is "full" or "half".
        is_enabled: Whether anything is cast at all.
    """

    dtype: np.dtype
    stream: str = "full"
    is_enabled: bool = True


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the program an equation stands.

    Attributes:
        path: Positions of the equations around it, which tell places apart.
        scopes: The named scopes around it, the outermost first.
        executions: How often it runs in one call.
        is_bounded: False within a `while`.
    """

    path: tuple[Any, ...] = ()
    scopes: tuple[str, ...] = ()
    executions: int = 1
    is_bounded: bool = True

    def inside(self, *path: Any, times: int = 1, is_bounded: bool = True) -> "Place":
        """The place of a program within an equation that stands here."""
        return dataclasses.replace(
            self,
            path=(*self.path, *path),
            executions=self.executions * times,
            is_bounded=self.is_bounded and is_bounded,
        )

    def within(self, scopes: tuple[str, ...]) -> "Place":
        """The same place within further scopes."""
        return dataclasses.replace(self, scopes=self.scopes + scopes)


class Run:
    """One rewriting of a program.

    Attributes:
        settings: What the transform was told.
        rewrites: How equations that hold a program are rewritten, by primitive.
        decisions: Decisions by place if they are recorded, else None.
        plans: Plans that were made, by their keys.
        programs: Inner programs that were rewritten, by their keys.
    """

    def __init__(
        self,
        settings: Settings,
        rewrites: Mapping[str, Any],
        is_recording: bool = False,
    ) -> None:
        """Starts a run."""
        self.settings = settings
        self.rewrites = rewrites
        self.decisions: dict[Any, Decision] | None = {} if is_recording else None
        self.plans: dict[Any, Any] = {}
        self.programs: dict[Any, Any] = {}

    @property
    def needs_scopes(self) -> bool:
        """Whether anybody asks for the named scopes of equations."""
        return self.decisions is not None
