"""Softmax and its relatives.

Softmax keeps the half-precision probabilities for the backward pass, its result. The
other two keep the half-precision scores and, for each row, its maximum and the sum of
its exponentials in float32: from a rounded logarithm the probabilities would be off by
so many roundings as that is large.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree, Shaped

from .._dtypes import is_half
from .._typing import DTypeLike
from ._recomputed import Keep, linear, recomputed, result_dtype, widen

Axis = int | tuple[int, ...] | None
Where = Bool[Array, "..."] | None


def softmax(
    x: Shaped[Array, "..."],
    axis: Axis = -1,
    where: Where = None,
    *,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    r"""Computes softmax in float32.

    $$p_i = e^{x_i - m} / \sum_j e^{x_j - m}, \qquad m = \max_j x_j$$

    Args:
        x: The scores. float32 and float64 are passed to `jax.nn.softmax`, unless the
            result is half precision.
        axis: The axis or axes that are summed over; None for all.
        where: The elements to include, all by default; the others get 0.
        dtype: The dtype of the result; that of `x` if None. Half-precision
            probabilities of float32 scores are also saved in half precision.

    Returns:
        The probabilities, in the shape of `x`.

    Saved for backward: the probabilities in half precision, and `where`.

    At the edges, as `jax.nn.softmax`: a row of equal numbers, even the lowest of a
    dtype, is uniform; a row of `-inf`, or with an `inf`, is NaN.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.softmax(jnp.array([6e4, 6e4, -6e4], jnp.float16))
        Array([0.5, 0.5, 0. ], dtype=float16)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.softmax(x, dtype=...)`")
    if is_half(x.dtype) or is_half(result):
        return _softmax(axis, result, x, where)
    return jax.nn.softmax(x, axis, where).astype(result)


def log_softmax(
    x: Shaped[Array, "..."],
    axis: Axis = -1,
    where: Where = None,
    *,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    r"""Computes the logarithm of softmax in float32.

    $$\log p_i = x_i - m - \log \sum_j e^{x_j - m}, \qquad m = \max_j x_j$$

    Args:
        x: The scores. float32 and float64 are passed to `jax.nn.log_softmax`.
        axis: The axis or axes that are summed over; None for all.
        where: The elements to include, all by default; the others get `-inf`.
        dtype: The dtype of the result; that of `x` if None.

    Returns:
        The logarithms of the probabilities, in the shape of `x`.

    Saved for backward: the half-precision `x`, which exists anyway, and two
    float32 for each row.

    At the edges, as `jax.nn.log_softmax`: a row of `-inf`, or with an `inf`, is NaN.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.log_softmax(jnp.array([6e4, 6e4], jnp.float16))
        Array([-0.6934, -0.6934], dtype=float16)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.log_softmax(x, dtype=...)`")
    if not is_half(x.dtype):
        return jax.nn.log_softmax(x, axis, where).astype(result)

    def evaluate(keep: Keep, x: Array, where: Where) -> Array:
        _, log_p = log_probabilities(keep, widen(x), axis, where)
        log_p = log_p if where is None else jnp.where(where, log_p, -jnp.inf)
        return log_p.astype(result)

    return recomputed(evaluate, x, where)


def logsumexp(
    x: Shaped[Array, "..."],
    axis: Axis = None,
    where: Where = None,
    *,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    r"""Computes the logarithm of the sum of exponentials in float32.

    $$m + \log \sum_j e^{x_j - m}, \qquad m = \max_j x_j$$

    Args:
        x: The scores. float32 and float64 are passed to `jax.nn.logsumexp`.
        axis: The axis or axes that are summed over; None for all.
        where: The elements to include, all by default.
        keepdims: Whether the axes are kept, with size 1.
        dtype: The dtype of the result; that of `x` if None. In float16 a number near
            1e4 is rounded to a multiple of 8: use float32 for a loss.

    Returns:
        The sums, without the axes.

    Saved for backward: the half-precision `x`, which exists anyway, and two
    float32 for each row.

    At the edges, as `jax.nn.logsumexp`: the sum over nothing, or over `-inf`, is
    `-inf`.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.logsumexp(jnp.zeros(8192, jnp.float16))
        Array(9.01, dtype=float16)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.logsumexp(x, dtype=...)`")
    if not is_half(x.dtype):
        sums = jax.nn.logsumexp(x, axis, keepdims=keepdims, where=where)
        return sums.astype(result)

    def evaluate(keep: Keep, x: Array, where: Where) -> Array:
        (peak, log_total), _ = log_probabilities(keep, widen(x), axis, where)
        sums = jnp.where(jnp.isinf(peak), peak, peak + log_total)
        if where is not None:
            sums = jnp.where(jnp.any(where, axis, keepdims=True), sums, -jnp.inf)
        return (sums if keepdims else jnp.squeeze(sums, axis)).astype(result)

    return recomputed(evaluate, x, where)


def log_probabilities(
    keep: Keep, x: Array, axis: Axis, where: Where
) -> tuple[tuple[Array, Array], Array]:
    """Two numbers of each row, and the logarithms of the probabilities.

    The numbers are the maximum of a row, and the logarithm of its sum relative to
    that. They stay apart: in their sum, log Z, float32 would lose log Z's last digits,
    and so would every probability, by 2e-3 at 6e4.

    A row of which nothing takes part is computed as a whole, so that its derivative is
    finite.
    """
    seen = x
    if where is not None:
        takes_part = where | ~jnp.any(where, axis, keepdims=True)
        seen = jnp.where(takes_part, x, -jnp.inf)
    # It cancels wherever it is used, so it needs no derivative.
    peak = jnp.max(seen, axis, initial=-jnp.inf, keepdims=True)
    peak = keep(jax.lax.stop_gradient(peak))
    total = keep(jnp.sum(jnp.exp(seen - peak), axis, keepdims=True))
    log_total = jnp.log(total)
    return (peak, log_total), x - peak - log_total


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _softmax(axis: Axis, dtype: np.dtype, x: Array, where: Where) -> Array:
    return jax.nn.softmax(widen(x), axis, where).astype(dtype)


@_softmax.defjvp
def _softmax_rule(
    axis: Axis, dtype: np.dtype, primals: PyTree, tangents: PyTree
) -> PyTree:
    x, where = primals
    p = _softmax(axis, dtype, x, where)
    rounded = p if is_half(p.dtype) else p.astype(x.dtype)

    def evaluate(residuals: PyTree, dot: Array) -> Array:
        p, where = residuals
        return tangent_of_softmax(widen(p), widen(dot), axis, where).astype(dtype)

    return p, linear(evaluate, (rounded, where), tangents[0])


def tangent_of_softmax(
    p: Array, dot: Array, axis: Axis = -1, where: Where = None
) -> Array:
    r"""$p (\dot x - \sum p \dot x)$, of probabilities and the tangent of scores."""
    return p * (dot - jnp.sum(p * dot, axis, where=where, keepdims=True))
