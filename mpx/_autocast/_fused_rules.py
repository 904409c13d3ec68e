"""Rewriting operations of mpx's own; see `_fused`.

Rules and decisions see such an operation as one equation of a primitive that has its
name: a product of its first operands. What it becomes has the derivatives that belong
to the precision that was chosen, the kernel's where there is one.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import JaxprEqn

from .._jax_compat import open_jaxpr
from .._program import PrimitiveClass, aval_of, program_of
from .._quantize import AbstractRecipe
from ._choice import Case, Choice, choose
from ._control_flow import evaluate_closed
from ._decisions import Precision, Reason
from ._demand import Demand
from ._fused import FusedOperation, fused_operation_of, is_fused_call
from ._interpreter import Rewrite, candidate_of, find_rule
from ._notes import is_taking_notes, noted
from ._region import trace
from ._rules import Rule
from ._settings import Place, Run
from ._values import Value, computed


def or_fused(name: str, otherwise: Rewrite) -> Rewrite:
    """How to rewrite a primitive, of which some equations are operations of mpx's own.

    Args:
        name: The primitive.
        otherwise: How to rewrite the others.
    """

    @functools.wraps(otherwise)
    def rewrite(
        run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Any
    ) -> list[Value]:
        if name == "custom_vmap_call":
            operation = fused_operation_of(equation)
            if operation is not None:
                return _rewrite(run, place, equation, operands, demands, operation)
        elif is_fused_call(equation):
            jaxpr = _from_the_same_line(equation)
            return evaluate_closed(run, place, jaxpr, operands, demands)
        return otherwise(run, place, equation, operands, demands)

    return rewrite


def _from_the_same_line(equation: JaxprEqn) -> Any:
    """The program of an equation, as if the user's line had made all of it.

    What is traced within a derivative rule does not know who called.
    """
    closed = program_of(equation)
    jaxpr = open_jaxpr(closed)
    traceback = equation.source_info.traceback
    equations = [
        inner.replace(source_info=inner.source_info.replace(traceback=traceback))
        for inner in jaxpr.eqns
    ]
    return core.ClosedJaxpr(
        jaxpr.replace(eqns=equations), getattr(closed, "consts", ())
    )


def _rewrite(
    run: Run,
    place: Place,
    equation: JaxprEqn,
    operands: list[Value],
    demands: tuple[Demand, ...],
    operation: FusedOperation,
) -> list[Value]:
    case = _case(place, equation, operands, demands, operation)
    rule = find_rule(run, place, case)
    if rule is not None and isinstance(rule.precision, AbstractRecipe):
        place = _with_recipe(place, rule.precision)
        case, rule = case._replace(place=place), None
    if rule is not None and not isinstance(rule.precision, Precision):
        return _rewritten_by(rule, place, case, operands)
    is_asked_for = rule is not None and rule.precision is Precision.LOW
    if is_asked_for and place.settings.recipe is None:
        rule, is_asked_for = None, False
    choice = choose(case, rule)
    recipe = place.settings.recipe
    if recipe is not None and (is_asked_for or choice.reason is Reason.PRODUCT):
        if operation.may_decompose and (is_asked_for or recipe.fp8_dpa):
            return _decomposed(run, place, equation, operands, demands, operation)
        why = "products of data with data" if operation.may_decompose else "one kernel"
        choice = choice._replace(detail=f"not quantized: {why}")
    return _emit(place, case, operands, operation, choice)


def _case(
    place: Place,
    equation: JaxprEqn,
    operands: list[Value],
    demands: tuple[Demand, ...],
    operation: FusedOperation,
) -> Case:
    """The operation as an equation of a primitive, of the operands that are cast."""
    count = operation.factors
    whole = equation.replace(
        primitive=core.Primitive(operation.name),
        params={"operation": operation},
        invars=equation.invars[:count],
    )
    return Case(place, whole, operands[:count], demands[0], False, False)


def _with_recipe(place: Place, recipe: AbstractRecipe) -> Place:
    settings = dataclasses.replace(place.settings, recipe=recipe)
    return dataclasses.replace(place, settings=settings)


def _decomposed(
    run: Run,
    place: Place,
    equation: JaxprEqn,
    operands: list[Value],
    demands: tuple[Demand, ...],
    operation: FusedOperation,
) -> list[Value]:
    """Its products one by one, which a recipe quantizes."""
    recipe = place.settings.recipe
    assert recipe is not None
    whole = dataclasses.replace(recipe, fp8_dpa=True)
    place = _with_recipe(place, whole)
    closed = trace(lambda *arrays: operation.decompose(list(arrays)))(
        *(v.aval for v in equation.invars)
    )
    results = evaluate_closed(run, place, closed, operands, demands)
    if whole in run.used:
        run.used.add(recipe)
    return results


def _emit(
    place: Place, case: Case, operands: list[Value], operation: Any, choice: Choice
) -> list[Value]:
    arrays = _cast(case, operands, choice)
    target = place.settings.target
    if is_taking_notes():
        parts = [choice.detail, operation.path(arrays, target)]
        choice = choice._replace(detail="; ".join(filter(None, parts)))
    with noted(operation.name, choice):
        return _results(operation.bind(arrays, target), choice.result)


def _cast(case: Case, operands: list[Value], choice: Choice) -> list[Any]:
    """The operands, those that it multiplies in the precision that was chosen."""
    count = len(case.operands)
    factors = [
        v.cast(aval_of(atom).dtype if choice.dtype is None else choice.dtype)[0]
        for v, atom in zip(case.operands, case.equation.invars, strict=True)
    ]
    return factors + [v.array for v in operands[count:]]


def _results(arrays: Sequence[Any], dtype: Any) -> list[Value]:
    """The results, of which the first is a product."""
    first, *rest = arrays
    result = computed(first, is_product=True)
    if dtype is not None and dtype != first.dtype:
        wide = jax.lax.convert_element_type(first, dtype)
        result = computed(wide, is_product=True)
        result.narrow = first
    return [result, *map(computed, rest)]


def _rewritten_by(
    rule: Rule, place: Place, case: Case, operands: list[Value]
) -> list[Value]:
    """What a function of the user's makes of it: operands and the operation."""
    rewrite: Any = rule.precision
    factors = [v.array for v in case.operands]
    arrays, params = rewrite(candidate_of(place, case), factors)
    rest = [v.array for v in operands[len(factors) :]]
    with noted(case.name, Choice(PrimitiveClass.HALF, Reason.RULE, rule=rule)):
        bound = params["operation"].bind([*arrays, *rest], place.settings.target)
        return _results(bound, None)
