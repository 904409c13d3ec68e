"""Rewriting operations of mpx's own: see `mpx._fused_operation`.

Rules and decisions see such an operation as one equation of a primitive that has its
name: a product of its first operands. What it becomes has the derivatives that belong
to the precision that was chosen, the kernel's where there is one.
"""

import dataclasses
import functools

from jax.extend import core

from .._ambient_record import ambient, trace
from .._errors import describe
from .._fused_operation import FusedOperation, innermost_operation
from .._program import PrimitiveClass, aval_of, avals, program_of, with_lines_of
from .._quantize import AbstractRecipe
from .._rules import Precision, Rule
from .._typing import AnyArray
from ._context import Usage, Value, computed
from ._decide import Case, Choice, Reason, apply_rules, choose
from ._emit import Rewrite, evaluate_within
from ._notes import noted
from ._wide import emit_wide


def or_fused(name: str, otherwise: Rewrite) -> Rewrite:
    """How to rewrite a primitive, of which some equations are operations of mpx's own.

    Args:
        name: The primitive.
        otherwise: How to rewrite the others.
    """

    @functools.wraps(otherwise)
    def rewrite(case: Case) -> list[Value]:
        operation, is_call = innermost_operation(case.equation)
        # The operation is a `custom_vmap_call`, and the call around it is none. Any
        # other equation with the scope of one only stands inside of it.
        if operation is None or is_call == (name == "custom_vmap_call"):
            return otherwise(case)
        if is_call:
            # What is traced within a derivative rule does not know who called.
            inner = program_of(case.equation)
            closed = with_lines_of(inner, case.equation, all_of_it=True)
            return evaluate_within(case, closed)
        return _rewrite(case, operation)

    return rewrite


def _rewrite(case: Case, operation: FusedOperation) -> list[Value]:
    # The operation as an equation of a primitive, of the operands that are cast.
    count = operation.factors
    rest = [v.array for v in case.operands[count:]]
    equation = case.equation.replace(
        primitive=core.Primitive(operation.name),
        params={"operation": operation},
        invars=case.equation.invars[:count],
    )
    whole, rule = apply_rules(
        case._replace(equation=equation, operands=case.operands[:count])
    )
    if rule is not None and not isinstance(rule.precision, Precision):
        return _rewritten_by(rule, whole, rest)
    is_asked_for = rule is not None and rule.precision is Precision.LOW
    choice, recipe = choose(whole, rule), whole.settings.recipe
    if recipe is not None and (is_asked_for or choice.reason is Reason.PRODUCT):
        if operation.may_decompose and (is_asked_for or recipe.fp8_dpa):
            return _decomposed(case, recipe, operation)
        why = "activation matmuls" if operation.may_decompose else "one kernel"
        choice = choice._replace(detail=f"not quantized: {why}")
    if case.place.has_wide_loop:
        return emit_wide(whole, choice, lambda c, how: _emit(c, rest, operation, how))
    return _emit(whole, rest, operation, choice)


def _decomposed(
    case: Case, recipe: AbstractRecipe, operation: FusedOperation
) -> list[Value]:
    """Its products one by one, which a recipe quantizes."""
    attention = dataclasses.replace(recipe, fp8_dpa=True)
    closed = trace(lambda *arrays: operation.decompose(list(arrays)))(
        *avals(case.equation.invars)
    )
    results = evaluate_within(case.with_recipe(attention), closed)
    # The recipe as the user wrote it has then been used, too.
    if attention in case.run.used.recipes:
        case.run.note(Usage(recipes=frozenset((recipe,))))
    return results


def _emit(
    case: Case, rest: list[AnyArray], operation: FusedOperation, choice: Choice
) -> list[Value]:
    """Binds it, what it multiplies in the precision that was chosen."""
    atoms, target = case.equation.invars, case.settings.target
    arrays = [
        v.cast(choice.dtype or aval_of(atom).dtype)
        for v, atom in zip(case.operands, atoms, strict=True)
    ] + rest
    if ambient().takes_notes:
        parts = [choice.detail, operation.path(arrays, target)]
        choice = choice._replace(detail="; ".join(filter(None, parts)))
    with noted(operation.name, choice):
        return list(map(computed, operation.bind(arrays, target)))


def _rewritten_by(rule: Rule, case: Case, rest: list[AnyArray]) -> list[Value]:
    """What a function of the user's makes of it: operands and the operation."""
    factors = [v.array for v in case.operands]
    arrays, params = rule._rewritten(case.candidate, factors)
    operation = params.get("operation")
    if not isinstance(operation, FusedOperation):
        raise rule._refused(case.candidate, f"{describe(operation)} as `operation`")
    with noted(case.name, Choice(PrimitiveClass.HALF, Reason.RULE, rule=rule)):
        with rule._binding(case.candidate):
            bound = operation.bind([*arrays, *rest], case.settings.target)
        for x, variable in zip(bound, case.equation.outvars, strict=True):
            rule._check_shape(case.candidate, x, aval_of(variable))
        return list(map(computed, bound))
