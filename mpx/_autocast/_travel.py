r"""Weights under communication, and the distinction of weights from data.

`mpx._wire` implements the communication; this module decides for which equations and
values, and which values a recipe takes for weights.

A gathered weight is a float32 value with its facts and slots, rounded perhaps. So
rules, recipes and casts decide as on one device, and the gradient returns in float32.
Under a recipe the value stays *pending* until its first use, since only the product
knows whether 8 bits are enough.

A `P()` operand of `jax.shard_map` is replicated. If it is sharded outside, the compiler
gathers it before the `shard_map`, in the dtype that it is passed in. So a weight that
is only used in half precision inside is passed rounded, along with zeros that receive
its gradient in float32:

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
from .._quantize import HalfCopy, Stored
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

# Operations that return a part of a weight: one layer of a stack.
_SLICES = ("dynamic_slice", "slice")
# Operations that return an operand unchanged.
MARKS = ("name", "optimization_barrier", "stop_gradient")


def travelled_weight(case: Case, stored: Stored | None) -> Value | None:
    """Gathers a weight from other devices, cast before if all its uses allow it.

    Args:
        case: The equation.
        stored: The result of `moved_payload` for it.

    Returns:
        The weight; None if the equation does not move a weight between devices.
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


def moved_payload(case: Case) -> Stored | None:
    """Moves the stored form of a weight as an equation moves the weight.

    Returns None if nothing moves, or if no product can read the result: rows of a
    table, several results, repeated elements, or joined arrays with other scales.
    """
    stored = case.operands[0].stored if case.operands else None
    if stored is None or len(case.equation.outvars) > 1 or case.name in MARKS:
        return None
    known = properties(case.name)
    is_gathered = known.gathers and not manual_axes()
    is_whole = known.rearranges or is_gathered or known.is_free
    # Of a copy that a loop slices, few parts may be read.
    slices = _SLICES[isinstance(stored, HalfCopy) :]
    if not is_whole and case.name not in slices:
        return None
    others = [v.array for v in case.operands[1:]]
    (payload,) = bind_equation(case.equation, stored.payload, *others)
    return dataclasses.replace(stored, payload=payload)


def moved_later(case: Case, stored: Stored | None) -> Value | None:
    """Defers moving a pending weight until it is gathered; None for other operands."""
    gathering = case.operands[0].gathering if len(case.operands) == 1 else None
    if gathering is None or not properties(case.name).rearranges:
        return None
    return _pending(case.operands[0], gathering.then(case.equation), stored)


def _pending(value: Value, gathering: Gathering, stored: Stored | None) -> Value:
    slots = value.slots and value.slots.moved(is_mixed=False)
    return Value(None, value.facts, False, slots, stored, gathering)


def _half_of(case: Case) -> np.dtype | None:
    """Returns the precision in which a weight may be gathered; None if it is no master.

    It is half precision if every use is. Where only the program casts (masters of
    weights that the caller has cast), it is the dtype that the program declares there.
    """
    known, settings, equation = properties(case.name), case.settings, case.equation
    is_sent = (known.gathers or known.spreads) and len(case.operands) == 1
    if not is_sent or not _is_master(case.operands[0]):
        return None
    source, result = avals((equation.invars[0], equation.outvars[0]))
    if source.sharding.mesh != result.sharding.mesh:
        return None  # between axes of different kinds
    if settings.is_enabled and source.dtype != FULL:
        return None
    if not settings.is_enabled:
        return source.dtype if source.dtype != FULL else None
    return settings.dtype if case.demands[0] == Demand.HALF else FULL


def _is_master(value: Value) -> bool:
    facts = value.facts
    return facts.is_declared and facts.is_weight and value.dtype == FULL


