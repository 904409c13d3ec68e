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

from .._base.dtypes import is_half
from .._base.jax_compat import bind_equation, manual_axes, shard_map_axes
from .._base.typing import AnyArray
from .._program import PrimitiveClass, aval_of, avals, properties
from .._quantize import QuantizedArray
from .._recipe_state import Slots
from .._settings import Settings, Wire
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
from ._context import FULL, Facts, Value, computed, is_castable
from ._decide import Case, Choice
from ._demand import Demand, Wanted
from ._reach import CONSTANT, Origin, together_from

# What gives a part of a weight: one layer of a stack.
_SLICES = ("dynamic_slice", "slice")
# What gives an operand as it is.
MARKS = ("name", "optimization_barrier", "stop_gradient")


def travelled_weight(case: Case, stored: QuantizedArray | None) -> Value | None:
    """A weight as it comes from other devices, cast before it travels if it may be.

    Args:
        case: The equation.
        stored: What `moved_payload` gives for it.

    Returns:
        The weight; None where the equation does not move one, or not between devices.
    """
    wire, name = case.settings.wire, case.name
    half = None if wire is None else _half_of(case)
    if wire is None or half is None:
        return None
    dtype = travelling_dtype(wire, name, half)
    if dtype is None:
        return None
    value = case.operands[0]
    is_for_products = case.settings.recipe is not None and half != FULL
    if is_for_products and properties(name).gathers:
        if value.gathering is None:
            gathering = Gathering(value.array, case.equation, dtype, wire)
        else:
            gathering = value.gathering.then(case.equation)
        return _pending(value, gathering, stored)
    array = gathered(case.equation, value.array, dtype, wire)
    return Value(array, value.facts, slots=value.slots)


def moved_payload(case: Case) -> QuantizedArray | None:
    """What a weight is stored in, moved as an equation moves the weight.

    None where no product is to read it (of rows of a table, of several results, where
    each number stands more than once, or beside others, whose scale may be another),
    and where nothing moves.
    """
    stored = case.operands[0].stored if case.operands else None
    if stored is None or len(case.equation.outvars) > 1 or case.name in MARKS:
        return None
    known = properties(case.name)
    is_gathered = known.gathers and not manual_axes()
    is_whole = known.rearranges or is_gathered or known.is_free
    if not is_whole and case.name not in _SLICES:
        return None
    others = [v.array for v in case.operands[1:]]
    (payload,) = bind_equation(case.equation, stored.payload, *others)
    return dataclasses.replace(stored, payload=payload)


def moved_later(case: Case, stored: QuantizedArray | None) -> Value | None:
    """A weight on its way, moved when it has arrived; None for other operands."""
    gathering = case.operands[0].gathering if len(case.operands) == 1 else None
    if gathering is None or not properties(case.name).rearranges:
        return None
    return _pending(case.operands[0], gathering.then(case.equation), stored)


def _pending(
    value: Value, gathering: Gathering, stored: QuantizedArray | None
) -> Value:
    slots = value.slots and value.slots.moved(is_mixed=False)
    return Value(None, value.facts, False, slots, stored, gathering)


def _half_of(case: Case) -> np.dtype | None:
    """The precision in which a weight may come together; None: it is no weight.

    Half, where every use of it is in that precision. Where nothing is cast but what
    the program casts (masters of weights that the caller has cast), it is the dtype
    that the program has there.
    """
    known, settings, equation = properties(case.name), case.settings, case.equation
    is_sent = (known.gathers or known.spreads) and len(case.operands) == 1
    if not is_sent or not _is_master(case.operands[0]):
        return None
    source, result = avals((equation.invars[0], equation.outvars[0]))
    if source.sharding.mesh != result.sharding.mesh:
        return None  # from axes of one kind to another
    if settings.is_enabled and source.dtype != FULL:
        return None
    if not settings.is_enabled:
        return source.dtype if source.dtype != FULL else None
    return settings.dtype if case.demands[0] == Demand.HALF else FULL


def _is_master(value: Value) -> bool:
    facts = value.facts
    return facts.is_declared and facts.is_weight and value.dtype == FULL


def product_of_weight(case: Case, choice: Choice) -> Value | None:
    """A product whose weight gets its gradient in the dtype of sums over devices.

    None for what is no such product, and where that dtype is not wider than its own.
    """
    wire = case.settings.wire
    if not properties(case.name).is_quantizable or len(case.operands) < 2:
        return None
    is_enabled = case.settings.is_enabled
    dtype = choice.dtype if is_enabled else aval_of(case.equation.invars[0]).dtype
    summed = dtype_of_sums(wire, case.name)
    if dtype is None or not is_half(dtype) or wire is None or summed is None:
        return None
    if jnp.finfo(summed).bits <= jnp.finfo(dtype).bits:
        return None
    weights = [v.facts.is_weight and v.dtype == FULL for v in case.operands[:2]]
    if sum(weights) != 1:
        return None
    weight = weights.index(True)
    dtype = choice.dtype or aval_of(case.equation.invars[weight]).dtype
    arrays = [
        v.array if i == weight or i > 1 else v.cast(dtype)
        for i, v in enumerate(case.operands)
    ]
    product = wide_product(case.equation, arrays, weight, dtype, wire.reduce_dtype)
    return computed(product)


