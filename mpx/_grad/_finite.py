"""Whether a try at a step is finite: of the loss, of each gradient, of all else.

Every gradient is read for it, before the optimizer reads it again; but for those that a
recipe has seen, whose products have been checked by the amaxes of their operands.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._cast import cast_leaf
from .._dtypes import full_precision_of
from .._jax_compat import manual_axes, stack, varying_axes
from .._loss_scaling import AbstractLossScaling
from .._quantize import SMALLEST_SCALE
from .._tree import Filled, finite_by_leaf
from .._typing import BoolScalar, LossScalar


def finite_flags(
    scaling: AbstractLossScaling,
    loss: LossScalar,
    grads: PyTree,
    seen: Sequence[int | None] | None = None,
) -> Bool[Array, " n"]:
    r"""Whether the loss, and each gradient once it is divided by the scale, is finite.

    $$|g| \le m \cdot \min(s, 1)$$

    with the largest number $m$ of its dtype: dividing by a scale below 1 can make a
    finite gradient overflow. Nothing is divided for it, which is one product less for
    each gradient to trace and to lower.

    A gradient that a recipe has seen is finite in all of its numbers, or NaN in all
    (`mpx._quantize`): one of them is read.

    Some scales are too small for that, and no step counts as finite at them: below
    2^-20 where a recipe has seen gradients; below 2^-111 where there are gradients in
    float16, which need only be finite, being below 2^16.

    Args:
        scaling: The loss scaling that gradients are still scaled by.
        loss: The unscaled loss.
        grads: The gradients.
        seen: For each leaf of `grads` along how many of its first axes it is stacked
            of gradients that recipes have seen; None if they have not.

    Returns:
        One flag for the loss, one for each gradient, one for the rest: in this order
        bad places are named. All devices agree on them.
    """
    leaves = jax.tree.leaves(grads)
    seen = seen or [None] * len(leaves)
    read = [_part(grad, one) for grad, one in zip(leaves, seen, strict=True)]
    if scaling._is_one:
        is_finite, *flags = finite_by_leaf((loss, read))
        rest = jnp.asarray(True)
    else:
        # Below 1 a little smaller, because 1 / s is rounded.
        scale = scaling.loss_scale
        reach = jax.lax.select(scale < 1, scale * (1 - 2.0**-20), jnp.ones_like(scale))
        limits = Filled(lambda dtype: reach.astype(dtype) * jnp.finfo(dtype).max)
        (is_finite,) = finite_by_leaf(loss)
        rest = jnp.asarray(True)
        if any(one is not None for one in seen):
            rest = scale >= SMALLEST_SCALE
        elif any(grad.dtype == np.float16 for grad in leaves):
            rest = scale >= 2.0**-111
        flags = [_is_within(grad, limits) for grad in read]
    found = _agreed(stack([is_finite, *flags, rest]))
    if all(one is None for one in seen):
        return found
    # Without sums over arrays in it, XLA would compute it anew for every number that
    # the optimizer writes (jax 0.10.2, compiled for sm_90, November 2026).
    return jax.lax.optimization_barrier(found)


def _part(grad: Array, seen: int | None) -> Array:
    """What is to be read of a gradient: one number of each product that was seen."""
    if seen is None or 0 in grad.shape:
        return grad
    ends = (*grad.shape[:seen], *(1,) * (grad.ndim - seen))
    return jax.lax.slice(grad, (0,) * grad.ndim, ends)


def _is_within(grad: Array, limits: Filled) -> BoolScalar:
    if grad.dtype == np.float16:
        return finite_by_leaf(grad)[0]
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        return _is_within(grad.real, limits) & _is_within(grad.imag, limits)
    wide = cast_leaf(grad, full_precision_of(grad.dtype))
    flags = jax.lax.le(jax.lax.abs(wide), limits.like(wide))
    return jax.lax.reduce_and(flags, axes=tuple(range(grad.ndim)))


def _agreed(flags: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """The flags, agreed on by all devices."""
    axes = manual_axes()
    if axes and varying_axes(jax.lax.axis_index(axes[0])):
        # `check_vma=True`: where flags do not vary, devices agree, and JAX 0.12 takes
        # only axes of one kind.
        axes = tuple(axis for axis in axes if axis in varying_axes(flags))
    if not axes:
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axes).astype(bool)
