"""What an autocast transform was told, and what it keeps while it rewrites a call."""

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from .._quantize import AbstractRecipe, DelayedScaling, Target
from ._rules import Rules


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a transform was told; hashable, part of the keys of caches.

    Attributes:
        dtype: The half precision dtype.
        residual_stream: "full" or "half".
        residuals: "small" or "fast"; None if nobody said.
        is_enabled: Whether anything is cast at all.
        rules: The user's rules.
        is_strict: Whether what happens by accident is an error.
        recipe: How products of weights are quantized; None if they are not.
        target: The device that is compiled for; None if nobody said.
    """

    dtype: np.dtype
    residual_stream: str = "full"
    residuals: str | None = None
    is_enabled: bool = True
    rules: Rules = Rules()
    is_strict: bool = False
    recipe: AbstractRecipe | None = None
    target: Target | None = None


class Reach(enum.Flag):
    """Where a value goes."""

    LOSS = enum.auto()
    """Into a scalar that the function returns."""
    PRODUCT = enum.auto()
    """Into another product."""
    RESULT = enum.auto()
    """Into another result of the function."""


UNUSED = Reach(0)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the program an equation stands.

    Attributes:
        settings: What holds there.
        scopes: The named scopes around it, the outermost first, if anybody asks.
        reach: Where the results of the program that it stands in go; empty if no
            recipe asks.
        has_own_rule: Whether it is part of a function with a derivative rule of its
            own, in which nothing is quantized.
        sums_over_devices: Whether JAX sums the gradients of what all devices share.
        is_recomputed: Whether it is part of something that is recomputed as a whole.
        is_in_loop: Whether it is in the body of a loop.
    """

    settings: Settings
    scopes: tuple[str, ...] = ()
    reach: tuple[Reach, ...] = ()
    has_own_rule: bool = False
    sums_over_devices: bool = False
    is_recomputed: bool = False
    is_in_loop: bool = False


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
        demands: The demands of programs that were analysed, by their keys.
        programs: Inner programs that were rewritten, by program and by how it was met.
            They may be kept from call to call: JAX gives the same program for the same
            jitted function, and compiles what it finds again only once.
        islands: Islands that were emitted, by what they have in common.
        used: The rules that held for an operation, the recipes that quantized one, and
            float16 if anything is computed in it.
        has_recipe: Whether anything may be quantized.
        spares_final: Whether the final projection is left alone.
        is_stateful: Whether a recipe with a state may be among those.
        traced: What the function was traced with, which is no more; weak references.
        step: The number of the training step, an array, in the program that is being
            emitted; None if nobody knows it or rounds by it.
    """

    def __init__(
        self,
        settings: Settings,
        rewrites: Mapping[str, Any],
        programs: Programs | None = None,
        recipes: Collection[AbstractRecipe] = (),
        spares_final: bool = True,
    ) -> None:
        """Starts a run in whose program these recipes stand."""
        self.spares_final = spares_final
        self.settings = settings
        self.rewrites = rewrites
        self.has_recipe = bool(recipes)
        self.is_stateful = any(isinstance(r, DelayedScaling) for r in recipes)
        self.needs_scopes = settings.rules._needs_scopes or self.is_stateful
        self.needs_parameters = settings.rules._needs_parameters or self.is_stateful
        self.demands: dict[Any, Any] = {}
        self.islands: dict[Any, Any] = {}
        self.programs = new_programs() if programs is None else programs
        self.used: set[Any] = set()
        self.traced: tuple[weakref.ref[Any], ...] = ()
        self.step: Any = None
        self._recipes = recipes

    @contextlib.contextmanager
    def at_step(self, step: Any) -> Iterator[None]:
        """In a program within, the step's number is another array."""
        outside, self.step = self.step, step
        try:
            yield
        finally:
            self.step = outside

    def for_later(self) -> "Callable[[], Run]":
        """How a derivative rule, which outlives a run, gets at it.

        A run holds every program that it has met, and a rule stands in a rewritten one,
        which is to live no longer than the program that it was made from. So a rule
        holds no run; when the run is over, it gets another one that is like it.

        Returns:
            A function that gives this run as long as it is there, and then a new one.
        """
        itself, programs = weakref.ref(self), weakref.ref(self.programs)
        settings, rewrites = self.settings, self.rewrites
        recipes, spares_final = self._recipes, self.spares_final
        needs_parameters, traced = self.needs_parameters, self.traced

        def run() -> Run:
            found = itself()
            if found is None:
                found = Run(settings, rewrites, programs(), recipes, spares_final)
                found.needs_parameters, found.traced = needs_parameters, traced
            return found

        return run
