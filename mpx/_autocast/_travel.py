r"""Where an equation moves a weight between devices, or makes what they sum.

`mpx._wire` says how; here is decided for which equations and values.

What arrives is a float32 value with the facts and slots that it had, rounded perhaps:
so rules, recipes and casts decide as they would on one device, and the gradient goes
back in float32. Under a recipe the value stays *pending* until its first use, for only
the product knows whether 8 bits are enough.

What enters `jax.shard_map` by `P()` every device has whole. If it lies in pieces
outside, the compiler gathers it in front of the `shard_map`, in the dtype in which it
goes in. So a weight that is only used in half precision inside goes in rounded, and
beside it zeros, to which its gradient goes back in float32:

$$w' = \operatorname{f32}(\operatorname{gather}(\operatorname{half}(w))) + 0, \qquad
  \bar 0 = \bar w'$$
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_half
from .._jax_compat import bind_equation, manual_axes, shard_map_axes
from .._policy import Wire
from .._program import aval_of, avals, properties
from .._quantize import QuantizedArray
from .._typing import AnyArray
from .._wire import (
    Gathering,
    cast_where_it_lies,
    dtype_of_sums,
    gathered,
    joined,
    only_gradient,
    travelling_dtype,
    wide_product,
)
from ._context import FULL, Place, Value, computed
from ._decide import Case, Choice
from ._demand import Demand, Wanted

# What gives a part of a weight: one layer of a stack.
_SLICES = ("dynamic_slice", "slice")
# What gives an operand as it is.
MARKS = ("name", "optimization_barrier", "stop_gradient")


def travelled_weight(
    place: Place,
    equation: JaxprEqn,
    operands: list[Value],
    demands: Wanted,
    stored: QuantizedArray | None = None,
) -> Value | None:
    """A weight as it comes from other devices, cast before it travels if it may be.

    Args:
        place: Where the equation stands.
        equation: The equation.
        operands: Its operands.
        demands: What is wanted of its results.
        stored: What `moved_payload` gives for them.

    Returns:
        The weight; None where the equation does not move one, or not between devices.
    """
    half = _half_of(place, equation, operands, demands)
    wire = place.settings.wire
    if half is None or wire is None:
        return None
    name = equation.primitive.name
    dtype = travelling_dtype(wire, name, half)
    if dtype is None:
        return None
    value = operands[0]
    is_for_products = place.settings.recipe is not None and half != FULL
    if is_for_products and properties(name).gathers:
        if value.gathering is not None:
            gathering = value.gathering.then(equation)
        else:
            gathering = Gathering(value.array, equation, dtype, wire)
        slots = value.slots and value.slots.moved(is_mixed=False)
        return Value.pending(gathering, value.facts, slots, stored)
    array = gathered(equation, value.array, dtype, wire)
    return Value(array, value.facts, slots=value.slots)


def moved_payload(equation: JaxprEqn, operands: list[Value]) -> QuantizedArray | None:
    """What a weight is stored in, moved as an equation moves the weight.

    None where no product is to read it (of rows of a table, of several results, where
    each number stands more than once, or beside others, whose scale may be another),
    and where nothing moves.
    """
    stored = operands[0].stored if operands else None
    name = equation.primitive.name
    if stored is None or len(equation.outvars) > 1 or name in MARKS:
        return None
    known = properties(name)
    is_gathered = known.gathers and not manual_axes()
    is_whole = known.rearranges or is_gathered or known.is_free
    if not is_whole and name not in _SLICES:
        return None
    others = [v.array for v in operands[1:]]
    (payload,) = bind_equation(equation, stored.payload, *others)
    return dataclasses.replace(stored, payload=payload)


def moved_later(
    equation: JaxprEqn, operands: list[Value], stored: QuantizedArray | None = None
) -> Value | None:
    """A weight on its way, moved when it has arrived; None for other operands."""
    gathering = operands[0].gathering if len(operands) == 1 else None
    if gathering is None:
        return None
    if not properties(equation.primitive.name).rearranges:
        return None
    (value,) = operands
    slots = value.slots and value.slots.moved(is_mixed=False)
    return Value.pending(gathering.then(equation), value.facts, slots, stored)


def _half_of(
    place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> np.dtype | None:
    """The precision in which a weight may come together; None: it is no weight.

    Half, where every use of it is in that precision. Where nothing is cast but what
    the program casts (masters of weights that the caller has cast), it is the dtype
    that the program has there.
    """
    known = properties(equation.primitive.name)
    is_sent = (known.gathers or known.spreads) and len(operands) == 1
    if place.settings.wire is None or not is_sent:
        return None
    (value,) = operands
    is_master = value.facts.is_declared and value.dtype == FULL
    if not is_master or not value.facts.is_weight:
        return None
    source, result = avals((equation.invars[0], equation.outvars[0]))
    if source.sharding.mesh != result.sharding.mesh:
        return None  # from axes of one kind to another
    declared_dtype = source.dtype
    if not place.settings.is_enabled:
        return declared_dtype if declared_dtype != FULL else None
    if declared_dtype != FULL:
        return None
    is_half = demands[0] == Demand.HALF
    return place.settings.dtype if is_half else FULL


def summed_weight(case: Case, choice: Choice) -> int | None:
    """Which operand of a product is a weight with a gradient to be summed wide."""
    if not properties(case.name).is_quantizable or len(case.operands) < 2:
        return None
    dtype = choice.dtype
    if not case.settings.is_enabled:
        dtype = aval_of(case.equation.invars[0]).dtype
    if dtype is None or not is_half(dtype):
        return None
    summed = dtype_of_sums(case.settings.wire, case.name)
    if summed is None or jnp.finfo(summed).bits <= jnp.finfo(dtype).bits:
        return None
    pair = case.operands[:2]
    weights = [v.facts.is_weight and v.dtype == FULL for v in pair]
    return weights.index(True) if sum(weights) == 1 else None


def product_of_weight(case: Case, choice: Choice, weight: int) -> Value:
    """A product whose weight gets its gradient in the dtype of sums over devices."""
    assert case.settings.wire is not None
    dtype = choice.dtype or aval_of(case.equation.invars[weight]).dtype
    arrays = [
        v.array if i == weight or i > 1 else v.cast(dtype)
        for i, v in enumerate(case.operands)
    ]
    reduce_dtype = case.settings.wire.reduce_dtype
    return computed(wide_product(case.equation, arrays, weight, dtype, reduce_dtype))


# --- Weights at the entry of `jax.shard_map` ------------------------------------------


def entries_of(
    place: Place,
    equation: JaxprEqn,
    operands: Sequence[Value],
    demands: Sequence[Demand],
) -> list[list[AnyArray]]:
    """What goes in for each operand of a `shard_map`: it, or it rounded and zeros.

    Args:
        place: Where it stands.
        equation: The `shard_map`.
        operands: Its operands.
        demands: What its program wants of them.
    """
    specs, axes = equation.params["in_specs"], shard_map_axes(equation.params)
    wire = place.settings.wire
    entries = []
    rows = zip(operands, equation.invars, demands, specs, strict=True)
    for value, atom, demand, spec in rows:
        is_master = value.facts.is_declared and value.dtype == FULL
        dtype = None
        if wire is not None and is_master and value.facts.is_weight:
            if not _is_sharded(spec, axes):
                dtype = _dtype_of(place, wire, aval_of(atom).dtype, demand)
        if wire is None or dtype is None:
            entries.append([value.array])
            continue
        narrow = jax.lax.stop_gradient(cast_where_it_lies(value.array, dtype))
        entries.append([narrow, only_gradient(lambda x: x, value.array, wire)])
    return entries


def from_entry(arrays: Sequence[AnyArray]) -> AnyArray:
    """Inside of the `shard_map`, the operand for which these have gone in."""
    return joined(*arrays) if len(arrays) == 2 else arrays[0]


def _is_sharded(spec: Any, axes: Collection[str]) -> bool:
    """Whether each device has a piece of its own."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return set(axes) <= {name for part in parts for name in part}


def _dtype_of(
    place: Place, wire: Wire, declared_dtype: np.dtype, demand: Demand
) -> np.dtype | None:
    """The dtype in which a weight goes in; None: as it is.

    A recipe quantizes from float32. From what has been rounded the loss would be
    another one than without gradients, where nothing travels early.
    """
    if not place.settings.is_enabled:
        half = declared_dtype
    elif place.settings.recipe is not None:
        return None
    else:
        half = place.settings.dtype if demand == Demand.HALF else FULL
    dtype = wire.gather_dtype or half
    return None if dtype == FULL or half == FULL else np.dtype(dtype)
