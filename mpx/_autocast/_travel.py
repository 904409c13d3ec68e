r"""Where an equation moves a weight between devices, or makes what they sum.

`mpx._wire` says how; here is decided for which equations and values.

What enters `jax.shard_map` by `P()` every device has whole. If it lies in pieces
outside, the compiler gathers it in front of the `shard_map`, in the dtype in which it
goes in. So a weight that is only used in half precision inside goes in rounded, and
beside it zeros, to which its gradient goes back in float32:

$$w' = \operatorname{f32}(\operatorname{gather}(\operatorname{half}(w))) + 0, \qquad
  \bar 0 = \bar w'$$

Recipes quantize from float32, and which uses are theirs is known when they are emitted.
Under a recipe a program is emitted twice: first for what it reads of its weights. Those
that it reads in few bits only go in so, quantized or rounded where they lie; their
products have the same bits as of weights that went in as float32.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from .._dtypes import is_half
from .._jax_compat import manual_axes
from .._policy import Wire
from .._program import aval_of, avals, properties
from .._quantize import AbstractProduct
from .._recipe_state import Slots
from .._typing import AnyArray
from .._wire import (
    Asked,
    Asks,
    Gathering,
    Quantized,
    cast_where_it_lies,
    dtype_of_sums,
    entering,
    gathered,
    joined,
    only_gradient,
    travelling_dtype,
    wide_product,
)
from ._context import FULL, Entering, Facts, Place, Value, computed
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


@dataclasses.dataclass(frozen=True)
class Entry:
    """What goes into a `shard_map` for one operand.

    Attributes:
        operand: The operand.
        spec: How it goes in.
        arrays: What goes in for it.
        inside: The operand inside, of these arrays, its facts and its slots.
        asks: What is read of it, where that is to be found out.
    """

    operand: Value
    spec: Any
    arrays: list[AnyArray]
    inside: Callable[[list[AnyArray], Facts, Slots | None], Value]
    asks: Asks | None = None

    @property
    def specs(self) -> list[Any]:
        """How each of the arrays goes in; scales and amaxes are for the whole."""
        is_scale = [x.ndim < self.arrays[0].ndim for x in self.arrays]
        return [P() if is_one else self.spec for is_one in is_scale]


def entries_of(
    place: Place,
    equation: JaxprEqn,
    operands: Sequence[Value],
    demands: Sequence[Demand],
) -> list[Entry]:
    """What goes in for each operand of a `shard_map`.

    Args:
        place: Where it stands.
        equation: The `shard_map`.
        operands: Its operands.
        demands: What its program wants of them.
    """
    specs, axes = (equation.params[name] for name in ("in_specs", "newly_manual_axes"))
    wire, recipe = place.settings.wire, place.settings.recipe
    entries = []
    rows = zip(operands, equation.invars, demands, specs, strict=True)
    for value, atom, demand, spec in rows:
        is_master = value.facts.is_declared and value.dtype == FULL
        is_weight = value.facts.is_weight and is_master and not _is_cut(spec, axes)
        if is_weight and wire is not None and recipe is not None:
            is_asked = _may_be_asked(place, wire, demand)
            entry = _asked(value, spec, wire) if is_asked else _as_it_is(value, spec)
        elif is_weight and wire is not None:
            dtype = _dtype_of(place, wire, aval_of(atom).dtype, demand)
            entry = _rounded(value, spec, wire, dtype)
        else:
            entry = _as_it_is(value, spec)
        entries.append(entry)
    return entries


def settled(place: Place, entry: Entry) -> Entry:
    """What goes in for an operand, when it has been asked what is read of it.

    Args:
        place: Where the `shard_map` stands.
        entry: What has gone in to find out.
    """
    value, asks, wire = entry.operand, entry.asks, place.settings.wire
    if asks is None or wire is None:
        return entry
    if not asks.is_narrow:
        return _as_it_is(value, entry.spec)
    axes = manual_axes()

    def here(product: AbstractProduct) -> AbstractProduct:
        is_summed = place.sums_over_devices
        return dataclasses.replace(
            product, manual_axes=axes, sums_over_devices=is_summed
        )

    def scales(form: Quantized) -> AnyArray | None:
        if form.use is None:
            return None
        assert value.slots is not None  # or the recipe had none
        return value.slots.look_up(form.use, form.lengths)

    entered = entering(_source(value), asks, wire, here, scales)
    return _entered(value, entry.spec, entered)


def _as_it_is(value: Value, spec: Any) -> Entry:
    def inside(arrays: list[AnyArray], facts: Facts, slots: Slots | None) -> Value:
        return Value(arrays[0], facts, slots=slots)

    return Entry(value, spec, [value.array], inside)


def _rounded(value: Value, spec: Any, wire: Wire, dtype: np.dtype | None) -> Entry:
    if dtype is None:
        return _as_it_is(value, spec)
    narrow = jax.lax.stop_gradient(cast_where_it_lies(value.array, dtype))
    zeros = only_gradient(lambda x: x, value.array, wire)

    def inside(arrays: list[AnyArray], facts: Facts, slots: Slots | None) -> Value:
        return Value(joined(*arrays), facts, slots=slots)

    return Entry(value, spec, [narrow, zeros], inside)


def _asked(value: Value, spec: Any, wire: Wire) -> Entry:
    asks, source = Asks(), _source(value)
    # Of what the program gathers nothing is sent yet.
    is_gathered = isinstance(source, Gathering)
    weight = jax.eval_shape(source.arrive) if is_gathered else source
    may_be_cut = not is_gathered and not (spec and spec[0])
    return _entered(value, spec, Asked(weight, asks, wire, may_be_cut), asks)


def _source(value: Value) -> AnyArray | Gathering:
    """A weight, or what gathers it in front of the `shard_map`."""
    return value.arriving if isinstance(value.arriving, Gathering) else value.array


def _entered(
    value: Value, spec: Any, entering: Entering, asks: Asks | None = None
) -> Entry:
    arrays, tree = jax.tree.flatten(entering)

    def inside(arrays: list[AnyArray], facts: Facts, slots: Slots | None) -> Value:
        return Value.on_its_way(jax.tree.unflatten(tree, arrays), facts, slots)

    return Entry(value, spec, arrays, inside, asks)


def _is_cut(spec: Any, axes: Collection[str]) -> bool:
    """Whether each device has a piece of its own."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return set(axes) <= {name for part in parts for name in part}


def _may_be_asked(place: Place, wire: Wire, demand: Demand) -> bool:
    """Whether a weight may go in in few bits under a recipe, if its uses read no more.

    Not where the policy says in which dtype weights travel, nor what a device computes
    alone: it has an amax of its own.
    """
    is_free = wire.gather_dtype is None and not wire.is_alone
    return is_free and place.settings.is_enabled and Demand.HALF in demand


def _dtype_of(
    place: Place, wire: Wire, declared_dtype: np.dtype, demand: Demand
) -> np.dtype | None:
    """The dtype in which a weight goes in; None: as it is."""
    if not place.settings.is_enabled:
        half = declared_dtype
    else:
        half = place.settings.dtype if demand == Demand.HALF else FULL
    dtype = wire.gather_dtype or half
    return None if dtype == FULL or half == FULL else np.dtype(dtype)
