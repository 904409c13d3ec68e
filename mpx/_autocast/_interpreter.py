"""Emitting a program again, equation by equation, each in its precision.

`evaluate` walks one jaxpr. Equations that hold a program of their own are rewritten by
the functions that the run was given (`_control_flow`, `_custom_rules`); everything else
is bound here, after casting its operands to what `choose` says.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from .._jax_compat import (
    bind_equation,
    equation_context,
    is_differentiated,
    scope_names,
)
from .._program import (
    Island,
    PrimitiveClass,
    aval_of,
    avals,
    class_of,
    count,
    parts,
    properties,
)
from .._quantize import AbstractRecipe
from . import _strict
from ._choice import Case, Choice, choose
from ._decisions import Candidate, Precision, Reason
from ._demand import Demand, Demands, demands_of
from ._emission import emit_operation
from ._linear import emit_linear, path_text, product_of, quantized, weight_of
from ._notes import is_note, is_taking_notes, noted
from ._reach import reach_in
from ._region import is_region, settings_within
from ._remat import emit_island
from ._rules import Rule
from ._settings import UNUSED, Place, Reach, Run
from ._values import (
    FLOAT16,
    FULL,
    Facts,
    Provenance,
    Value,
    computed,
    constant,
    declared,
    is_castable,
    literal,
)

Rewrite = Callable[[Run, Place, Any, list[Value], tuple[Demand, ...]], list[Value]]


def evaluate(
    run: Run,
    place: Place,
    jaxpr: Any,
    consts: Sequence[Any],
    operands: Sequence[Value],
    results: tuple[Demand, ...],
) -> list[Value]:
    """Emits a program again.

    Args:
        run: The run.
        place: Where the program stands.
        jaxpr: The program.
        consts: The arrays that it holds.
        operands: Its inputs.
        results: What is wanted of each of its results.

    Returns:
        Its results.
    """
    are_declared = tuple(v.facts.provenance is Provenance.DECLARED for v in operands)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, results)
    reach = reach_in(jaxpr, place.reach) if place.reach else {}
    values: dict[Any, Value] = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, array in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = constant(array, parameter="")

    def emit(place: Place, equation: JaxprEqn, values: dict[Any, Value]) -> None:
        inputs = [_read(values, atom) for atom in equation.invars]
        with equation_context(equation):
            here = _place_of(run, place, equation, reach)
            outputs = _emit(run, here, equation, inputs, ahead)
        if any(value.dtype == FLOAT16 for value in outputs):
            run.used.add(FLOAT16)
        values.update(zip(equation.outvars, outputs, strict=True))

    for part in _parts(place, jaxpr, values, ahead.residuals):
        if isinstance(part, Island):
            emit_island(run, place, part, values, ahead, emit)
        else:
            emit(place, part, values)
    return [_read(values, atom) for atom in jaxpr.outvars]


def _read(values: dict[Any, Value], atom: Any) -> Value:
    return literal(atom.val) if isinstance(atom, core.Literal) else values[atom]


def _parts(
    place: Place, jaxpr: Any, values: dict[Any, Value], residuals: frozenset[Any]
) -> list[Any]:
    """The equations of a program, those of islands together."""
    is_whole = place.has_own_rule or place.is_recomputed
    if is_whole or place.settings.residuals is None:
        return jaxpr.eqns

    def may_join(equation: JaxprEqn) -> bool:
        settings = settings_within(place.settings, scope_names(equation))
        is_asked_for = settings.is_enabled and settings.residuals == "small"
        is_stream = any(v in residuals for v in equation.outvars)
        return is_asked_for and not is_stream and not is_differentiated(equation)

    weights = [v for v in jaxpr.invars if values[v].facts.is_weight]
    return parts(jaxpr, weights, may_join)


def _place_of(
    run: Run, place: Place, equation: JaxprEqn, reach: Mapping[Any, Reach]
) -> Place:
    """The place inside of the scopes of an equation."""
    scopes = scope_names(equation)
    if run.has_recipe and not place.has_own_rule:
        found = tuple(reach.get(v, UNUSED) for v in equation.outvars)
        place = dataclasses.replace(place, reach=found)
    if not scopes:
        return place
    settings = settings_within(place.settings, scopes)
    if run.needs_scopes:
        named = tuple(s for s in scopes if not is_region(s) and not is_note(s))
        return dataclasses.replace(
            place, settings=settings, scopes=place.scopes + named
        )
    if settings is place.settings:
        return place
    return dataclasses.replace(place, settings=settings)


def _emit(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], ahead: Demands
) -> list[Value]:
    name = equation.primitive.name
    demands = tuple(map(ahead.demand, equation.outvars))
    rewrite = run.rewrites.get(name)
    if rewrite is not None:
        rule = place.settings.rules._find_for_program(name)
        if rule is None:
            return rewrite(run, place, equation, operands, demands)
        run.used.add(rule)
        choice = Choice(PrimitiveClass.RECURSE, Reason.RULE, rule=rule)
        with noted(name, choice):
            return emit_operation(equation, operands, choice)
    number = _number(equation, operands)
    if number is not None:
        return [number]
    if name == "convert_element_type":
        with noted(name, Choice(PrimitiveClass.CONVERT, Reason.CONVERTED)):
            return [_convert(place, equation, operands[0])]
    known = properties(name)
    if known.moves:
        with noted(name, Choice(class_of(name, FULL), Reason.MOVES)):
            return _move(equation, operands)
    if known.joins and _are_declared(equation, operands):
        with noted(name, Choice(class_of(name, FULL), Reason.MOVES)):
            return _join(equation, operands)
    demand = Demand.ANY
    for one in demands:
        demand |= one
    first = equation.outvars[0] if equation.outvars else None
    is_residual, is_scaling = first in ahead.residuals, first in ahead.scalings
    case = Case(place, equation, operands, demand, is_residual, is_scaling)
    return _emit_case(run, place, case)


# Rounded to the nearest by IEEE 754 wherever they run.
_ARITHMETIC = {
    "abs": np.abs,
    "add": np.add,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "sub": np.subtract,
}


def _number(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """The number that arithmetic on numbers of the program gives, such as `1 - rate`.

    Left to the program it would be a value that was computed in float32, and what it
    meets would be computed in float32, too.
    """
    function = _ARITHMETIC.get(equation.primitive.name)
    if function is None or not all(v.is_constant for v in operands):
        return None
    with np.errstate(all="ignore"):
        return literal(function(*(np.asarray(v.array) for v in operands)))


def _emit_case(run: Run, place: Place, case: Case) -> list[Value]:
    """Decides on one operation and binds it.

    A rule of the user's comes first. One that names a recipe changes what holds here
    and leaves the rest to autocast; one that is a function replaces all of it. A recipe
    has its say last, for it takes only what would be a product in half precision, or
    what a rule asks for by `Precision.LOW`.
    """
    rule = find_rule(run, place, case)
    if rule is not None and isinstance(rule.precision, AbstractRecipe):
        settings = dataclasses.replace(place.settings, recipe=rule.precision)
        place = dataclasses.replace(place, settings=settings)
        case, rule = case._replace(place=place), None
    if place.settings.recipe is None and rule is not None and rule._is_for_products:
        rule = None  # no recipe holds here
    if rule is not None and not isinstance(rule.precision, Precision):
        kind = class_of(case.name, place.settings.dtype)
        with noted(case.name, Choice(kind, Reason.RULE, rule=rule)):
            return _rewritten_by(rule, candidate_of(place, case), case)
    choice = choose(case, rule)
    is_asked_for = rule is not None and rule.precision is Precision.LOW
    if is_asked_for or choice.reason is Reason.PRODUCT:
        choice = quantized(case, choice, is_asked_for)
        if is_asked_for and choice.recipe is None:
            choice = choice._replace(reason=Reason.PRODUCT, rule=None)
    if choice.dtype == FLOAT16:
        run.used.add(FLOAT16)
    if place.settings.is_strict:
        _strict.refuse_unknown(case, choice)
        _strict.refuse_accident(case, choice)
    if choice.recipe is not None:
        return _emit_quantized(run, case, choice)
    with noted(case.name, choice):
        return emit_operation(case.equation, case.operands, choice)


def _emit_quantized(run: Run, case: Case, choice: Choice) -> list[Value]:
    assert choice.recipe is not None
    run.used.add(case.settings.recipe)
    product = product_of(case, choice)
    if case.settings.is_strict:
        _strict.refuse_slow(case, product)
    weight = ""
    if is_taking_notes():
        choice = choice._replace(detail=path_text(product))
        weight = weight_of(case.operands).facts.parameter or ""
    with noted(case.name, choice, weight):
        return emit_linear(case, choice, product, run.step)


def find_rule(run: Run, place: Place, case: Case) -> Rule | None:
    """The user's rule for an equation, which counts as used."""
    rules = place.settings.rules
    if not rules.rules or not place.settings.is_enabled:
        return None
    rule = rules._find(candidate_of(place, case))
    if rule is not None:
        run.used.add(rule)
    return rule


