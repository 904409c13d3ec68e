"""Stacks of weights that a program cuts: cast whole, in front of what cuts them.

A loop in Python over the layers of a model slices a stack of their weights, as
`jax.tree.map(lambda a: a[i], stack)`. Cast slice by slice, each is written in float32
first, and the gradient of the stack is a sum of float32 arrays: compiled for an H100, a
step of a Llama of 542 M, 8 layers in `jax.checkpoint`, moves 103 GB, and 75 where the
stack is cast once.

So it is cast once if all of it is read, each number by one operation. No two gradients
of a number are added then: JAX adds up arrays that are zero outside of their slices,
which is exact in half precision. Where slices overlap, or one is read twice, each use
is cast, and gradients are summed in float32. A stack of which only a part is read would
be written for nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from .._base.typing import AnyArray, Shape
from .._program import Box, are_apart, aval_of, boxes_read, is_covered
from .._quantize import target_from
from .._settings import Settings
from ._context import FULL, Facts, Place, Run, Value, is_castable
from ._decide import USED, Case, Choice, noted_cast
from ._demand import Demands


def may_be_cast_early(run: Run, place: Place) -> bool:
    """Whether a weight may be cast before a program, or a loop, cuts it.

    A recipe quantizes it from half precision then, and its gradient comes back in it:
    in bfloat16 only, for float16 has not the range. Gradients that are summed over
    devices are float32.
    """
    if place.settings.wire is not None:
        return False
    return not run.uses.recipes or place.settings.dtype == jnp.bfloat16


def cast_stacks(
    run: Run, place: Place, values: Mapping[Var, Value], ahead: Demands
) -> dict[Var, Value]:
    """The inputs of a program that are cast before it cuts them.

    Args:
        run: The run.
        place: Where the program stands.
        values: Its inputs.
        ahead: The plan of the program.

    Returns:
        Those inputs, in half precision.
    """
    settings = place.settings
    if not settings.is_enabled or not may_be_cast_early(run, place):
        return {}
    moved = ahead.moved_weights
    stacks = [v for v in moved if _is_whole_weight(values[v], v)]
    return {
        variable: _cast(values[variable], settings.dtype)
        for variable, boxes in zip(stacks, boxes_read(ahead.jaxpr, stacks), strict=True)
        if _is_cut_up(aval_of(variable).shape, boxes)
    }


def _is_whole_weight(value: Value, variable: Var) -> bool:
    facts = value.facts
    is_here = facts.is_declared and facts.is_weight and value.gathering is None
    return is_here and value.dtype == FULL and is_castable(aval_of(variable))


def _is_cut_up(shape: Shape, boxes: Sequence[Box]) -> bool:
    return len(boxes) > 1 and is_covered(shape, boxes) and are_apart(boxes)


def _cast(value: Value, dtype: np.dtype) -> Value:
    """A weight as if the function had got it in half precision."""
    with noted_cast(USED):
        array = value.cast(dtype)
    return Value(array, value.facts, slots=value.slots)


# ----------------------------------------------------------------------------
# Loops whose stacks must not be bfloat16: float32 in its place between products.
#
# XLA's CPU compiler updates a bfloat16 array in a loop by widening the whole of it,
# writing a part, and rounding the whole (jaxlib 0.10.2, not 0.11). A scan writes a part
# of each of its stacks in each turn: results, gradients of stacked inputs, and whatever
# its derivative keeps. So all of these took time by the square of the turns.
#
# Inside such a loop what was computed in bfloat16 is kept in float32, which changes no
# number, and an operation that reads bfloat16 rounds its operands inside of a
# `jax.checkpoint`, whose derivative keeps what goes in. Kept as integers (their bits)
# the operands would have no second derivative.

Emit = Callable[[Case, Choice], list[Value]]


def has_wide_loops(settings: Settings) -> bool:
    """Whether loops keep float32: the target cannot write a part of bfloat16 arrays."""
    if not settings.is_enabled or settings.dtype != jnp.bfloat16:
        return False
    return (settings.target or target_from(None)).widens_stacks


def widened(values: Iterable[Value]) -> list[Value]:
    """Values, those in bfloat16 as float32."""
    return [_widened(v) if v.dtype == jnp.bfloat16 else v for v in values]


def _widened(value: Value) -> Value:
    facts = value.facts._replace(is_declared=False, is_stored_in_half=True)
    return Value(value.cast(FULL), facts, slots=value.slots, stored=value.stored)


def emit_wide(case: Case, choice: Choice, emit: Emit) -> list[Value]:
    """Emits an operation so that its derivative keeps no bfloat16.

    Args:
        case: The operation.
        choice: What was chosen for it.
        emit: Emits it.
    """
    place, atoms = case.place, case.equation.invars
    place = dataclasses.replace(place, has_wide_loop=False)
    case = case._replace(place=place)
    half = [
        i
        for i, (v, atom) in enumerate(zip(case.operands, atoms, strict=True))
        if is_castable(aval_of(atom)) and not v.is_constant
    ]
    dtypes = {choice.dtype or aval_of(atoms[i]).dtype for i in half}
    if jnp.dtype(jnp.bfloat16) not in dtypes:
        return emit(case, choice)
    found: list[Facts] = []

    def rounded(arrays: Sequence[AnyArray]) -> list[AnyArray]:
        operands = list(case.operands)
        for i, x in zip(half, arrays, strict=True):
            operands[i] = Value(x, operands[i].facts)
        results = widened(emit(case._replace(operands=operands), choice))
        found[:] = [v.facts for v in results]
        return [v.array for v in results]

    arrays = [case.operands[i].cast(FULL) for i in half]
    # The second one is for a second derivative: the first one is gone by then.
    kept = jax.checkpoint(rounded, prevent_cse=False)
    results = jax.checkpoint(kept, prevent_cse=False)(arrays)
    for policy in place.saving:
        results = [policy.named(case.equation, x) for x in results]
    return [Value(x, f) for x, f in zip(results, found, strict=True)]
