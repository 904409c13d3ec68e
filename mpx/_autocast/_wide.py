"""Loops whose stacks must not be bfloat16: float32 in its place between products.

XLA's CPU compiler updates a bfloat16 array in a loop by widening the whole of it,
writing a part, and rounding the whole (jaxlib 0.10.2, not 0.11). A scan writes a part
of each of its stacks in each turn: results, gradients of stacked inputs, and whatever
its derivative keeps. So all of these took time by the square of the turns.

Inside such a loop what was computed in bfloat16 is kept in float32, which changes no
number, and an operation that reads bfloat16 rounds its operands inside of a
`jax.checkpoint`, whose derivative keeps what goes in. Kept as integers (their bits) the
operands would have no second derivative.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from .._program import aval_of
from .._quantize import target_from
from .._settings import Settings
from .._typing import AnyArray
from ._context import FULL, Facts, Value, is_castable
from ._decide import Case, Choice

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