def candidate_of(place: Place, case: Case) -> Candidate:
    """What a rule is asked about."""
    return Candidate(
        primitive=case.name,
        kind=class_of(case.name, place.settings.dtype),
        dtype=place.settings.dtype,
        scopes=place.scopes,
        equation=case.equation,
        in_dtypes=tuple(v.dtype for v in case.operands),
        parameters=tuple(v.facts.parameter or None for v in case.operands),
    )


def _rewritten_by(rule: Rule, candidate: Candidate, case: Case) -> list[Value]:
    """Binds an equation to what the user's function says.

    A result that autocast cannot carry on, such as half precision in the place of
    float64, goes back to the dtype that the program declares.
    """
    arrays, params = rule._rewritten(candidate, [v.array for v in case.operands])
    equation = case.equation.replace(params=params)
    results = []
    for x, variable in zip(
        bind_equation(equation, *arrays), case.equation.outvars, strict=True
    ):
        if not (is_castable(variable.aval) and is_castable(jax.typeof(x))):
            declared_dtype = aval_of(variable).dtype
            if x.dtype != declared_dtype:
                x = jax.lax.convert_element_type(x, declared_dtype)
        results.append(computed(x))
    return results


def _are_declared(equation: JaxprEqn, operands: list[Value]) -> bool:
    return all(
        v.facts.provenance is Provenance.DECLARED
        for v, atom in zip(operands, equation.invars, strict=True)
        if is_castable(atom.aval)
    )


