"""The words in which autocast's decisions are options: precision, reason, operation."""

import dataclasses
import enum

import numpy as np
from jax.extend.core import JaxprEqn

from .._program import PrimitiveClass, aval_of, count, source_frames
from ._fused import FusedOperation


class Precision(enum.Enum):
    """In which precision an operation is computed."""

    HALF = "half"
    """Its float32 operands are float16 or bfloat16 when it runs."""
    LOW = "low"
    """Quantized by the recipe that holds there; for matrix products."""
    FULL = "full"
    """Computed in float32."""
    FOLLOW = "follow"
    """In float32 if one of its operands was computed in float32, else in half."""
    DECLARED = "declared"
    """Left as it was written."""


class Reason(enum.Enum):
    """Why an operation is computed in the precision it is computed in."""

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
    RECIPE = "a product of data with a weight"


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """An operation of the program that a rule is asked about.

    Attributes:
        primitive: The primitive's name: `dot_general`, `exp`, ...
        kind: Its class, what autocast does by default; None if mpx does not know it.
        dtype: The half precision dtype that holds here.
        scopes: The named scopes around it, the outermost first.
        equation: The equation as it was written: operands and results with their
            declared dtypes (`equation.invars[i].aval`), and parameters.
        in_dtypes: The dtypes that its operands come in.
        parameters: For each operand the path of the parameter that it is, moved or
            sliced perhaps, and None for operands that are no parameters.
    """

    primitive: str
    kind: PrimitiveClass | None
    dtype: np.dtype
    scopes: tuple[str, ...]
    equation: JaxprEqn
    in_dtypes: tuple[np.dtype, ...]
    parameters: tuple[str | None, ...]

    @property
    def multiplications(self) -> int:
        """How many pairs of numbers a matrix product multiplies; 0 of anything else."""
        operation = self.equation.params.get("operation")
        if isinstance(operation, FusedOperation):
            return operation.multiplications([v.aval for v in self.equation.invars])
        if self.primitive != "dot_general":
            return 0
        contracted = self.equation.params["dimension_numbers"][0][0]
        shape = aval_of(self.equation.invars[0]).shape
        results = count(aval_of(self.equation.outvars[0]).shape)
        return results * count(shape[i] for i in contracted)

    @property
    def line(self) -> str:
        """The line of the user's code that it comes from; "" if it is not known."""
        return line_of(self.equation)


def line_of(equation: JaxprEqn) -> str:
    """The line of the user's code that an equation comes from."""
    frames = source_frames(equation)
    return str(frames[-1]) if frames else ""
