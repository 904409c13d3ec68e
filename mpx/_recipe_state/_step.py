"""What a training step gives to who asks: its number, and the scale of its loss.

Recipes that round stochastically draw their noise by the number, so that it is another
one in each step. Derivative rules that are not proportional to their gradient need the
scale. A gradient function knows both, from its loss scaling. Where they are known,
programs that JAX has traced are of no use for the next step. So they are given to those
who need them: to a function that says so, or else when one that is called inside asks;
and an autocast function that has them hides them from what is traced inside, until that
asks.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxtyping import Array

from .._ambient_record import ambient, with_ambient
from .._quantize import AbstractRecipe, rounds_stochastically
from ._operands import StepValues

Result = TypeVar("Result")
Context = Callable[[Array | None], contextlib.AbstractContextManager[object]]


class StepAsked(Exception):
    """A function that is called inside rounds stochastically, or sees the scale."""


class _Known:
    """What is known of a step. Compared by identity, as it may be of tracers."""

    def __init__(self, number: Array) -> None:
        self.values = StepValues(number)


def at_step(number: Array, call: Callable[[Context], Result]) -> Result:
    """Differentiates a function in a training step whose number or scale it asks for.

    Args:
        number: The number of the step, an integer.
        call: Differentiates the function, and calls it in the context that it is given,
            of the scale as it is known there.
    """
    known = _Known(number)

    def context(
        scale: Array | None,
    ) -> contextlib.AbstractContextManager[object]:
        known.values = StepValues(number, scale)
        return with_ambient(step=known, gives_step=False)

    try:
        return call(context)
    finally:
        known.values = StepValues()  # JAX may keep the key


def with_step(call: Callable[[StepValues], Result]) -> Result:
    """Rewrites and calls an autocast function where the step is known.

    Args:
        call: Does it, given what is known. May be called twice.
    """
    found = ambient().step
    assert isinstance(found, _Known)
    try:
        with with_ambient(step=None, gives_step=True):
            return call(found.values)
    except StepAsked:
        return call(found.values)


def known_scale() -> Array | None:
    """The scale of the loss, where a step has given it."""
    found = ambient().step
    return found.values.scale if isinstance(found, _Known) else None


def asked_for_step() -> None:
    """The number of the step where it is not known: None outside of training steps.

    In one it begins again, and gives the number.
    """
    if ambient().gives_step:
        raise StepAsked


def is_random(recipes: Iterable[AbstractRecipe]) -> bool:
    """Whether one of the recipes rounds stochastically."""
    return any(map(rounds_stochastically, recipes))