def _join(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Puts declared values side by side: the result is one, too."""
    bound = bind_equation(equation, *(v.array for v in operands))
    weights = [v for v in operands if v.facts.is_weight]
    facts = Facts(Provenance.DECLARED, is_weight=bool(weights))
    slots = weights[0].slots if weights else None
    return [
        Value(x, facts, slots=slots) if is_castable(v.aval) else computed(x)
        for x, v in zip(bound, equation.outvars, strict=True)
    ]


def _move(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves data in whatever precision it comes."""
    name = equation.primitive.name
    known = properties(name)
    if name == "stop_gradient" and operands[0].is_constant:
        return operands
    bound = bind_equation(equation, *(v.array for v in operands))
    is_parallel = len(bound) == len(operands)
    results = []
    for i, (array, variable) in enumerate(zip(bound, equation.outvars, strict=True)):
        source = operands[i] if is_parallel else operands[0]
        if not is_castable(variable.aval):
            results.append(computed(array))
            continue
        facts = source.facts
        # Only this makes a bias of a vector. A lookup in a small table, too, gives more
        # numbers than the table has, and yet is the beginning of a residual stream.
        if known.repeats and count(array.shape) > count(source.array.shape):
            facts = facts._replace(is_broadcast=True)
        slots = source.slots
        if name == "gather":  # rows of a table are data, whoever learned them
            facts = facts._replace(is_broadcast=False, parameter=None, is_weight=False)
            slots = None
        results.append(Value(array, facts, slots=slots))
    return results


def _convert(place: Place, equation: JaxprEqn, value: Value) -> Value:
    """A cast of the user's own."""
    if not place.settings.is_enabled:
        choice = Choice(PrimitiveClass.CONVERT, Reason.REGION)
        return emit_operation(equation, [value], choice)[0]
    target = equation.params["new_dtype"]
    from_aval, to_aval = avals((equation.invars[0], equation.outvars[0]))
    if not is_castable(from_aval) or not is_castable(to_aval):
        (array,) = bind_equation(equation, value.array)
        is_number = jax.numpy.issubdtype(from_aval.dtype, jax.numpy.integer)
        is_number = is_number or from_aval.dtype == np.bool_
        return declared(array) if is_number else computed(array)
    if from_aval.dtype == target:
        if equation.params.get("sharding") is None:
            return value
        params = {**equation.params, "new_dtype": value.dtype}
        (array,) = bind_equation(equation.replace(params=params), value.array)
        return Value(array, value.facts, slots=value.slots)
    array, _ = value.cast(target)
    provenance = Provenance.FULL if target == FULL else Provenance.HALF
    facts = value.facts._replace(provenance=provenance, is_broadcast=False)
    if facts.literal is not None:
        facts = facts._replace(provenance=Provenance.DECLARED, is_broadcast=True)
    result = Value(array, facts, value.is_constant, value.slots)
    if target == FULL:
        result.widened_by, result.narrow = equation, value.array
    return result
