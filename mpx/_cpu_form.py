"""The form of a bfloat16 product that XLA's CPU compiler has units for.

XLA multiplies bfloat16 by a library (YNNPACK) that uses them, with float32 sums, if the
result is float32 and the left operand's contracted axes are its last. A plain product
of another order loses its copy: XLA folds a transpose into it, and it leaves the
library, for a slow loop that sums in bfloat16 where the result is bfloat16 (since
jaxlib 0.11), or for nothing at all: a float32 result is then not implemented (0.10).
So the left operand is brought into order, and its layout is said: XLA folds nothing
into that, and it costs no pass (jaxlib 0.10.2 to 0.12.0.1, November 2026).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

DimensionNumbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]


def multiply_in_order(
    left: jax.Array,
    right: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    out_sharding: Any = None,
    *,
    says_layout: bool,
) -> jax.Array:
    """The float32 product of two bfloat16 operands, in the form for CPUs.

    Args:
        left: The left operand.
        right: The right operand.
        dimension_numbers: As of `jax.lax.dot_general`, like what follows.
        precision: How exactly to multiply.
        out_sharding: Where the result lies.
        says_layout: Whether the layout of operands may be said.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    pairs = sorted(zip(lc, rc, strict=True))
    free = [axis for axis in range(left.ndim) if axis not in (*lc, *lb)]
    if pairs and free:
        if free[-1] > pairs[0][0]:
            left = left.transpose(*lb, *free, *(axis for axis, _ in pairs))
            lb = tuple(range(len(lb)))
            lc = tuple(range(len(lb) + len(free), left.ndim))
            rc = tuple(axis for _, axis in pairs)
        left, right = _in_order(left, says_layout), _in_order(right, says_layout)
    return lax.dot_general(
        left,
        right,
        ((lc, rc), (lb, rb)),
        precision=precision,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


def _in_order(x: jax.Array, says_layout: bool) -> jax.Array:
    """The array, of which XLA folds no transpose into the product that reads it."""
    if says_layout:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    # A barrier may cost a pass; one of bfloat16 would be one of float32.
    bits = lax.optimization_barrier(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(bits, x.dtype)
