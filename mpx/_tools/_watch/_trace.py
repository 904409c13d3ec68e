"""The sources of values, known while a program is traced.

A *source* is a value before it was moved, cast or quantized. Operands of matmuls with
the same source count as one array.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from ..._base.typing import AnyArray, Shape
from ..._program import (
    Location,
    PrimitiveClass,
    Probe,
    Tagged,
    aval_of,
    count,
    is_matmul,
    properties,
    scopes,
)
from ..._quantize import Role
from ..._settings import Precision
from .._inspect import function_path, innermost_note, line_text, phase, scope_path


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a value.

    Attributes:
        key: Identifies the source.
        kind: An input is computed in the forward pass, from data; a gradient in the
            backward pass. A weight is a trained argument, only moved and cast.
        path: The path of a weight; of the first if several were joined into one array.
        is_constant: Whether it is a constant of the program, or has no operands.
        is_argument: Whether it is an argument of the program.
        part: The shape, if it is a part of its source; None for the whole.
        is_quantized: Whether a recipe has quantized it since.
        is_aside: Whether it is a scale, an amax or noise of a recipe.
        is_again: Whether it was recomputed, as by a checkpoint.
        is_made: Whether a matmul returned it directly; a recipe scales that back.
        turns: The number of scans that have cut a weight into layers.
    """

    key: Hashable
    kind: Role
    path: str = ""
    is_argument: bool = False
    is_constant: bool = False
    part: Shape | None = None
    is_quantized: bool = False
    is_aside: bool = False
    is_again: bool = False
    is_made: bool = False
    turns: int = 0


class SourceProbe(Probe):
    """A probe whose tags are sources."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self, kind: Role, path: str = "", is_argument: bool = False) -> Source:
        """Returns a new source."""
        return Source(next(self._numbers), kind, path, is_argument)

    def constant(self, array: object) -> Source:
        """Returns the source of a literal or constant of the program."""
        return Source(next(self._numbers), Role.INPUT, is_constant=True)

    def transfer(
        self, equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
    ) -> list[Source]:
        """Returns the sources of the results of an operation."""
        results = len(equation.outvars)
        if equation.primitive.name == "optimization_barrier":
            return [value.tag for value in operands]
        is_low = quantizes(equation, place)
        arrays = _arrays_of(operands) if is_low else []
        followed = (
            _quantized(equation, arrays) if is_low else _moved(equation, operands)
        )
        if followed is not None and (is_low or not followed.is_constant):
            return [followed] * results
        joined = _joined(equation, operands)
        if joined:
            return [self.new(Role.WEIGHT, joined)] * results
        phase = phase_of(equation, place)
        made = Source(
            0,
            Role.GRADIENT if phase == "backward" else Role.INPUT,
            # A cotangent of ones is a constant, and a gradient.
            is_constant=followed is not None or not operands,
            is_aside=is_low and _is_aside(equation, arrays),
            is_again=phase == "recompute",
            is_made=is_matmul(equation),
        )
        return [
            dataclasses.replace(made, key=next(self._numbers)) for _ in range(results)
        ]

    def chosen(self, tags: Sequence[Source]) -> Source:
        """Returns the common source of all branches, or else a new one.

        If a branch has nothing to save for the backward pass, JAX fills in zeros.
        """
        filled = [x for x in tags if not x.is_constant and not x.is_aside]
        first, *others = filled or tags
        if all(tag == first for tag in others):
            return first
        return dataclasses.replace(
            self.new(first.kind),
            is_aside=all(tag.is_aside for tag in tags),
            is_again=all(tag.is_again for tag in tags),
        )


def _moved(equation: JaxprEqn, operands: Sequence[Tagged]) -> Source | None:
    """Returns the source of a moved or cast value, None if it is computed."""
    name = equation.primitive.name
    known = properties(name)
    is_cast = known.kind is PrimitiveClass.CONVERT and _is_float(operands[0].array)
    if not is_cast and (not known.moves or name == "gather"):
        return None
    tag: Source = operands[0].tag
    if known.reads_part or known.repeats:
        return dataclasses.replace(tag, part=aval_of(equation.outvars[0]).shape)
    return tag


def _arrays_of(operands: Sequence[Tagged]) -> list[Tagged]:
    """Returns the operands that a recipe quantizes, without scales and noise."""
    return [v for v in operands if jnp.shape(v.array) and not v.tag.is_aside]


def _quantized(equation: JaxprEqn, arrays: Sequence[Tagged]) -> Source | None:
    """Returns the source of a quantized value; None if scaled back or added."""
    if _is_aside(equation, arrays):
        return None
    tag: Source = _largest(arrays).tag
    is_sum = properties(equation.primitive.name).adds  # gradients of two uses
    if tag.is_made or (is_sum and len({v.tag.key for v in arrays}) > 1):
        return None
    return dataclasses.replace(tag, is_quantized=True)


def _is_aside(equation: JaxprEqn, arrays: Sequence[Tagged]) -> bool:
    """Returns whether a recipe computes a scale, an amax or noise, not an array.

    Their operands are all of this kind, or they have less than half the elements of the
    largest operand: packing two values into a byte halves the number.
    """
    if not arrays:
        return True
    shape, whole = aval_of(equation.outvars[0]).shape, _largest(arrays)
    return not shape or 2 * count(shape) < count(jnp.shape(whole.array))


def _largest(arrays: Sequence[Tagged]) -> Tagged:
    return max(arrays, key=lambda v: count(jnp.shape(v.array)))


def _joined(equation: JaxprEqn, operands: Sequence[Tagged]) -> str:
    """Returns the path of weights joined into one array; "" for other values."""
    if not properties(equation.primitive.name).joins:
        return ""
    paths = [v.tag.path for v in operands if jnp.shape(v.array)]
    return f"{paths[0]} and others" if paths and all(paths) else ""


def _is_float(array: AnyArray) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(array), jnp.floating))


def quantizes(equation: JaxprEqn, place: Location) -> bool:
    """Returns whether a recipe quantizes an operand of a matmul here."""
    if is_matmul(equation):
        return False
    note = innermost_note((*place.scopes, *scopes(equation)))
    return note is not None and note.precision == Precision.LOW.value


def phase_of(equation: JaxprEqn, place: Location) -> str:
    """Returns whether an operation is in the forward or backward pass or recomputed."""
    return phase((*place.scopes, *scopes(equation)))


def where(equation: JaxprEqn, place: Location) -> str:
    """Returns the named scopes around an operation, or else the functions."""
    scope = scope_path((*place.scopes, *scopes(equation)))
    return scope or function_path(place.frames_of(equation))


def line(equation: JaxprEqn, place: Location) -> str:
    """Returns the line of the user's code that an operation comes from."""
    return line_text(place.frames_of(equation))
