"""Operations of mpx's own that autocast takes as one.

Such an operation stands for several equations, and can be computed in more than one
way: by one kernel, or by products with something in between. In a program it is the
equation of a `jax.custom_batching.custom_vmap`, in a named scope that carries the
operation; so it is found whatever was mapped over, and can be made again in another
precision. Around it stands a call with derivative rules, which belong to one precision
and are made again with it; its scope carries the operation, too.
"""

import abc
import contextlib
from typing import ClassVar

from jax.extend.core import JaxprEqn

from ._jax_compat import scope_names
from ._program import data_of, data_scope
from ._quantize import Target
from ._typing import AnyArray, Aval


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


def innermost_operation(equation: JaxprEqn) -> tuple[FusedOperation | None, bool]:
    """The operation that an equation is, and whether it is a call around it."""
    scopes = scope_names(equation)
    return (data_of(scopes[-1], tuple) if scopes else None) or (None, False)
