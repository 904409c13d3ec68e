"""Two exceptions for stacked arrays: weights cast whole, and loops without bfloat16.

A Python loop over the layers of a model slices a stack of their weights, as
`jax.tree.map(lambda a: a[i], stack)`. Cast slice by slice, each is written in float32
first, and the gradient of the stack is a sum of float32 arrays: compiled for an H100, a
step of a Llama of 542 M, 8 layers in `jax.checkpoint`, moves 103 GB, and 75 where the
stack is cast once.

So the stack is cast once if all of it is read, each element by one operation. Then no
two gradients of an element are added: JAX adds up arrays that are zero outside of their
slices, which is exact in half precision. Where slices overlap, or one is read twice,
each use is cast, and gradients are summed in float32. A stack that is read in part is
not cast whole either: the rest would be written for nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from .._base.typing import AnyArray, Shape
from .._program import Box, are_apart, aval_of, boxes_read, is_covered
from .._settings import Settings
from ._context import FULL, Facts, Place, Run, Value, is_castable
from ._decide import USED, Case, Choice, noted_cast
from ._demand import Demands


def may_be_cast_early(run: Run, place: Place) -> bool:
    """Returns whether a weight may be cast before a program or a loop cuts it.

    A recipe then quantizes it from half precision, and its gradient comes back in half
    precision: in bfloat16 only, since float16 lacks the range. Gradients that are
    summed over devices are float32.
    """
    if place.settings.wire is not None:
        return False
    return not run.uses.recipes or place.settings.dtype == jnp.bfloat16


def cast_stacks(
    run: Run, place: Place, values: Mapping[Var, Value], ahead: Demands
) -> dict[Var, Value]:
    """Casts the stacked weights among a program's inputs before it cuts them.

    Args:
        run: The run.
        place: The place of the program.
        values: Its inputs.
        ahead: The demands of the program.

    Returns:
        The inputs that were cast, in half precision.
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
    """Returns a weight as if the function had received it in half precision."""
    with noted_cast(USED):
        array = value.cast(dtype)
    return Value(array, value.facts, slots=value.slots)


# --- Loops that must not store bfloat16 -----------------------------------------------
#
# XLA's CPU compiler updates a bfloat16 array in a loop by widening all of it, writing a
# part, and rounding all of it (jaxlib 0.10.2, not 0.11). A scan writes a part of each
# of its stacks in each iteration: results, gradients of stacked inputs, and residuals.
# So its time grew with the square of the number of iterations.
#
# Inside such a loop, values computed in bfloat16 are stored in float32, which changes
# no value. An operation that reads bfloat16 rounds its operands inside a
# `jax.checkpoint`, so that its inputs are saved. Saved as integers (their bits) the
# operands would have no second derivative.

Emit = Callable[[Case, Choice], list[Value]]


def has_wide_loops(settings: Settings) -> bool:
    """Returns whether loops store float32, as the target widens bfloat16 stacks."""
    if not settings.is_enabled or settings.dtype != jnp.bfloat16:
        return False
    return settings.device.widens_stacks


def widened(values: Iterable[Value]) -> list[Value]:
    """Returns the values, with bfloat16 ones as float32."""
    return [_widened(v) if v.dtype == jnp.bfloat16 else v for v in values]


def _widened(value: Value) -> Value:
    facts = value.facts._replace(is_declared=False, is_stored_in_half=True)
    return Value(value.cast(FULL), facts, slots=value.slots, stored=value.stored)


def emit_wide(case: Case, choice: Choice, emit: Emit) -> list[Value]:
    """Emits an operation so that its derivative saves no bfloat16.

    Args:
        case: The operation.
        choice: The choice for it.
        emit: The function that emits it.
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
    # The second one is for a second derivative, where the first one is gone.
    kept = jax.checkpoint(rounded, prevent_cse=False)
    results = jax.checkpoint(kept, prevent_cse=False)(arrays)
    for policy in place.saving:
        results = [policy.named(case.equation, x) for x in results]
    return [Value(x, f) for x, f in zip(results, found, strict=True)]
