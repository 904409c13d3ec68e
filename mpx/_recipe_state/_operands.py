"""The inputs of a program besides its operands: slots, stored weights, step values.

`StateOperands` packs them for inner programs. `at_step` provides the step's values to
autocast functions, and `MissingScales` is the error where no state is provided.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._base.jax_compat import has_one_device
from .._loss_scaling import AbstractLossScaling
from .._quantize import (
    AbstractRecipe,
    Stored,
    Target,
    flushed,
    largest_magnitude,
    rounds_stochastically,
)
from .._settings import ambient, with_ambient
from ._slots import ROLES, Slots, State


class StepValues(NamedTuple):
    """The values of the training step that are known in a program.

    Attributes:
        number: The number of the step; None if the program needs none.
        scale: The loss scale; None if the program needs none.
        scales: The scales of recipes in one array; see `in_one_array`.
    """

    number: Array | None = None
    scale: Array | None = None
    scales: Array | None = None


NOTHING_KNOWN = StepValues()


class StateOperands:
    """The inputs of a program besides its operands: slots, 8-bit weights, step values.

    Attributes:
        arrays: The arrays that are passed to the program.
        form: All else that a rewritten program depends on.
    """

    def __init__(
        self,
        slots: Sequence[Slots | None],
        *lengths: int,
        stored: Sequence[Stored | None] = (),
        step: StepValues = NOTHING_KNOWN,
    ) -> None:
        """Packs the slots of operands, their stored forms, and the step's values.

        Args:
            slots: The slots of each operand.
            *lengths: The length of the scan that slices them.
            stored: The stored form of each operand; empty if no operand has one.
            step: The step's values.
        """
        self._slots = list(slots)
        self._lengths = lengths
        self.form = tuple(None if s is None else s.form for s in self._slots)
        packed = [
            {} if s is None else s.as_operands(bool(lengths)) for s in self._slots
        ]
        self._stored = list(stored) or [None] * len(self._slots)
        # A scan slices the payload; all iterations share the one scale.
        given = [x.payload if x and lengths else x for x in self._stored]
        self.arrays, self._tree = jax.tree.flatten((packed, given, step))
        pairs = zip(step._fields, step, strict=True)
        self.form += tuple(name for name, x in pairs if x is not None)
        if any(self._stored):
            self.form += (jax.tree.structure(self._stored),)

    def unpacked(
        self, arrays: Sequence[Array]
    ) -> tuple[list[Slots | None], list[Stored | None], StepValues]:
        """Returns the slots and stored form of each operand, and the step's values."""
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


# --- Scales in one array, and room for the parts of amaxes ----------------------------
#
# An amax takes two kernels: the first one returns some thousand maxima. Slots have
# room for these, so the second ones of all arrays are one kernel. The values for a role
# begin with the scale and its inverse.
_PARTS, _TOGETHER = 8192, 24


