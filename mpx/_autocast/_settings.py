"""What an autocast transform was told, and what it keeps while it rewrites a call."""

import dataclasses
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from ._rules import Rule, Rules


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a transform was told; hashable, part of the keys of caches.

    Attributes:
        dtype: The half precision dtype.
        residual_stream: "full" or "half".
        is_enabled: Whether anything is cast at all.
        rules: The user's rules.
        is_strict: Whether what happens by accident is an error.
    """

    dtype: np.dtype
    residual_stream: str = "full"
    is_enabled: bool = True
    rules: Rules = Rules()
    is_strict: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the program an equation stands.

    Attributes:
        settings: What holds there.
        scopes: The named scopes around it, the outermost first, if anybody asks.
    """

    settings: Settings
    scopes: tuple[str, ...] = ()


Programs = MutableMapping[Any, dict[Any, Any]]


def new_programs() -> Programs:
    """A store for rewritten programs, each as long as the one it was made from."""
    return weakref.WeakKeyDictionary()


class Run:
    """One rewriting of a program.

    Attributes:
        settings: What the transform was told.
        rewrites: How equations that hold a program are rewritten, by primitive.
        needs_parameters: Whether anybody asks which parameter a value is. If not,
            paths are not kept apart, and equal layers are rewritten once.
        plans: Plans that were made, by their keys.
        programs: Inner programs that were rewritten, by program and by how it was met.
            They may be kept from call to call: JAX gives the same program for the same
            jitted function, and compiles what it finds again only once.
        used: The rules that held for an operation.
    """

    def __init__(
        self,
        settings: Settings,
        rewrites: Mapping[str, Any],
        programs: Programs | None = None,
    ) -> None:
        """Starts a run."""
        self.settings = settings
        self.rewrites = rewrites
        self.needs_scopes = settings.rules.needs_scopes
        self.needs_parameters = settings.rules.needs_parameters
        self.plans: dict[Any, Any] = {}
        self.programs = new_programs() if programs is None else programs
        self.used: set[Rule] = set()
