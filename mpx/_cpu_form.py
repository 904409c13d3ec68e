"""The form of a bfloat16 product that XLA's CPU compiler has units for.

XLA multiplies bfloat16 by a library (YNNPACK) that uses AMX, with float32 sums, if the
result is float32 and the left operand's contracted axes are its last. A plain product
of another order loses its copy: XLA folds the transpose into it, and it leaves the
library for a slow loop, which since jaxlib 0.11 sums in bfloat16 where the result is
bfloat16 (jaxlib 0.10.2 to 0.12.0.1, November 2026). A second contracted axis, of one
number, keeps the copy: XLA brings a product of more than two axes into order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DimensionNumbers = tuple[
    tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]
]


def multiply_to_float32(
    left: jax.Array,
    right: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """The float32 product of two bfloat16 operands, in the form for CPUs.

    Args:
        left: The left operand.
        right: The right operand.
        dimension_numbers: As of `jax.lax.dot_general`, like what follows.
        precision: How exactly to multiply.
        out_sharding: Where the result lies.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    first = left.ndim - len(lc)
    is_last = sorted(lc) == list(range(first, left.ndim))
    has_free_axes = left.ndim > len(lc) + len(lb)
    if lc and has_free_axes and not is_last:
        lc, rc = (*lc, left.ndim), (*rc, right.ndim)
        left = jnp.expand_dims(left, left.ndim)
        right = jnp.expand_dims(right, right.ndim)
    return lax.dot_general(
        left,
        right,
        ((lc, rc), (lb, rb)),
        precision=precision,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )
