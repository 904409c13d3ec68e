"""Operations of mpx's own that autocast takes as one, and rewriting them.

Such an operation stands for several equations, and can be computed in more than one
way: by one kernel, or by products with something in between. In a program it is the
equation of a `jax.custom_batching.custom_vmap`, in a named scope that carries the
operation; so it is found whatever was mapped over, and can be made again in another
precision. Around it stands a call with derivative rules, which belong to one precision
and are made again with it; its scope carries the operation, too.

Rules and decisions see such an operation as one equation of a primitive that has its
name: a product of its first operands. What it becomes has the derivatives that belong
to the precision that was chosen, the kernel's where there is one.
"""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from .._jax_compat import scope_names
from .._program import (
    PrimitiveClass,
    aval_of,
    data_of,
    data_scope,
    program_of,
    with_lines_of,
)
from .._quantize import Target
from .._rules import Precision, Rule
from .._typing import AnyArray, Aval
from ._context import Place, Run, Value, computed
from ._decide import Case, Choice, Reason, choose, ruled
from ._demand import Wanted
from ._emit import Rewrite, evaluate
from ._notes import is_taking_notes, noted
from ._settings import trace


class FusedOperation(abc.ABC):
    """An operation. Equal ones must have equal texts.

    Attributes:
        name: What rules and reports call it.
        factors: How many of its operands, the first, are cast to half precision.
    """

    name: ClassVar[str]
    factors: ClassVar[int]

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """All that tells it from others of its name, without a slash."""

    @property
    @abc.abstractmethod
    def platform(self) -> str | None:
        """The platform that its branches are for; None if that is not known."""

    @property
    @abc.abstractmethod
    def may_decompose(self) -> bool:
        """Whether its products may be quantized one by one."""

    @abc.abstractmethod
    def bind(
        self, arrays: list[AnyArray], target: Target | None
    ) -> tuple[AnyArray, ...]:
        """Computes it, with its derivatives."""

    @abc.abstractmethod
    def decompose(self, arrays: list[AnyArray]) -> tuple[AnyArray, ...]:
        """Computes it by the operations that it stands for."""

    @abc.abstractmethod
    def path(self, arrays: list[AnyArray], target: Target | None) -> str:
        """In which way it is computed, in words."""

    @abc.abstractmethod
    def multiplications(self, avals: list[Aval]) -> int:
        """How many pairs of numbers it multiplies, by the types of its factors."""


def fused_operation(
    operation: FusedOperation,
) -> contextlib.AbstractContextManager[object]:
    """The one equation that is traced inside is an operation."""
    return _scope_of(operation, is_call=False)


def fused_call(operation: FusedOperation) -> contextlib.AbstractContextManager[object]:
    """What is traced inside is an operation with its derivatives."""
    return _scope_of(operation, is_call=True)


def _scope_of(
    operation: FusedOperation, is_call: bool
) -> contextlib.AbstractContextManager[object]:
    kind = "call" if is_call else "operation"
    text = f"mpx.{operation.name}.{kind}({operation.text})"
    return data_scope(text, (operation, is_call))


def operation_of(scope: str) -> FusedOperation | None:
    """The operation that a scope belongs to, if it belongs to one."""
    operation, _ = data_of(scope, tuple) or (None, False)
    return operation


def _innermost(equation: JaxprEqn) -> tuple[FusedOperation | None, bool]:
    """The operation that an equation is, and whether it is a call around it."""
    scopes = scope_names(equation)
    return (data_of(scopes[-1], tuple) if scopes else None) or (None, False)


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
        operation, is_call = _innermost(equation)
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
    case, rule = ruled(run, case)
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
    return Case(place, whole, operands[:count], demands[0], False, False)


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
    if whole in run.used:
        run.used.add(recipe)
    return results


def _emit(
    case: Case, operands: list[Value], operation: FusedOperation, choice: Choice
) -> list[Value]:
    arrays = _cast(case, operands, choice)
    target = case.settings.target
    if is_taking_notes():
        parts = [choice.detail, operation.path(arrays, target)]
        choice = choice._replace(detail="; ".join(filter(None, parts)))
    with noted(operation.name, choice):
        return _results(operation.bind(arrays, target), choice.result)


def _cast(case: Case, operands: list[Value], choice: Choice) -> list[AnyArray]:
    """The operands, those that it multiplies in the precision that was chosen."""
    count = len(case.operands)
    factors = [
        v.cast(aval_of(atom).dtype if choice.dtype is None else choice.dtype)[0]
        for v, atom in zip(case.operands, case.equation.invars, strict=True)
    ]
    return factors + [v.array for v in operands[count:]]


def _results(arrays: Sequence[AnyArray], dtype: np.dtype | None) -> list[Value]:
    """The results, of which the first is a product."""
    first, *rest = arrays
    result = computed(first, is_product=True)
    if dtype is not None and dtype != first.dtype:
        wide = jax.lax.convert_element_type(first, dtype)
        result = computed(wide, is_product=True)
        result.narrow = first
    return [result, *map(computed, rest)]


def _rewritten_by(rule: Rule, case: Case, operands: list[Value]) -> list[Value]:
    """What a function of the user's makes of it: operands and the operation."""
    rewrite: Any = rule.precision
    factors = [v.array for v in case.operands]
    arrays, params = rewrite(case.candidate, factors)
    rest = [v.array for v in operands[len(factors) :]]
    with noted(case.name, Choice(PrimitiveClass.HALF, Reason.RULE, rule=rule)):
        bound = params["operation"].bind([*arrays, *rest], case.settings.target)
        return _results(bound, None)