def _slot_of(scales: Array, parts: int) -> Array:
    """Returns slots with room for amaxes in parts, from float32[..., 3, 2]."""
    room = jnp.zeros((*scales.shape[:-2], parts - 2), jnp.float32)
    # The compiler recognizes a scalar in these, and not in a reshaped array.
    ranges = [(scales[..., i, :], room) for i in range(ROLES)]
    return jnp.concatenate(sum(ranges, ()), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_room(parts: int, scales: Array) -> tuple[Array, ...]:
    return tuple(_slot_of(scales, parts))


def _with_room_forward(parts: int, scales: Array) -> PyTree:
    return _with_room(parts, scales), None


def _with_room_backward(parts: int, _: None, amaxes: tuple[Array, ...]) -> PyTree:
    found = []
    for i in range(0, len(amaxes), _TOGETHER):
        several = jax.lax.optimization_barrier(jnp.stack(amaxes[i : i + _TOGETHER]))
        found.append(largest_magnitude(several.reshape(-1, ROLES, parts), (2,)))
    whole = flushed(jnp.concatenate(found))
    return (jnp.stack([whole, jnp.zeros_like(whole)], axis=-1),)


_with_room.defvjp(_with_room_forward, _with_room_backward)


def in_one_array(state: State, target: Target, given: PyTree) -> State:
    """Returns the same state for a GPU, which runs a kernel for each scalar.

    All that is computed from one array becomes one kernel. With several devices
    amaxes are not in parts: an array may be sharded along any axis.

    Args:
        state: The state.
        target: The device.
        given: The function's arguments, whose types say whether there are several.
    """
    names = [name for name, x in state.scales.items() if x.ndim == 1]
    if not names or not target.rounds_to_fp8:
        return state
    scale = jnp.stack([state.scales[name] for name in names])
    inverse = jax.lax.stop_gradient(1 / jnp.where(scale == 0, 1, scale))
    vector = jnp.stack([scale, inverse], axis=-1)
    slots: PyTree = _with_room(_PARTS if has_one_device(given) else 2, vector)
    scales = {**state.scales, **dict(zip(names, slots, strict=True))}
    rows = {name: i for i, name in enumerate(names)}
    vector = jax.lax.optimization_barrier(jax.lax.stop_gradient(vector))
    return state._replace(scales=scales, vector=vector, rows=rows)


@jax.custom_vjp
def with_scales(token: Array, scales: Array) -> Array:
    """Replaces a slot's scales, but returns the amaxes to it.

    Args:
        token: The slot.
        scales: Scales and their inverses, float32[3, 2].
    """
    return _slot_of(scales, token.size // ROLES)


def _with_scales_forward(token: Array, scales: Array) -> PyTree:
    return with_scales(token, scales), None


def _with_scales_backward(_: None, amaxes: Array) -> PyTree:
    return amaxes, None


with_scales.defvjp(_with_scales_forward, _with_scales_backward)


# --- Values of the training step ------------------------------------------------------
#
# Recipes that round stochastically draw their noise by the step's number, so that it
# differs in each step. Derivative rules that are not proportional to their gradient
# need the loss scale. A gradient function knows both, from its loss scaling. A program
# that was traced with them cannot be reused in the next step. So only functions that
# need them get them: a function that declares it, or that calls one that asks for them
# (`StepAsked`). An autocast function that has them hides them from what is traced
# inside, until that asks.

Result = TypeVar("Result")
Context = Callable[[Array | None], contextlib.AbstractContextManager[object]]


class StepAsked(Exception):
    """An inner function rounds stochastically, or needs the loss scale."""


class _Known:
    """Holds a step's values. Compared by identity, as they may be tracers."""

    def __init__(self, number: Array) -> None:
        self.values = StepValues(number)


def at_step(number: Array, call: Callable[[Context], Result]) -> Result:
    """Differentiates a function in a training step, with its number or scale if needed.

    Args:
        number: The number of the step, an integer.
        call: Differentiates the function. It gets a function that returns a context for
            a scale, and calls the differentiated function in that context.
    """
    known = _Known(number)

    def context(scale: Array | None) -> contextlib.AbstractContextManager[object]:
        known.values = StepValues(number, scale)
        return with_ambient(step=known, gives_step=False)

    try:
        return call(context)
    finally:
        known.values = StepValues()  # JAX may keep the key


def with_step(call: Callable[[StepValues], Result]) -> Result:
    """Rewrites and calls an autocast function where the step is known.

    Args:
        call: Does so, given the step's values. May be called twice.
    """
    found = ambient().step
    assert isinstance(found, _Known)
    try:
        with with_ambient(step=None, gives_step=True):
            return call(found.values)
    except StepAsked:
        return call(found.values)


def known_scale() -> Array | None:
    """Returns the loss scale if the step has provided it, else None."""
    found = ambient().step
    return found.values.scale if isinstance(found, _Known) else None


def asked_for_step() -> None:
    """Asks for the step's number where it is not known.

    Returns None outside of training steps. In one it raises `StepAsked`, after which
    the call begins again with the number.
    """
    if ambient().gives_step:
        raise StepAsked


def is_random(recipes: Iterable[AbstractRecipe]) -> bool:
    """Returns whether one of the recipes rounds stochastically."""
    return any(map(rounds_stochastically, recipes))


# --- The error of a recipe with a state that has no scales ----------------------------


class MissingScales(ValueError):
    """A product needed scales, and no state was provided.

    Attributes:
        recipe: The name of the recipe.
        where: The line of the product, as ` at model.py:41`; perhaps empty.
    """

    def __init__(self, recipe: str, where: str) -> None:
        """Sets the message for a call outside of a training step."""
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
    """Returns the error of a call whose loss scaling contains no scales.

    Args:
        scaling: The loss scaling.
        call: The public call, in backticks.
        recipe: The name of the recipe.
        where: As in `MissingScales`.
    """
    given = type(scaling).__name__
    return ValueError(
        f"`scaling` of {call} must contain the scales of `{recipe}`{where}; got "
        f"`mpx.{given}`, which has none. Make it from the function and its "
        "arguments:\n"
        "    scaling = mpx.init_scaling(func, model, ...)\n"
        "To continue with its counters and loss scale:\n"
        "    scaling = mpx.init_scaling(func, model, ...).with_state(scaling)\n"
        "Or use a recipe without a state: `mpx.Float8CurrentScaling()`."
    )
