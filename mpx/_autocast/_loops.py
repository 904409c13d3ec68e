"""What a scan stacks and carries in half precision.

A scan keeps its stacked inputs and results whole, and its derivative a gradient of
each. One cast in front of the loop, instead of one in every turn, halves both:

- An input that is cast by all that uses it inside gives every turn the same numbers. So
  does a weight with one use, whose gradient in each turn is that of one product. With
  several uses it is cast at each of them, and their gradients are summed in float32.
- A result that is cast by all that uses it outside is stacked as they will have it.
- A carry keeps its dtype. But where the residual stream is to be half precision, a body
  that adds to its carry and gives a sum in half precision carries that.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jax.extend.core import Jaxpr, Literal, Var

from .._jax_compat import is_differentiated, scope_names
from .._program import aval_of, distinct_equations, properties, sub_jaxprs
from .._typing import Atom
from ._context import FULL, Place, Provenance, Run, Value, is_castable
from ._demand import Demand, Wanted, demands_of
from ._settings import Settings
from ._streams import makers_of


def narrowed_stacks(
    run: Run,
    place: Place,
    jaxpr: Jaxpr,
    operands: Sequence[Value],
    wanted: Wanted,
    first: int,
) -> list[Value]:
    """The stacked operands of a scan, cast where every turn would cast its part.

    Args:
        run: The run.
        place: Where the body stands.
        jaxpr: The body.
        operands: What it gets: constants, what is carried, what is stacked.
        wanted: What is wanted of its results.
        first: How many operands are not stacked.
    """
    are_declared = tuple(v.facts.provenance is Provenance.DECLARED for v in operands)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, wanted)
    return [
        _narrowed(value, place.settings.dtype)
        if demand is Demand.HALF
        and _may_be_narrowed(run, place, jaxpr, variable, value)
        else value
        for value, variable, demand in zip(
            operands[first:], jaxpr.invars[first:], ahead.inputs[first:], strict=True
        )
    ]


def narrowed_results(
    place: Place, values: Sequence[Value], demands: Wanted
) -> list[Value]:
    """What a body gives to be stacked, cast if all that uses the stack casts it."""
    return [
        _narrowed(value, place.settings.dtype)
        if demand is Demand.HALF and value.facts.provenance is Provenance.FULL
        else value
        for value, demand in zip(values, demands, strict=True)
    ]


def _narrowed(value: Value, dtype: np.dtype) -> Value:
    facts = value.facts._replace(provenance=Provenance.HALF)
    return Value(value.cast(dtype)[0], facts, slots=value.slots)


def _may_be_narrowed(
    run: Run, place: Place, jaxpr: Jaxpr, variable: Var, value: Value
) -> bool:
    if value.dtype != FULL or not is_castable(aval_of(variable)):
        return False
    if value.facts.provenance is Provenance.FULL:
        return True
    # A recipe quantizes weights as they are, and not what is left of them.
    is_declared = value.facts.provenance is Provenance.DECLARED
    if place.settings.wire is not None:
        return False  # its gradients are summed over devices as float32
    return is_declared and not run.has_recipe and _uses(jaxpr, variable) == 1


def _uses(jaxpr: Jaxpr, variable: Var) -> int:
    """How many operations use a value; one in a loop counts as two."""
    found = sum(v is variable for v in jaxpr.outvars)
    for equation in jaxpr.eqns:
        places = [i for i, atom in enumerate(equation.invars) if atom is variable]
        if not places:
            continue
        subs = sub_jaxprs(equation)
        if properties(equation.primitive.name).moves:
            found += sum(_uses(jaxpr, v) for v in equation.outvars)
        elif not subs:
            found += len(places)
        for sub in subs:
            weight = 1 if sub.trips == 1 else 2
            inner = zip(sub.operands, sub.jaxpr.invars, strict=True)
            found += sum(weight * _uses(sub.jaxpr, v) for i, v in inner if i in places)
    return found


def streams_of(
    run: Run, settings: Settings, jaxpr: Jaxpr, first: int, count: int
) -> list[int]:
    """What a body carries and adds branches to, as the blocks of a model do.

    Args:
        run: The run.
        settings: What holds around the body.
        jaxpr: The body.
        first: How many constants come first.
        count: How much is carried.

    Returns:
        The numbers of what is a residual stream and may be half precision. Parameters
        of a training loop look alike, but for the derivatives beside them.
    """
    if settings.residual_stream != "half" or not settings.is_enabled:
        return []
    if any(map(is_differentiated, distinct_equations(jaxpr))):
        return []
    carried = list(enumerate(jaxpr.invars[first : first + count]))
    return [
        i
        for i, variable in carried
        if is_castable(aval_of(variable))
        and aval_of(variable).dtype == FULL
        and _streams_into(run, settings, jaxpr, jaxpr.outvars[i]).get(variable, False)
    ]


def _streams_into(
    run: Run, settings: Settings, jaxpr: Jaxpr, atom: Atom
) -> dict[Var, bool]:
    """The inputs that a value holds but for what was added; whether anything was."""
    are_declared = (False,) * len(jaxpr.invars)
    wanted = (Demand.HALF,) * len(jaxpr.outvars)
    ahead = demands_of(run, settings, jaxpr, are_declared, wanted)
    makers = makers_of(jaxpr)

    def inputs(atom: Atom, has_sum: bool) -> dict[Var, bool]:
        if isinstance(atom, Literal):
            return {}
        maker = makers.get(atom)
        if maker is None:
            return {atom: has_sum}
        if atom in ahead.residuals:
            return _united(inputs(a, True) for a in maker.invars)
        if properties(maker.primitive.name).moves:
            return inputs(maker.invars[0], has_sum)
        here, found = settings.at(scope_names(maker)), []
        for sub in sub_jaxprs(maker):
            number = maker.outvars.index(atom)
            if sub.trips != 1 or number not in sub.results:
                continue
            result = sub.jaxpr.outvars[sub.results.index(number)]
            inside = _streams_into(run, here, sub.jaxpr, result)
            for i, v in zip(sub.operands, sub.jaxpr.invars, strict=True):
                if i is not None and v in inside:
                    found.append(inputs(maker.invars[i], has_sum or inside[v]))
        return _united(found)

    return inputs(atom, False)


def _united(found: Iterable[dict[Var, bool]]) -> dict[Var, bool]:
    """All of them; something was added if it was on any way."""
    united: dict[Var, bool] = {}
    for one in found:
        for variable, has_sum in one.items():
            united[variable] = united.get(variable, False) or has_sum
    return united
