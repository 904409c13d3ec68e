r"""Means and variances.

A mean is linear and keeps nothing. The tangent of a variance with the mean $\mu$ of $n$
numbers is

$$\dot v = \frac{2}{n - c} \sum_i (x_i - \mu)\, \dot x_i,$$

so the half-precision $x$ is kept, and $\mu$ and $n$ for each row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from .._dtypes import is_half
from .._typing import DTypeLike
from ._linear_part import from_residuals, result_dtype, widen
from ._softmax import Axis, Where


def mean(
    x: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
    where: Where = None,
) -> Shaped[Array, "..."]:
    r"""The mean, summed in float32.

    $$\mu = \frac{1}{n} \sum_i x_i$$

    Args:
        x: The numbers.
        axis: The axis or axes that are averaged over; None for all.
        dtype: The dtype of the result; that of `x` if None. Ask for float32 where it
            is a loss.
        keepdims: Whether the axes stay, with size 1.
        where: Which elements take part: `mean(losses, where=labels >= 0)`.

    Returns:
        The means, without the axes.

    Kept for the backward pass: `where`, and nothing else.

    At the edges, as `jnp.mean`: the mean of nothing is NaN. A mean that lies in the
    range of float16 is finite, though the sum may not lie in it.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.mean(jnp.full(1024, 6e4, jnp.float16), dtype=jnp.float32)
        Array(60000., dtype=float32)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.mean(x, dtype=...)`")

    def linear_part(where: Where, x: Array) -> Array:
        return jnp.mean(widen(x), axis, keepdims=keepdims, where=where).astype(result)

    # It is linear itself, but a mask alone would keep a float32 array of zeros.
    return (
        from_residuals(linear_part, where, x)
        if is_half(x.dtype)
        else linear_part(where, x)
    )


def variance(
    x: Shaped[Array, "..."],
    axis: Axis = None,
    *,
    dtype: DTypeLike | None = None,
    correction: int | float = 0,
    keepdims: bool = False,
    where: Where = None,
) -> Shaped[Array, "..."]:
    r"""The variance, computed in float32, in two passes.

    $$v = \frac{1}{n - c} \sum_i (x_i - \mu)^2$$

    Args:
        x: The numbers. float32 and float64 are given to `jnp.var`.
        axis: The axis or axes that are averaged over; None for all.
        dtype: The dtype of the result; that of `x` if None.
        correction: What is taken from the number of elements, $c$.
        keepdims: Whether the axes stay, with size 1.
        where: Which elements take part.

    Returns:
        The variances, without the axes.

    Kept for the backward pass: the half-precision `x`, which is there anyway, the mean
    of each row in float32, and `where`.

    At the edges, as `jnp.var`: the variance of nothing is NaN, that of equal numbers 0
    with a gradient of 0; beyond 65504 it is `inf` in float16.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.variance(jnp.array([1000.0, 1020.0], jnp.float16))
        Array(100., dtype=float16)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.variance(x, dtype=...)`")
    if is_half(x.dtype):
        return _variance(axis, keepdims, correction, result, x, where)
    v = jnp.var(x, axis, correction=correction, keepdims=keepdims, where=where)
    return v.astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _variance(
    axis: Axis,
    keepdims: bool,
    correction: int | float,
    dtype: np.dtype,
    x: Array,
    where: Where,
) -> Array:
    v = jnp.var(widen(x), axis, correction=correction, keepdims=keepdims, where=where)
    return v.astype(dtype)


@_variance.defjvp
def _variance_rule(
    axis: Axis,
    keepdims: bool,
    correction: int | float,
    dtype: np.dtype,
    primals: PyTree,
    tangents: PyTree,
) -> PyTree:
    x, where = primals

    def linear_part(residuals: PyTree, dot: Array) -> Array:
        x, mu, where = residuals
        products = 2 * (widen(x) - mu) * widen(dot)
        total = jnp.sum(products, axis, keepdims=keepdims, where=where)
        included = jnp.ones_like(products) if where is None else where
        included = jnp.broadcast_to(included, products.shape).astype(products.dtype)
        count = jnp.sum(included, axis, keepdims=keepdims)
        return (total / (count - correction)).astype(dtype)

    mu = jnp.mean(widen(x), axis, keepdims=True, where=where)
    out = _variance(axis, keepdims, correction, dtype, x, where)
    return out, from_residuals(linear_part, (x, mu, where), tangents[0])