def product_of_weight(case: Case, choice: Choice) -> Value | None:
    """Binds a product whose weight's gradient is in the dtype of sums over devices.

    Returns None for other products, and if that dtype is not wider than the product's.
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
    """Returns whether devices should sum a weight's gradient in half precision.

    They sum the output of a product, which is float32 in the form for CPUs.
    """
    if not case.run.uses.wire:
        return False
    summed = dtype_of_sums(case.settings.wire, case.name)
    return summed is not None and is_half(summed)


# --- Weights at the entry of `jax.shard_map` ------------------------------------------


def entries_of(case: Case, demands: Wanted) -> list[list[AnyArray]]:
    """Returns the inputs of a `shard_map` for each operand: it, or rounded and zeros.

    Args:
        case: The `shard_map`.
        demands: The demands of its program on its operands.
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
    """Restores, inside the `shard_map`, the operand that was passed as these arrays."""
    return joined(*arrays) if len(arrays) == 2 else arrays[0]


def _is_sharded(spec: Any, axes: Collection[str]) -> bool:
    """Returns whether an operand is sharded over all axes."""
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return set(axes) <= {name for part in parts for name in part}


def _dtype_of(
    settings: Settings, wire: Wire, declared_dtype: np.dtype, demand: Demand
) -> np.dtype | None:
    """Returns the dtype in which a weight is passed; None if unchanged.

    A recipe quantizes from float32. From rounded values the loss would differ from the
    one without gradients, where nothing is gathered early.
    """
    if not settings.is_enabled:
        half = declared_dtype
    elif settings.recipe is not None:
        return None
    else:
        half = settings.dtype if demand == Demand.HALF else FULL
    dtype = wire.gather_dtype or half
    return None if dtype == FULL or half == FULL else np.dtype(dtype)


# --- Weights and data -----------------------------------------------------------------
#
# A recipe takes for weights all values computed from weights and constants only. Values
# that pass through integers or booleans, as with masks, pruning and rounding, keep
# their origin. `Origin` lists the kinds.

# Lookups and loops: their operands count whatever their dtype.
_BY_ALL = frozenset(("gather", "scan", "while"))
_CALLBACKS = frozenset(("infeed", "io_callback", "pure_callback"))


def note_origins(case: Case, results: Sequence[Value]) -> None:
    """Records the origins of the results of an equation."""
    kind = properties(case.name).kind
    if properties(case.name).moves and case.name != "gather":
        return
    origin = _origin_of(case)
    for value in results:
        # An inner program has determined it, except for a loop's carry.
        if kind is not PrimitiveClass.RECURSE or value.facts.origin is Origin.DATA:
            value.facts = value.facts._replace(origin=origin)
        if case.run.uses.slots and value.slots is None:
            value.slots = slots_for(value.facts, case.operands)


def _origin_of(case: Case) -> Origin:
    """Returns the origin of an equation's results, as far as the equation shows it."""
    name, known = case.name, properties(case.name)
    is_product, is_by_all = known.kind is PrimitiveClass.HALF, name in _BY_ALL
    # An index or a predicate selects values, and is not among them.
    operands = case.operands if is_by_all else case.castable or case.operands
    origins = [v.facts.origin for v in operands]
    found = together_from(origins)
    if name == "random_bits":
        return Origin.NOISE if Origin.DATA in found else found
    # A matmul of the program's constants, such as a whole batch, gives activations.
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
    """Returns the slots of a weight that is computed from others: the first one's.

    A parameter comes before the result of a matmul, as in `a @ b + w`.
    """
    if Origin.WEIGHT not in facts.origin:
        return None
    weights = [v for v in operands if v.slots and Origin.WEIGHT in v.facts.origin]
    first = min(weights, key=lambda v: not v.facts.is_weight, default=None)
    return first and first.slots and first.slots.moved(is_mixed=True)


def are_weights(case: Case) -> list[bool]:
    """Returns which of the two operands of a product are weights.

    Weights combined by a matmul are a weight in a matmul with data. With batch axes, as
    in attention to learned queries, they are data.
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
