"""Rewriting operations of mpx's own: see `mpx._fused_operation`.

Rules and decisions see such an operation as one equation of a primitive that has its
name: a product of its first operands. What it becomes has the derivatives that belong
to the precision that was chosen, the kernel's where there is one.
"""

import dataclasses
import functools

from jax.extend import core
from jax.extend.core import JaxprEqn

from .._ambient_record import ambient, trace
from .._errors import describe
from .._fused_operation import FusedOperation, innermost_operation
from .._program import (
    PrimitiveClass,
    aval_of,
    program_of,
    with_lines_of,
)
from .._rules import Precision, Rule
from .._typing import AnyArray
from ._context import Place, Run, Value, computed
from ._decide import Case, Choice, Reason, apply_rules, choose
from ._demand import Wanted
from ._emit import Rewrite, evaluate
from ._notes import noted
from ._records import Usage


def or_fused(name: str, otherwise: Rewrite) -> Rewrite:
    """How to rewrite a primitive, of which some equations are operations of mpx's own.

    Args:
        name: The primitive.
        otherwise: How to rewrite the others.
    """

    @functools.wraps(otherwise)
    def rewrite(
        run: Run,
        place: Place,
        equation: JaxprEqn,
        operands: list[Value],
        demands: Wanted,
    ) -> list[Value]:
        operation, is_call = innermost_operation(equation)
        # The operation is a `custom_vmap_call`, and the call around it is none. Any
        # other equation with the scope of one only stands inside of it.
        if operation is None or is_call == (name == "custom_vmap_call"):
            return otherwise(run, place, equation, operands, demands)
        if is_call:
            # What is traced within a derivative rule does not know who called.
            closed = with_lines_of(program_of(equation), equation, all_of_it=True)
            return evaluate(run, place, closed, operands, demands)
        return _rewrite(run, place, equation, operands, demands, operation)

    return rewrite


def _rewrite(
    run: Run,
    place: Place,
    equation: JaxprEqn,
    operands: list[Value],
    demands: Wanted,
    operation: FusedOperation,
) -> list[Value]:
    case = _case(place, equation, operands, demands, operation)
    case, rule = apply_rules(run, case)
    if rule is not None and not isinstance(rule.precision, Precision):
        return _rewritten_by(rule, case, operands)
    is_asked_for = rule is not None and rule.precision is Precision.LOW
    choice = choose(case, rule)
    recipe = case.settings.recipe
    if recipe is not None and (is_asked_for or choice.reason is Reason.PRODUCT):
        if operation.may_decompose and (is_asked_for or recipe.fp8_dpa):
            return _decomposed(run, case, equation, operands, demands, operation)
        why = "products of data with data" if operation.may_decompose else "one kernel"
        choice = choice._replace(detail=f"not quantized: {why}")
    return _emit(case, operands, operation, choice)


def _case(
    place: Place,
    equation: JaxprEqn,
    operands: list[Value],
    demands: Wanted,
    operation: FusedOperation,
) -> Case:
    """The operation as an equation of a primitive, of the operands that are cast."""
    count = operation.factors
    whole = equation.replace(
        primitive=core.Primitive(operation.name),
        params={"operation": operation},
        invars=equation.invars[:count],
    )
    return Case(place, whole, operands[:count], demands[0], False)


def _decomposed(
    run: Run,
    case: Case,
    equation: JaxprEqn,
    operands: list[Value],
    demands: Wanted,
    operation: FusedOperation,
) -> list[Value]:
    """Its products one by one, which a recipe quantizes."""
    recipe = case.settings.recipe
    assert recipe is not None
    whole = dataclasses.replace(recipe, fp8_dpa=True)
    place = case.with_recipe(whole).place
    closed = trace(lambda *arrays: operation.decompose(list(arrays)))(
        *(aval_of(v) for v in equation.invars)
    )
    results = evaluate(run, place, closed, operands, demands)
    # The recipe as the user wrote it has then been used, too.
    if whole in run.used.recipes:
        run.note(Usage(recipes=frozenset((recipe,))))
    return results


def _emit(
    case: Case, operands: list[Value], operation: FusedOperation, choice: Choice
) -> list[Value]:
    arrays = _cast(case, operands, choice)
    target = case.settings.target
    if ambient().takes_notes:
        parts = [choice.detail, operation.path(arrays, target)]
        choice = choice._replace(detail="; ".join(filter(None, parts)))
    with noted(operation.name, choice):
        return list(map(computed, operation.bind(arrays, target)))


def _cast(case: Case, operands: list[Value], choice: Choice) -> list[AnyArray]:
    """The operands, those that it multiplies in the precision that was chosen."""
    count = len(case.operands)
    factors = [
        v.cast(aval_of(atom).dtype if choice.dtype is None else choice.dtype)
        for v, atom in zip(case.operands, case.equation.invars, strict=True)
    ]
    return factors + [v.array for v in operands[count:]]


def _rewritten_by(rule: Rule, case: Case, operands: list[Value]) -> list[Value]:
    """What a function of the user's makes of it: operands and the operation."""
    factors = [v.array for v in case.operands]
    arrays, params = rule._rewritten(case.candidate, factors)
    operation = params.get("operation")
    if not isinstance(operation, FusedOperation):
        raise rule._refused(case.candidate, f"{describe(operation)} as `operation`")
    rest = [v.array for v in operands[len(factors) :]]
    with noted(case.name, Choice(PrimitiveClass.HALF, Reason.RULE, rule=rule)):
        with rule._binding(case.candidate):
            bound = operation.bind([*arrays, *rest], case.settings.target)
        for x, variable in zip(bound, case.equation.outvars, strict=True):
            rule._check_shape(case.candidate, x, aval_of(variable))
        return list(map(computed, bound))
