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

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from .._program import (
    Box,
    are_apart,
    aval_of,
    boxes_read,
    is_covered,
)
from .._typing import Shape
from ._context import FULL, Place, Run, Value, is_castable
from ._demand import Demands
from ._notes import USED, noted_cast


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
