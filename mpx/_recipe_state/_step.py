"""The number of the training step, for recipes that round stochastically.

Their noise is drawn by it, so that it is another one in each step. A gradient function
knows it, from the counters of its loss scaling. Where it is known, programs that JAX
has traced are of no use for the next step. So it is given to those who round by it: to
a function that says so, or else when one that is called inside asks; and an autocast
function that has it hides it from what is traced inside, until that asks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxtyping import Array

from .._ambient_record import ambient, with_ambient
from .._quantize import AbstractRecipe, rounds_stochastically

Result = TypeVar("Result")
Context = Callable[[], contextlib.AbstractContextManager[object]]


class StepAsked(Exception):
    """A function that is called inside rounds stochastically."""


class _Known:
    """A number of a step. Compared by identity, as it may be a tracer."""

    def __init__(self, number: Array) -> None:
        self.number: Array | None = number


def at_step(number: Array, call: Callable[[Context], Result]) -> Result:
    """Differentiates a function in a training step whose number it asks for.

    Args:
        number: The number of the step, an integer.
        call: Differentiates the function, and calls it in the context that it is given.
    """
    known = _Known(number)
    try:
        return call(functools.partial(with_ambient, step=known, gives_step=False))
    finally:
        known.number = None  # JAX may keep the key


def with_step(call: Callable[[Array | None], Result]) -> Result:
    """Rewrites and calls an autocast function where the number of the step is known.

    Args:
        call: Does it, given the number. May be called twice.
    """
    found = ambient().step
    assert isinstance(found, _Known)
    try:
        with with_ambient(step=None, gives_step=True):
            return call(found.number)
    except StepAsked:
        return call(found.number)


def asked_for_step() -> None:
    """The number of the step where it is not known: None outside of training steps.

    In one it begins again, and gives the number.
    """
    if ambient().gives_step:
        raise StepAsked


def is_random(recipes: Iterable[AbstractRecipe]) -> bool:
    """Whether one of the recipes rounds stochastically."""
    return any(map(rounds_stochastically, recipes))
