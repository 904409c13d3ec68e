"""Whether a try at a step is finite: of the loss, of each gradient, of all else.

Every gradient is read for it, before the optimizer reads it again.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._cast import cast_leaf
from .._dtypes import full_precision_of
from .._jax_compat import manual_axes, stack, varying_axes
from .._loss_scaling import AbstractLossScaling
from .._tree import Filled, finite_by_leaf
from .._typing import BoolScalar, LossScalar


def finite_flags(
    scaling: AbstractLossScaling, loss: LossScalar, grads: PyTree
) -> Bool[Array, " n"]:
    r"""Whether the loss, and each gradient once it is divided by the scale, is finite.

    $$|g| \le m \cdot \min(s, 1)$$

    with the largest number $m$ of its dtype: dividing by a scale below 1 can make a
    finite gradient overflow. Nothing is divided for it, which is one product less for
    each gradient to trace and to lower.

    Gradients in float16 need only be finite, being below 2^16. For them no step counts
    as finite at a scale below 2^-111.

    Args:
        scaling: The loss scaling that gradients are still scaled by.
        loss: The unscaled loss.
        grads: The gradients.

    Returns:
        One flag for the loss, one for each gradient, one for the rest: in this order
        bad places are named. All devices agree on them.
    """
    leaves = jax.tree.leaves(grads)
    if scaling._is_one:
        is_finite, *flags = finite_by_leaf((loss, leaves))
        rest = jnp.asarray(True)
    else:
        # Below 1 a little smaller, because 1 / s is rounded.
        scale = scaling.loss_scale
        reach = jax.lax.select(scale < 1, scale * (1 - 2.0**-20), jnp.ones_like(scale))
        limits = Filled(lambda dtype: reach.astype(dtype) * jnp.finfo(dtype).max)
        (is_finite,) = finite_by_leaf(loss)
        rest = jnp.asarray(True)
        if any(grad.dtype == np.float16 for grad in leaves):
            rest = scale >= 2.0**-111
        flags = [_is_within(grad, limits) for grad in leaves]
    return _agreed(stack([is_finite, *flags, rest]))


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
