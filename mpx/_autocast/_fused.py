"""Operations of mpx's own that autocast rewrites as one: fused operations.

Such an operation represents several equations, and can be computed in several ways: by
one kernel, or by products with operations between. In a program it is the equation of a
`jax.custom_batching.custom_vmap`, in a named scope that carries the operation. So it is
found whatever was mapped over, and can be made again in another precision. Around it is
a call with derivative rules, which belong to one precision and are made again with it;
its scope carries the operation, too.

Rules and decisions see the operation as one equation of a primitive with its name: a
product of its first operands. Its derivatives are those of the chosen precision, and of
the kernel if there is one.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

from jax.extend import core
from jax.extend.core import JaxprEqn

from .._base.errors import describe
from .._base.jax_compat import scope_names
from .._base.typing import AnyArray, Aval
from .._program import (
    PrimitiveClass,
    aval_of,
    avals,
    data_of,
    data_scope,
    program_of,
    with_lines_of,
)
from .._quantize import AbstractRecipe, Target
from .._settings import Precision, Rule, ambient, trace
from ._context import Usage, Value, computed
from ._decide import Case, Choice, Reason, apply_rules, choose, noted
from ._emit import Rewrite, evaluate_within
from ._stacks import emit_wide

# --- The operation --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class FusedOperation:
    """An operation. Equal ones must have equal texts.

    Attributes:
        name: Its name in rules and reports.
        factors: The number of its first operands that are cast to half precision.
        text: All that distinguishes it from others of its name, without a slash.
        platform: The platform that its branches are for; None if unknown.
        may_decompose: Whether its products may be quantized one by one.
        bind: Computes it for a target, with its derivatives.
        decompose: Computes it by the operations that it represents.
        path: Returns how it is computed for a target, in words.
        multiplications: Returns the number of its multiplications, from the types of
            its factors.
    """

    name: str
    factors: int
    text: str
    platform: str | None
    may_decompose: bool
    bind: Callable[[list[AnyArray], Target | None], tuple[AnyArray, ...]]
    decompose: Callable[[list[AnyArray]], tuple[AnyArray, ...]]
    path: Callable[[list[AnyArray], Target | None], str]
    multiplications: Callable[[list[Aval]], int]


def fused_operation(
    operation: FusedOperation, *, is_call: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Returns a context that marks the one equation traced inside as an operation.

    Args:
        operation: The operation.
        is_call: Whether the equation is the call with the derivative rules.
    """
    kind = "call" if is_call else "operation"
    text = f"mpx.{operation.name}.{kind}({operation.text})"
    return data_scope(text, (operation, is_call))


def operation_of(scope: str) -> FusedOperation | None:
    """Returns the operation that a scope belongs to, or None."""
    operation, _ = data_of(scope, tuple) or (None, False)
    return operation


def innermost_operation(equation: JaxprEqn) -> tuple[FusedOperation | None, bool]:
    """Returns the operation that an equation is, and whether it is the call around."""
    scopes = scope_names(equation)
    return (data_of(scopes[-1], tuple) if scopes else None) or (None, False)


# --- The rewriting --------------------------------------------------------------------


def or_fused(name: str, otherwise: Rewrite) -> Rewrite:
    """Rewrites a primitive, of which some equations are mpx's own operations.

    Args:
        name: The primitive.
        otherwise: The rewriting of the other equations.
    """

    @functools.wraps(otherwise)
    def rewrite(case: Case) -> list[Value]:
        operation, is_call = innermost_operation(case.equation)
        # The operation is a `custom_vmap_call`, the call around it is not. Any other
        # equation with the scope of an operation is only inside of one.
        if operation is None or is_call == (name == "custom_vmap_call"):
            return otherwise(case)
        if is_call:
            # A trace within a derivative rule does not contain the line of the call.
            inner = program_of(case.equation)
            closed = with_lines_of(inner, case.equation, all_of_it=True)
            return evaluate_within(case, closed)
        return _rewrite(case, operation)

    return rewrite


def _rewrite(case: Case, operation: FusedOperation) -> list[Value]:
    # The operation as an equation of a primitive, with the operands that are cast.
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
    """Computes an operation by its products, which a recipe quantizes."""
    attention = dataclasses.replace(recipe, fp8_dpa=True)
    closed = trace(lambda *arrays: operation.decompose(list(arrays)))(
        *avals(case.equation.invars)
    )
    results = evaluate_within(case.with_recipe(attention), closed)
    # The user's own recipe counts as used, too.
    if attention in case.run.used.recipes:
        case.run.note(Usage(recipes=frozenset((recipe,))))
    return results


def _emit(
    case: Case, rest: list[AnyArray], operation: FusedOperation, choice: Choice
) -> list[Value]:
    """Binds an operation, with its factors in the chosen precision."""
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
    """Binds an operation with the operands and the operation of the user's function."""
    arrays, params = rule._rewritten(case.candidate, [v.array for v in case.operands])
    operation = params.get("operation")
    if not isinstance(operation, FusedOperation):
        raise rule._refused(case.candidate, f"{describe(operation)} as `operation`")
    with noted(case.name, Choice(PrimitiveClass.HALF, Reason.RULE, rule=rule)):
        with rule._binding(case.candidate):
            bound = operation.bind([*arrays, *rest], case.settings.target)
        for x, variable in zip(bound, case.equation.outvars, strict=True):
            rule._check_shape(case.candidate, x, aval_of(variable))
        return list(map(computed, bound))
