"""Means and variances, summed in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .._typing import DTypeLike
from ._recomputed import Keep, recomputed, result_dtype, widen
from ._softmax import Axis, Where


def mean(
    x: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
    where: Where = None,
) -> Shaped[Array, "..."]:
    r"""Computes the mean, summed in float32.

    $$\mu = \frac{1}{n} \sum_i x_i$$

    Args:
        x: The numbers.
        axis: The axis or axes that are averaged over; None for all.
        dtype: The dtype of the result; that of `x` if None. Use float32 for a loss.
        keepdims: Whether the axes stay, with size 1.
        where: The elements to include, all by default:
            `mean(losses, where=labels >= 0)`.

    Returns:
        The means, without the axes.

    Saved for backward: only `where`.

    At the edges, as `jnp.mean`: the mean of nothing is NaN. A mean within the range of
    float16 is finite, even if the sum is not within it.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.mean(jnp.full(1024, 6e4, jnp.float16), dtype=jnp.float32)
        Array(60000., dtype=float32)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.mean(x, dtype=...)`")

    def evaluate(_: Keep, x: Array, where: Where) -> Array:
        return jnp.mean(widen(x), axis, keepdims=keepdims, where=where).astype(result)

    return recomputed(evaluate, x, where)


def variance(
    x: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    dtype: DTypeLike | None = None,
    correction: int | float = 0,
    keepdims: bool = False,
    where: Where = None,
) -> Shaped[Array, "..."]:
    r"""Computes the variance in float32, in two passes.

    $$v = \frac{1}{n - c} \sum_i (x_i - \mu)^2$$

    Args:
        x: The numbers.
        axis: The axis or axes that are averaged over; None for all.
        dtype: The dtype of the result; that of `x` if None.
        correction: $c$, subtracted from the number of elements.
        keepdims: Whether the axes stay, with size 1.
        where: The elements to include, all by default.

    Returns:
        The variances, without the axes.

    Saved for backward: the half-precision `x`, which exists anyway, and `where`.

    At the edges, as `jnp.var`: the variance of nothing is NaN, that of equal numbers 0
    with a gradient of 0; beyond 65504 it is `inf` in float16.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.variance(jnp.array([1000.0, 1020.0], jnp.float16))
        Array(100., dtype=float16)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.variance(x, dtype=...)`")

    def evaluate(_: Keep, x: Array, where: Where) -> Array:
        v = jnp.var(
            widen(x), axis, correction=correction, keepdims=keepdims, where=where
        )
        return v.astype(result)

    return recomputed(evaluate, x, where)
