"""What autocast decided for each equation, and why.

A *decision* is what a rule chose for one equation of the program as it was written.
Decisions are recorded only if somebody asks, because a program is traced for training
far more often than it is looked at. They come in the order of the program; an equation
that JAX traces several times (the body of a scan) has one decision.
"""

import dataclasses
import enum
from typing import Any

import numpy as np

from ._classes import PrimitiveClass


class Precision(enum.Enum):
    """In which precision an equation is computed."""

    HALF = "half"
    """Its float32 operands are float16 or bfloat16 when it runs."""
    FULL = "full"
    """Computed in float32."""
    DECLARED = "declared"
    """Left as it was written."""


class Reason(enum.Enum):
    """Why an equation is computed in the precision it is computed in."""

    PRODUCT = "a matrix product or convolution"
    SENSITIVE = "loses digits or range in half precision"
    WANTED = "everything that uses its result wants float32"
    PROMOTED = "an operand was computed in float32"
    STREAM = "adds to a float32 value, or updates one"
    LITERAL = "a constant does not fit into half precision"
    FOLLOWS = "follows its operands"
    DECLARED = "its operands are arguments or constants"
    MOVES = "only moves data"
    CONVERTED = "a cast that the program asks for"
    PRECISION = "the program asks for a precision of the product"
    RECURSES = "a program within the program, decided equation by equation"
    OPAQUE = "runs as it was written"
    UNKNOWN = "mpx does not know this primitive; it runs as it was written"
    UNTOUCHED = "no float16, bfloat16 or float32 among its operands and results"
    REGION = "a region that is switched off"
    RULE = "a rule of the user's"


@dataclasses.dataclass(frozen=True)
class CastMade:
    """A cast that was put before an equation.

    Attributes:
        operand: The position of the operand that is cast.
        source: The dtype it comes in.
        target: The dtype it goes to.
        shared: Whether the cast was made for an earlier equation and is used again.
    """

    operand: int
    source: np.dtype
    target: np.dtype
    shared: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What was decided for one equation.

    Attributes:
        primitive: The primitive's name.
        primitive_class: Its class; None if mpx does not know the primitive.
        precision: In which precision it is computed.
        reason: Why.
        scopes: The named scopes around it, the outermost first.
        equation: The equation as it was written: its operands and results with their
            declared dtypes (`equation.invars[i].aval`), parameters and source line
            (`equation.source_info`).
        in_dtypes: The dtypes of the operands when it runs, after casts.
        out_dtypes: The dtypes of its results.
        casts: The casts that were put before it.
        executions: How often it runs in one call, through the lengths of scans.
        is_bounded: False within a `while`, whose trips are not known: it then runs
            `executions` times for each trip.
        parameters: For each operand the path of the parameter that it is, moved or
            sliced perhaps, and None for operands that are no parameters.
        rule: The rule of the user's that was applied, or None.
    """

    primitive: str
    primitive_class: PrimitiveClass | None
    precision: Precision
    reason: Reason
    scopes: tuple[str, ...]
    equation: Any
    in_dtypes: tuple[np.dtype, ...]
    out_dtypes: tuple[np.dtype, ...]
    casts: tuple[CastMade, ...]
    executions: int
    is_bounded: bool
    parameters: tuple[str | None, ...]
    rule: Any = None
