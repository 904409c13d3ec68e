"""Operations of mpx's own that autocast takes as one.

Such an operation stands for several equations, and can be computed in more than one
way: by one kernel, or by products with something in between. In a program it is the
equation of a `jax.custom_batching.custom_vmap`, in a named scope whose name, a text,
carries the operation; so it is found whatever was mapped over, and can be made again in
another precision. Around it stands a call with derivative rules, which belong to one
precision and are made again with it. They are marked, too.
"""

import abc
import contextlib
from typing import Any, ClassVar

import jax
from jax.extend.core import JaxprEqn
from jaxtyping import Array

from .._jax_compat import scope_names
from .._quantize import Target


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
    def bind(self, arrays: list[Any], target: Target | None) -> tuple[Array, ...]:
        """Computes it, with its derivatives."""

    @abc.abstractmethod
    def decompose(self, arrays: list[Any]) -> tuple[Array, ...]:
        """Computes it by the operations that it stands for."""

    @abc.abstractmethod
    def path(self, arrays: list[Any], target: Target | None) -> str:
        """In which way it is computed, in words."""

    @abc.abstractmethod
    def multiplications(self, avals: list[Any]) -> int:
        """How many pairs of numbers it multiplies, by the types of its factors."""


class _Mark(str):
    """The name of a scope: a text for whoever reads it, and the operation."""

    operation: FusedOperation
    is_call: bool

    def __new__(cls, operation: FusedOperation, is_call: bool) -> "_Mark":
        kind = "call" if is_call else "operation"
        self = super().__new__(cls, f"mpx.{operation.name}.{kind}({operation.text})")
        self.operation, self.is_call = operation, is_call
        return self


def fused_operation(
    operation: FusedOperation,
) -> contextlib.AbstractContextManager[Any]:
    """The one equation that is traced inside is an operation."""
    return jax.named_scope(_Mark(operation, is_call=False))


def fused_call(operation: FusedOperation) -> contextlib.AbstractContextManager[Any]:
    """What is traced inside is an operation with its derivatives."""
    return jax.named_scope(_Mark(operation, is_call=True))


def is_mark(scope: str) -> bool:
    """Whether the name of a scope is a mark."""
    return isinstance(scope, _Mark)


def operation_of(scope: str) -> FusedOperation | None:
    """The operation that a scope belongs to, if it is a mark."""
    return scope.operation if isinstance(scope, _Mark) else None


def is_fused_call(equation: JaxprEqn) -> bool:
    """Whether an equation is a call with derivative rules around an operation."""
    scopes = scope_names(equation)
    mark = scopes[-1] if scopes else ""
    return isinstance(mark, _Mark) and mark.is_call


def fused_operation_of(equation: JaxprEqn) -> FusedOperation | None:
    """The operation that an equation is."""
    scopes = scope_names(equation)
    mark = scopes[-1] if scopes else ""
    if isinstance(mark, _Mark) and not mark.is_call:
        return mark.operation
    return None
