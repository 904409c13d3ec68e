"""In which precision an equation is computed, and in which format."""

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._autocast import Note
from .._program import Flops, PrimitiveClass, aval_of, avals, properties
from ._report import HALF, is_low


def is_product(equation: JaxprEqn) -> bool:
    """Whether it is a matrix product, also of blocks with scales, or a convolution."""
    known = properties(equation.primitive.name)
    return known.kind is PrimitiveClass.HALF or known.flops is Flops.LAST_AXIS_PRODUCT


def precision_of(equation: JaxprEqn) -> str:
    """The dtype that an equation is computed in.

    That of its operands for matrix products and convolutions, `mixed` where they
    differ, `float8` if both are formats of 8 bits. Else that of its first floating
    result, or operand, or result.
    """
    operands = [a.dtype for a in avals(equation.invars) if hasattr(a, "dtype")]
    results = [a.dtype for a in avals(equation.outvars) if hasattr(a, "dtype")]
    numbers = [d for d in operands if jnp.issubdtype(d, jnp.inexact)]
    if is_product(equation) and numbers:
        names = {str(dtype) for dtype in numbers[:2]}
        if len(names) == 1:
            return names.pop()
        # E4M3 by E5M2 is how gradients meet weights, and no accident.
        return "float8" if all(n.startswith("float8") for n in names) else "mixed"
    found = [d for d in results if jnp.issubdtype(d, jnp.inexact)] or numbers or results
    return dtype_name(found[0]) if found else ""


def precision_and_format(
    equation: JaxprEqn, note: Note | None, phase: str
) -> tuple[str, str]:
    """The dtype that an equation is computed in, and the format it counts under.

    That is the same but for quantized products: see `Operation.format`.

    Args:
        equation: The equation.
        note: What autocast noted on it.
        phase: As in `Operation`.
    """
    precision = precision_of(equation)
    if note is None or not is_product(equation):
        return precision, precision
    if precision in HALF and not note.is_emulated:
        return precision, precision
    format = note.formats[phase == "backward"]
    if format and not note.is_emulated and not is_low(precision):
        precision = "float8"  # XLA takes the casts into the product: `_in_fp8_to_sum`
    return precision, format or precision


def precision_of_product(equation: JaxprEqn) -> str | None:
    """The dtype of a product; None of all else."""
    return precision_of(equation) if is_product(equation) else None


def hides_a_program(equation: JaxprEqn) -> bool:
    """Whether numbers go into a program of which nothing is known."""
    return properties(equation.primitive.name).hides_a_program and any(
        jnp.issubdtype(getattr(aval_of(v), "dtype", bool), jnp.floating)
        for v in equation.invars
    )


def uses_half(equation: JaxprEqn) -> bool:
    """Whether an operand or a result is in half precision."""
    return any(
        str(getattr(aval_of(v), "dtype", "")) in HALF
        for v in (*equation.invars, *equation.outvars)
    )


def dtype_name(dtype: object) -> str:
    """Of a dtype; NumPy spells JAX's `float0`, of gradients of integers, otherwise."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)
