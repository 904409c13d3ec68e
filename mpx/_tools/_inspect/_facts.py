"""Follows values: the weights that they are, and the origins of their dtypes.

The *origin* of a value gave it its floating dtype: an input, a constant, a cast, a
*promotion* (an implicit cast by JAX: half precision met float32 in one expression), or
an operation that makes numbers. An operation passes on the origin of the operand with
its dtype. So a report can name the line that made a matmul in half-precision code
float32.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._base.typing import Aval
from ..._program import (
    Flow,
    Frame,
    PrimitiveClass,
    Span,
    aval_of,
    avals,
    properties,
    source_frames,
    source_span,
)
from ._report import HALF
from ._traced import line_text


@dataclasses.dataclass(frozen=True)
class Origin:
    """The reason for a value's dtype."""

    text: str
    is_constant: bool = False
    is_promotion: bool = False
    span: Span | None = None
    """Of a cast: the expression that it is in."""
    source: str = ""
    """Of a cast: the dtype that it casts from."""
    equation: int = 0
    """Of a cast: the identity of its equation."""
    is_fresh: bool = False
    """Of a cast: whether nothing but movement of data is between it and the value."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """The facts of a value."""

    parameters: tuple[str, ...] | None
    """The paths of the weights that it is: several if it joins them, () for a constant,
    None for data."""
    origin: Origin


CONSTANT = Fact((), Origin("a constant", is_constant=True))


class Facts(Flow[Fact]):
    """Propagates facts; `promotions` collects the implicit casts."""

    def __init__(self) -> None:
        """Starts without promotions."""
        self.promotions: set[int] = set()

    def constant(self, value: object) -> Fact:
        """Returns a fact of neither weight nor data."""
        return CONSTANT

    def join(self, a: Fact, b: Fact) -> Fact:
        """Returns data if one of them is; the origin is that of the first."""
        if a.parameters is None or b.parameters is None:
            parameters = None
        else:
            parameters = _union([a.parameters, b.parameters])
        return Fact(parameters, a.origin)

    def transfer(self, equation: JaxprEqn, facts: Sequence[Fact]) -> Sequence[Fact]:
        """Returns the facts of an operation's results."""
        parameters = _parameters(equation, facts)
        promoted = promotion(equation, facts)
        if promoted is not None:
            self.promotions.add(promoted.cast.equation)
        return [
            Fact(paths, _origin(equation, facts, promoted, aval_of(v)))
            for paths, v in zip(parameters, equation.outvars, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Promotion:
    """An operand was cast because another one has a wider dtype."""

    cast: Origin
    cause: Origin


def promotion(equation: JaxprEqn, facts: Sequence[Fact]) -> Promotion | None:
    """Returns the implicit cast before an operation; None if there is none.

    It is a cast from half precision in the expression of the operation, where another
    operand has a wider dtype without such a cast.
    """
    fresh = [f.origin for f in facts if f.origin.is_fresh and f.origin.source in HALF]
    if not fresh or len(facts) < 2:
        return None
    span = source_span(equation)
    casts = [origin for origin in fresh if origin.span == span]
    if span is None or not casts:
        return None
    for fact, variable in zip(facts, equation.invars, strict=True):
        # JAX functions that compute in float32 internally have the span of their call.
        is_other = fact.origin.span != span
        # A Python number has no dtype to promote to.
        is_weak = getattr(aval_of(variable), "weak_type", False)
        if is_other and not is_weak and _is_wide(aval_of(variable)):
            return Promotion(casts[0], fact.origin)
    return None


def is_float_cast(equation: JaxprEqn) -> bool:
    """Returns whether an equation only changes a floating dtype."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = _dtypes(equation)
    return before != after and _is_float(before) and _is_float(after)


def _dtypes(equation: JaxprEqn) -> tuple[Any, Any]:
    """Returns the dtypes of a cast's operand and result."""
    operand, result = avals((equation.invars[0], equation.outvars[0]))
    return operand.dtype, result.dtype


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _is_wide(aval: Aval) -> bool:
    return _is_float(aval.dtype) and aval.dtype.itemsize > 2


def _parameters(
    equation: JaxprEqn, facts: Sequence[Fact]
) -> Sequence[tuple[str, ...] | None]:
    """Returns the weights that results are: moved, cast or joined, not computed."""
    name, count = equation.primitive.name, len(equation.outvars)
    known = properties(name)
    is_cast = known.kind is PrimitiveClass.CONVERT
    # A gather takes rows by their numbers: the result is data, not a weight.
    if (known.moves or is_cast) and name != "gather":
        if len(facts) == count:
            return [fact.parameters for fact in facts]
        # The indices may depend on data: the n-th layer of a stack.
        return [facts[0].parameters] * count
    if known.joins and all(fact.parameters is not None for fact in facts):
        return [_union([fact.parameters or () for fact in facts])] * count
    return [None if facts else ()] * count


def _union(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted({path for several in paths for path in several}))


def _origin(
    equation: JaxprEqn, facts: Sequence[Fact], promoted: Promotion | None, aval: Aval
) -> Origin:
    if is_float_cast(equation):
        frames = source_frames(equation)
        before, after = _dtypes(equation)
        return Origin(
            f"cast to {after}{_at(frames)}",
            span=source_span(equation),
            source=str(before),
            # The walked program keeps the equation alive while facts are compared.
            equation=id(equation),
            is_fresh=True,
        )
    if promoted is not None:
        if promoted.cause.is_promotion:
            return promoted.cause
        text = f"promoted{_at(source_frames(equation))} by {promoted.cause.text}"
        return Origin(text, is_promotion=True)
    dtype = getattr(aval, "dtype", None)
    same = [
        fact.origin
        for fact, variable in zip(facts, equation.invars, strict=True)
        if getattr(aval_of(variable), "dtype", None) == dtype
    ]
    if not properties(equation.primitive.name).moves:
        same = [dataclasses.replace(origin, is_fresh=False) for origin in same]
    # A promotion is a better explanation than a weight that is also float32.
    promotions = [origin for origin in same if origin.is_promotion]
    if same:
        return (promotions or but_constants(same))[0]
    return Origin(f"made by {equation.primitive.name}{_at(source_frames(equation))}")


def but_constants(origins: list[Origin]) -> list[Origin]:
    """Returns the origins other than constants; all if there are no others."""
    return [origin for origin in origins if not origin.is_constant] or origins


def _at(frames: Sequence[Frame]) -> str:
    line = line_text(frames)  # empty where mpx itself casts
    return f" at {line}" if line else ""
