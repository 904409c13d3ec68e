"""Which values a recipe takes for weights: what comes from weights and constants alone.

Numbers that pass through integers or truth values, as those of masks, pruning and
rounding, count as what they were. `Origin` has the kinds.
"""

from collections.abc import Sequence

from .._program import PrimitiveClass, aval_of, properties
from .._recipe_state import Slots
from ._context import Facts, Value, is_castable
from ._decide import Case
from ._origin import CONSTANT, Origin, together_from

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
