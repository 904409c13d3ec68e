"""What is known of values as a program is traced: where they come from, what they are.

A *source* is a value before it was moved, cast or quantized. Operands of products that
have one source are one array to whom asks how large its numbers are.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._inspect import function_path, innermost_note, line_text, phase, scope_path
from .._program import (
    Location,
    PrimitiveClass,
    Probe,
    Tagged,
    aval_of,
    count,
    properties,
    scopes,
)
from .._quantize import Role
from .._rules import Precision
from .._typing import AnyArray


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value comes from.

    Attributes:
        key: Tells sources apart.
        kind: What it is: an input is made in the forward pass, of data, and a gradient
            in the backward pass. A weight is an argument that is trained, moved and
            cast but not computed with.
        path: Of a weight its path; of several in one array that of the first.
        is_constant: Whether it stands in the program.
        is_argument: Whether it is an argument of the program.
        is_whole: Whether the value is all of its source, and not a part.
        is_quantized: Whether a recipe has quantized it since.
        is_again: Whether it was computed again, as a checkpoint does.
        is_made: Whether a product gave it as it is: a recipe scales that back.
        turns: Of a weight by how many scans it was cut into layers.
    """

    key: Hashable
    kind: Role
    path: str = ""
    is_argument: bool = False
    is_constant: bool = False
    is_whole: bool = True
    is_quantized: bool = False
    is_again: bool = False
    is_made: bool = False
    turns: int = 0


class SourceProbe(Probe):
    """A probe whose tags are sources."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self, kind: Role, path: str = "", is_argument: bool = False) -> Source:
        """A source of its own."""
        return Source(next(self._numbers), kind, path, is_argument)

    def constant(self, array: object) -> Source:
        """The source of a literal, or of an array that the program holds."""
        return Source(next(self._numbers), Role.INPUT, is_constant=True)

    def transfer(
        self, equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
    ) -> list[Source]:
        """The sources of the results of an operation."""
        results = len(equation.outvars)
        if equation.primitive.name == "optimization_barrier":
            return [value.tag for value in operands]
        followed = _followed(equation, place, operands)
        # A cotangent of ones is a constant, and a gradient.
        if followed is not None and not followed.is_constant:
            return [followed] * results
        joined = _joined(equation, operands)
        if joined:
            return [self.new(Role.WEIGHT, joined)] * results
        phase = phase_of(equation, place)
        kind = Role.GRADIENT if phase == "backward" else Role.INPUT
        is_again, is_made = phase == "recompute", is_product(equation)
        return [
            Source(next(self._numbers), kind, is_again=is_again, is_made=is_made)
            for _ in range(results)
        ]


def _followed(
    equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
) -> Source | None:
    """The source of what is moved, cast or quantized; None of what is computed."""
    name = equation.primitive.name
    known = properties(name)
    if quantizes(equation, place):
        largest = max(operands, key=lambda v: count(jnp.shape(v.array)), default=None)
        if largest is None or _is_smaller(equation, largest) or largest.tag.is_made:
            return None
        keys = {v.tag.key for v in operands if jnp.shape(v.array)}
        if known.adds and len(keys) > 1:  # gradients of two uses
            return None
        return dataclasses.replace(largest.tag, is_quantized=True)
    is_cast = known.kind is PrimitiveClass.CONVERT and _is_float(operands[0].array)
    if not is_cast and (not known.moves or name == "gather"):
        return None
    tag: Source = operands[0].tag
    if known.reads_part or known.repeats:
        return dataclasses.replace(tag, is_whole=False)
    return tag


def _joined(equation: JaxprEqn, operands: Sequence[Tagged]) -> str:
    """The path of weights that are put together into one array; "" of others."""
    if not properties(equation.primitive.name).joins:
        return ""
    paths = [v.tag.path for v in operands if jnp.shape(v.array)]
    return f"{paths[0]} and others" if paths and all(paths) else ""


def _is_smaller(equation: JaxprEqn, operand: Tagged) -> bool:
    """Whether the result is a scale or an amax, and not the array."""
    return count(aval_of(equation.outvars[0]).shape) < count(jnp.shape(operand.array))


def _is_float(array: AnyArray) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def quantizes(equation: JaxprEqn, place: Location) -> bool:
    """Whether a recipe quantizes an operand of a product here."""
    if is_product(equation):
        return False
    note = innermost_note((*place.scopes, *scopes(equation)))
    return note is not None and note.precision == Precision.LOW.value


def is_product(equation: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution."""
    return properties(equation.primitive.name).kind is PrimitiveClass.HALF


def phase_of(equation: JaxprEqn, place: Location) -> str:
    """Whether an operation is of the forward or the backward pass, or recomputed."""
    return phase((*place.scopes, *scopes(equation)))


def where(equation: JaxprEqn, place: Location) -> str:
    """The named scopes around an operation, or else the functions."""
    scope = scope_path((*place.scopes, *scopes(equation)))
    return scope or function_path(place.frames_of(equation))


def line(equation: JaxprEqn, place: Location) -> str:
    """The line of the user's code that an operation comes from."""
    return line_text(place.frames_of(equation))
