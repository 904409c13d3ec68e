r"""Where an equation moves a weight between devices, or makes what they sum.

`mpx._wire` says how; here is decided for which equations and values.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_half
from .._program import aval_of, avals, properties
from .._wire import (
    Gathering,
    dtype_of_sums,
    gathered,
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
        gathering = value.arriving
        if isinstance(gathering, Gathering):
            gathering = gathering.then(equation)
        else:
            gathering = Gathering(value.array, equation, dtype, wire)
        return Value.on_its_way(gathering, value.facts, value.slots)
    array = gathered(equation, value.array, dtype, wire)
    return Value(array, value.facts, slots=value.slots)


def moved_later(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """A weight on its way, moved when it has arrived; None for other operands."""
    arriving = operands[0].arriving if len(operands) == 1 else None
    if arriving is None:
        return None
    (value,), known = operands, properties(equation.primitive.name)
    if not known.rearranges and not (known.spreads and value.has_entered):
        return None
    return Value.on_its_way(arriving.then(equation), value.facts, value.slots)


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