def asks_for_half_sums(case: Case) -> bool:
    """Whether devices are to sum the gradient of a product's weight in half precision.

    They sum what a product gives, which is float32 in the form for CPUs.
    """
    if not case.run.uses.wire:
        return False
    summed = dtype_of_sums(case.settings.wire, case.name)
    return summed is not None and is_half(summed)


# --- Weights at the entry of `jax.shard_map` ------------------------------------------


def entries_of(case: Case, demands: Wanted) -> list[list[AnyArray]]:
    """What goes in for each operand of a `shard_map`: it, or it rounded and zeros.

    Args:
        case: The `shard_map`.
        demands: What its program wants of its operands.
    """
    params, wire = case.equation.params, case.settings.wire
    specs, axes = params["in_specs"], shard_map_axes(params)
    entries = []
    rows = zip(case.operands, case.equation.invars, demands, specs, strict=True)
    for value, atom, demand, spec in rows:
        dtype = None
        is_whole = not _is_sharded(spec, axes)
        if wire is not None and _is_master(value) and is_whole:
            dtype = _dtype_of(case.settings, wire, aval_of(atom).dtype, demand)
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
    settings: Settings, wire: Wire, declared_dtype: np.dtype, demand: Demand
) -> np.dtype | None:
    """The dtype in which a weight goes in; None: as it is.

    A recipe quantizes from float32. From what has been rounded the loss would be
    another one than without gradients, where nothing travels early.
    """
    if not settings.is_enabled:
        half = declared_dtype
    elif settings.recipe is not None:
        return None
    else:
        half = settings.dtype if demand == Demand.HALF else FULL
    dtype = wire.gather_dtype or half
    return None if dtype == FULL or half == FULL else np.dtype(dtype)


# ----------------------------------------------------------------------------
# Which values a recipe takes for weights: what comes from weights and constants alone.
#
# Numbers that pass through integers or truth values, as those of masks, pruning and
# rounding, count as what they were. `Origin` has the kinds.

# What reads an array by numbers of another, and loops: an operand of any dtype counts.
_BY_ALL = frozenset(("gather", "scan", "while"))
_CALLBACKS = frozenset(("infeed", "io_callback", "pure_callback"))


def note_origins(case: Case, results: Sequence[Value]) -> None:
    """Says of the results of an equation what they are computed from."""
    kind = properties(case.name).kind
    if properties(case.name).moves and case.name != "gather":
        return
    origin = _origin_of(case)
    for value in results:
        # A program within knows it of its results, but for what a loop carries.
        if kind is not PrimitiveClass.RECURSE or value.facts.origin is Origin.DATA:
            value.facts = value.facts._replace(origin=origin)
        if case.run.uses.slots and value.slots is None:
            value.slots = slots_for(value.facts, case.operands)


def _origin_of(case: Case) -> Origin:
    """What the results of an equation are computed from, as far as it says."""
    name, known = case.name, properties(case.name)
    is_product, is_by_all = known.kind is PrimitiveClass.HALF, name in _BY_ALL
    # An index or a predicate selects numbers, and is none of them.
    operands = case.operands if is_by_all else case.castable or case.operands
    origins = [v.facts.origin for v in operands]
    found = together_from(origins)
    if name == "random_bits":
        return Origin.NOISE if Origin.DATA in found else found
    # A matmul of what the program holds, such as a whole batch, gives activations.
    gives_data = is_product and not all(Origin.WEIGHT in one for one in origins)
    is_program = known.kind is PrimitiveClass.RECURSE and not is_by_all
    if gives_data or is_program or name in _CALLBACKS:
        return Origin.DATA
    if found == CONSTANT:
        is_array = case.castable and is_castable(aval_of(case.equation.outvars[0]))
        is_own = is_array and not (is_by_all or known.joins)
        return CONSTANT if is_own else Origin.PATTERN
    is_made = (is_product or is_by_all) and Origin.WEIGHT in found
    return found | Origin.MADE if is_made else found


def slots_for(facts: Facts, operands: Sequence[Value]) -> Slots | None:
    """The slots of a weight that is computed from others: those of the first.

    A parameter comes before what a matmul made, as in `a @ b + w`.
    """
    if Origin.WEIGHT not in facts.origin:
        return None
    weights = [v for v in operands if v.slots and Origin.WEIGHT in v.facts.origin]
    first = min(weights, key=lambda v: not v.facts.is_weight, default=None)
    return first and first.slots and first.slots.moved(is_mixed=True)


def are_weights(case: Case) -> list[bool]:
    """Which of the two operands of a product are weights.

    What a matmul made of weights is one of a matrix of data: with batch axes, as in
    attention to learned queries, it is data.
    """
    origins = [v.facts.origin for v in case.operands[:2]]
    found = [one is Origin.WEIGHT for one in origins]
    is_batched = False
    if case.name == "dot_general":
        _, (batch, _) = case.equation.params["dimension_numbers"]
        is_batched = bool(batch)
    if any(found) or is_batched:
        return found
    made = [Origin.WEIGHT in one for one in origins]
    is_of_data = any(one and Origin.WEIGHT not in one for one in origins)
    return made if is_of_data else found
