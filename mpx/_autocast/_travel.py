r"""Where an equation moves a weight between devices, or makes what they sum.

`mpx._wire` says how; here is decided for which equations and values.

What goes into `jax.shard_map` by `P()` every device has whole. If it lies in pieces
outside, the compiler gathers it in front of the `shard_map`, in the dtype in which it
goes in. So a weight that is only used in half precision inside goes in rounded, and
beside it zeros, to which its gradient goes back in float32:

$$w' = \operatorname{f32}(\operatorname{gather}(\operatorname{half}(w))) + 0, \qquad
  \bar 0 = \bar w'$$

Not under a recipe, which quantizes from float32.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_half
from .._program import aval_of, avals, properties
from .._typing import AnyArray
from .._wire import (
    Gathering,
    cast_where_it_lies,
    dtype_of_sums,
    gathered,
    only_gradient,
    travelling_dtype,
    wide_product,
)
from ._context import FULL, Place, Provenance, Value, computed
from ._decide import Case, Choice
from ._demand import Demand, Wanted


def travelled_weight(
    place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> Value | None:
    """A weight as it comes from other devices, cast before it travels if it may be.

    Args:
        place: Where the equation stands.
        equation: The equation.
        operands: Its operands.
        demands: What is wanted of its results.

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
        gathering = value.gathering
        if gathering is None:
            gathering = Gathering(value.array, equation, dtype, wire)
        else:
            gathering = gathering.then(equation)
        return Value.on_its_way(gathering, value.facts, value.slots)
    array = gathered(equation, value.array, dtype, wire)
    return Value(array, value.facts, slots=value.slots)


def moved_later(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """A weight on its way, moved when it has arrived; None for other operands."""
    if len(operands) != 1 or not properties(equation.primitive.name).rearranges:
        return None
    (value,) = operands
    if value.gathering is None:
        return None
    return Value.on_its_way(value.gathering.then(equation), value.facts, value.slots)


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
    is_master = value.facts.provenance is Provenance.DECLARED and value.dtype == FULL
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
    is_half = demands[0] is Demand.HALF
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
        v.array if i == weight or i > 1 else v.cast(dtype)[0]
        for i, v in enumerate(case.operands)
    ]
    reduce_dtype = case.settings.wire.reduce_dtype
    half = wide_product(case.equation, arrays, weight, dtype, reduce_dtype)
    result = choice.result or aval_of(case.equation.outvars[0]).dtype
    if half.dtype == result:
        return computed(half, is_product=True)
    made = computed(jax.lax.convert_element_type(half, result), is_product=True)
    made.narrow = half
    return made


# --- Weights at the entry of `jax.shard_map` ------------------------------------------


def dtypes_at_entry(
    place: Place,
    equation: JaxprEqn,
    operands: Sequence[Value],
    inside: Sequence[Demand],
) -> list[np.dtype | None]:
    """The dtype in which each operand of a `shard_map` goes in; None: as it is.

    Args:
        place: Where it stands.
        equation: The `shard_map`.
        operands: Its operands.
        inside: What its program wants of them.
    """
    specs = equation.params["in_specs"]
    rows = zip(operands, equation.invars, inside, specs, strict=True)
    axes = equation.params["newly_manual_axes"]
    return [
        _dtype_of(place, value, aval_of(atom).dtype, demand)
        if value.facts.is_weight and not _is_cut(spec, axes)
        else None
        for value, atom, demand, spec in rows
    ]


def _is_cut(spec: Any, axes: Collection[str]) -> bool:
    """Whether each device has a piece of its own."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return set(axes) <= {name for part in parts for name in part}


def _dtype_of(
    place: Place, value: Value, declared_dtype: np.dtype, demand: Demand
) -> np.dtype | None:
    settings = place.settings
    is_master = value.facts.provenance is Provenance.DECLARED and value.dtype == FULL
    if settings.wire is None or not is_master or settings.recipe is not None:
        return None
    if not settings.is_enabled:
        half = declared_dtype
    else:
        half = settings.dtype if demand is Demand.HALF else FULL
    dtype = settings.wire.gather_dtype or half
    return None if dtype == FULL or half == FULL else np.dtype(dtype)


def narrowed(place: Place, weight: AnyArray, dtype: np.dtype) -> list[AnyArray]:
    """What goes in for a weight: it rounded, and what its gradient goes to."""
    assert place.settings.wire is not None  # `dtypes_at_entry`
    narrow = jax.lax.stop_gradient(cast_where_it_lies(weight, dtype))
    return [narrow, only_gradient(lambda x: x, weight, place.settings.wire)]


@jax.custom_vjp
def joined(narrow: AnyArray, zeros: AnyArray) -> AnyArray:
    """The weight where it has arrived, float32, whose gradient goes to the zeros."""
    return narrow.astype(FULL)


def _forward(narrow: AnyArray, zeros: AnyArray) -> tuple[AnyArray, None]:
    return narrow.astype(FULL), None


joined.defvjp(_forward, lambda _, g: (None, g))
