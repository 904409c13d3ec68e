"""Products over a mesh of explicit axes, where types say how arrays are sharded.

Gradients of weights contract axes that are sharded, and blocks are cut and joined: for
neither have types a rule. Inside of a product the axes are automatic, where the
compiler finds shardings; only the result's is said.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


def in_automatic_axes(
    f: Callable[..., Array],
    plain: Callable[..., Array],
    out_sharding: Any,
    left: Array,
    right: Array,
    scales: Array | None,
) -> Array:
    """Calls `f(left, right, scales)` without types of shardings inside.

    Args:
        f: The quantized product.
        plain: The same product of half precision, from `left` and `right`.
        out_sharding: The sharding of the result; None: what `plain` has.
        left: The left operand.
        right: The right operand.
        scales: The scales of delayed scaling, or None.
    """
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return f(left, right, scales)
    if out_sharding is None:
        out_sharding = jax.eval_shape(plain, left, right).sharding
    auto_axes: Any = jax.sharding.auto_axes
    return auto_axes(f, out_sharding=out_sharding)(left, right, scales)
