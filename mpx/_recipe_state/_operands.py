"""What programs get besides operands: slots, stored weights, facts of the step."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
from jaxtyping import Array

from .._loss_scaling import AbstractLossScaling
from .._quantize import AbstractRecipe, QuantizedArray, rounds_stochastically
from .._settings import ambient, with_ambient
from ._slots import Slots


class StepValues(NamedTuple):
    """What a program is told of the training step.

    Attributes:
        number: The number of the step; None if the program needs none.
        scale: The scale of the loss; None if the program needs none.
    """

    number: Array | None = None
    scale: Array | None = None


NOTHING_KNOWN = StepValues()


class StateOperands:
    """What a program gets besides its operands.

    Their slots, the 8 bits that weights are stored in, and what is known of the step.

    Attributes:
        arrays: What the program gets.
        form: All else that a rewritten program depends on.
    """

    def __init__(
        self,
        slots: Sequence[Slots | None],
        *lengths: int,
        stored: Sequence[QuantizedArray | None] = (),
        step: StepValues = NOTHING_KNOWN,
    ) -> None:
        """Packs the slots of operands, what they are stored as, and the step.

        Args:
            slots: Those of each operand.
            *lengths: The length of the scan that slices them.
            stored: What each operand is stored as; nothing for none.
            step: What is known of the training step.
        """
        self._slots = list(slots)
        self._lengths = lengths
        self.form = tuple(None if s is None else s.form for s in self._slots)
        packed = [
            {} if s is None else s.as_operands(bool(lengths)) for s in self._slots
        ]
        self._stored = list(stored) or [None] * len(self._slots)
        # A scan slices the payload; the one scale is for all of its turns.
        given = [x.payload if x and lengths else x for x in self._stored]
        self.arrays, self._tree = jax.tree.flatten((packed, given, step))
        pairs = zip(step._fields, step, strict=True)
        self.form += tuple(name for name, x in pairs if x is not None)
        if any(self._stored):
            self.form += (jax.tree.structure(self._stored),)

    def unpacked(
        self, arrays: Sequence[Array]
    ) -> tuple[list[Slots | None], list[QuantizedArray | None], StepValues]:
        """The slots of each operand, what each is stored as, and facts of the step."""
        packed, given, step = jax.tree.unflatten(self._tree, arrays)
        slots = [
            None if s is None else s.inside(own, self._lengths)
            for s, own in zip(self._slots, packed, strict=True)
        ]
        if self._lengths:
            given = [
                None if x is None else dataclasses.replace(x, payload=payload)
                for x, payload in zip(self._stored, given, strict=True)
            ]
        return slots, given, step


# ----------------------------------------------------------------------------
# What a training step gives to who asks: its number, and the scale of its loss.
#
# Recipes that round stochastically draw their noise by the number, so that it is
# another one in each step. Derivative rules that are not proportional to their gradient
# need the scale. A gradient function knows both, from its loss scaling. Where they are
# known, programs that JAX has traced are of no use for the next step. So they are given
# to those who need them: to a function that says so, or else when one that is called
# inside asks; and an autocast function that has them hides them from what is traced
# inside, until that asks.

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


# ----------------------------------------------------------------------------
# The error of a recipe with a state where nothing holds its scales.


class MissingScales(ValueError):
    """A product asked for scales, and no state was provided.

    Attributes:
        recipe: The name of the recipe.
        where: The line of the product, as ` at model.py:41`; perhaps empty.
    """

    def __init__(self, recipe: str, where: str) -> None:
        """The message for a call outside of any training step."""
        super().__init__(
            f"`{recipe}`{where} needs a state, which only a training step has. Train "
            "with `mpx.filter_grad(func, scaling)` or the like and `scaling = "
            "mpx.init_scaling(func, model, ...)`; to evaluate, `mpx.inference(func, "
            "scaling)`; or use a recipe without a state, "
            "`mpx.Float8CurrentScaling()`."
        )
        self.recipe, self.where = recipe, where


def missing_from(
    scaling: AbstractLossScaling, call: str, recipe: str, where: str = ""
) -> ValueError:
    """The error of a call whose loss scaling holds no scales.

    Args:
        scaling: The loss scaling.
        call: The public call, in backticks.
        recipe: The name of the recipe.
        where: As in `MissingScales`.
    """
    given = type(scaling).__name__
    kept = (
        f"To keep your `{given}` as the loss scaling in it:\n"
        "    scaling = mpx.init_scaling(func, model, ...).with_loss(scaling)\n"
    )
    return ValueError(
        f"`scaling` of {call} must contain the scales of `{recipe}`{where}; got "
        f"`mpx.{given}`, which has none. Make it from the function and its "
        "arguments:\n"
        "    scaling = mpx.init_scaling(func, model, ...)\n"
        f"{kept * (not scaling._is_one)}Or use a recipe without a state: "
        "`mpx.Float8CurrentScaling()`."
    )
