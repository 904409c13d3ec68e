"""Operations of mpx's own that autocast takes as one.

Such an operation stands for several equations, and can be computed in more than one
way: by one kernel, or by products with something in between. In a program it is the
equation of a `jax.custom_batching.custom_vmap`, in a named scope that carries the
operation; so it is found whatever was mapped over, and can be made again in another
precision. Around it stands a call with derivative rules, which belong to one precision
and are made again with it; its scope carries the operation, too.
"""

import contextlib
import dataclasses
from collections.abc import Callable

from jax.extend.core import JaxprEqn

from ._jax_compat import scope_names
from ._program import data_of, data_scope
from ._quantize import Target
from ._typing import AnyArray, Aval


@dataclasses.dataclass(frozen=True, eq=False)
class FusedOperation:
    """An operation. Equal ones must have equal texts.

    Attributes:
        name: What rules and reports call it.
        factors: How many of its operands, the first, are cast to half precision.
        text: All that tells it from others of its name, without a slash.
        platform: The platform that its branches are for; None if that is not known.
        may_decompose: Whether its products may be quantized one by one.
        bind: Computes it for a target, with its derivatives.
        decompose: Computes it by the operations that it stands for.
        path: In which way it is computed for a target, in words.
        multiplications: How many pairs of numbers it multiplies, by the types of its
            factors.
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
    """The one equation that is traced inside is an operation.

    Args:
        operation: The operation.
        is_call: What is traced inside is the operation with its derivatives.
    """
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
