r"""Softmax and its relatives.

With $Z = \sum_j e^{x_j}$ and $p_i = e^{x_i} / Z$, the tangents are

$$\dot p_i = p_i \big(\dot x_i - \textstyle\sum_j p_j \dot x_j\big), \qquad
\dot{(\log p_i)} = \dot x_i - \sum_j p_j \dot x_j, \qquad
\dot{(\log Z)} = \sum_j p_j \dot x_j.$$

Softmax keeps $p$ in half precision, its result. The other two keep the half-precision
$x$ and, for each row, its maximum and $\log Z$ relative to that in float32, of which
$p$ is made again in the backward pass: from a rounded $\log p$ it would be off by
$|\log p|$ roundings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree, Shaped

from .._dtypes import is_half
from .._typing import DTypeLike
from ._linear_part import from_residuals, result_dtype, widen

Axis = int | tuple[int, ...] | None
Where = Bool[Array, "..."] | None


def softmax(
    x: Shaped[Array, "..."],
    axis: Axis = -1,
    where: Where = None,
    *,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    r"""Softmax, computed in float32.

    $$p_i = e^{x_i - m} / \sum_j e^{x_j - m}, \qquad m = \max_j x_j$$

    Args:
        x: The scores. float32 and float64 are given to `jax.nn.softmax`, unless the
            result is to be half precision.
        axis: The axis or axes that are summed over; None for all.
        where: Which elements take part; the others get 0.
        dtype: The dtype of the result; that of `x` if None. Half-precision
            probabilities of float32 scores keep half precision, too.

    Returns:
        The probabilities, in the shape of `x`.

    Kept for the backward pass: the probabilities in half precision, and `where`.

    At the edges, as `jax.nn.softmax`: a row of which all is the same, the smallest
    number of a dtype too, is uniform; a row of `-inf`, or with an `inf`, is NaN.

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
    r"""The logarithm of softmax, computed in float32.

    $$\log p_i = x_i - m - \log \sum_j e^{x_j - m}, \qquad m = \max_j x_j$$

    Args:
        x: The scores. float32 and float64 are given to `jax.nn.log_softmax`.
        axis: The axis or axes that are summed over; None for all.
        where: Which elements take part; the others get `-inf`.
        dtype: The dtype of the result; that of `x` if None.

    Returns:
        The logarithms of the probabilities, in the shape of `x`.

    Kept for the backward pass: the half-precision `x`, which is there anyway, and two
    float32 for each row.

    At the edges, as `jax.nn.log_softmax`: a row of `-inf`, or with an `inf`, is NaN.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> mpx.nn.log_softmax(jnp.array([6e4, 6e4], jnp.float16))
        Array([-0.6934, -0.6934], dtype=float16)
    """
    x = jnp.asarray(x)
    result = result_dtype(x, dtype, "`mpx.nn.log_softmax(x, dtype=...)`")
    if is_half(x.dtype):
        return _log_softmax(axis, result, x, where)
    return jax.nn.log_softmax(x, axis, where).astype(result)


def logsumexp(
    x: Shaped[Array, "..."],
    axis: Axis = None,
    where: Where = None,
    *,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Shaped[Array, "..."]:
    r"""The logarithm of the sum of exponentials, computed in float32.

    $$m + \log \sum_j e^{x_j - m}, \qquad m = \max_j x_j$$

    Args:
        x: The scores. float32 and float64 are given to `jax.nn.logsumexp`.
        axis: The axis or axes that are summed over; None for all.
        where: Which elements take part.
        keepdims: Whether the axes stay, with size 1.
        dtype: The dtype of the result; that of `x` if None. In float16 a number near
            1e4 is rounded to a multiple of 8: ask for float32 where it is a loss.

    Returns:
        The sums, without the axes.

    Kept for the backward pass: the half-precision `x`, which is there anyway, and two
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
    if is_half(x.dtype):
        return _logsumexp(axis, keepdims, result, x, where)
    sums = jax.nn.logsumexp(x, axis, keepdims=keepdims, where=where)
    return sums.astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _softmax(axis: Axis, dtype: np.dtype, x: Array, where: Where) -> Array:
    return jax.nn.softmax(widen(x), axis, where).astype(dtype)


@_softmax.defjvp
def _softmax_rule(
    axis: Axis, dtype: np.dtype, primals: PyTree, tangents: PyTree
) -> PyTree:
    x, where = primals
    p = _softmax(axis, dtype, x, where)
    kept = p if is_half(p.dtype) else p.astype(x.dtype)

    def linear_part(residuals: PyTree, dot: Array) -> Array:
        p, where = residuals
        p, dot = widen(p), widen(dot)
        inner = jnp.sum(p * dot, axis, where=where, keepdims=True)
        return (p * (dot - inner)).astype(dtype)

    return p, from_residuals(linear_part, (kept, where), tangents[0])


def row_statistics(x: Array, axis: Axis, where: Where) -> tuple[Array, Array]:
    """The maximum of each row, and the logarithm of its sum relative to that."""
    x = widen(x)
    peak = jnp.max(x, axis, where=where, initial=-jnp.inf, keepdims=True)
    # It cancels wherever it is used, so it needs no derivative.
    peak = jax.lax.stop_gradient(peak)
    total = jnp.sum(jnp.exp(x - peak), axis, where=where, keepdims=True)
    return peak, jnp.log(total)


def log_probabilities(x: Array, statistics: tuple[Array, Array]) -> Array:
    """The logarithms of the probabilities, of scores and the numbers of their rows.

    The two numbers stay apart: in their sum, log Z, float32 would lose log Z's last
    digits, and so would every probability, by 2e-3 at 6e4.
    """
    peak, log_total = statistics
    return widen(x) - peak - log_total


def probabilities(x: Array, statistics: tuple[Array, Array], where: Where) -> Array:
    """The probabilities, of scores and the two float32 numbers of their rows."""
    p = jnp.exp(log_probabilities(x, statistics))
    return p if where is None else jnp.where(where, p, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _log_softmax(axis: Axis, dtype: np.dtype, x: Array, where: Where) -> Array:
    return jax.nn.log_softmax(widen(x), axis, where).astype(dtype)


@_log_softmax.defjvp
def _log_softmax_rule(
    axis: Axis, dtype: np.dtype, primals: PyTree, tangents: PyTree
) -> PyTree:
    x, where = primals

    def linear_part(residuals: PyTree, dot: Array) -> Array:
        x, statistics, where = residuals
        dot = widen(dot)
        p = probabilities(x, statistics, where)
        dot = dot - jnp.sum(p * dot, axis, where=where, keepdims=True)
        dot = dot if where is None else jnp.where(where, dot, 0)
        return dot.astype(dtype)

    residuals = x, row_statistics(x, axis, where), where
    out = _log_softmax(axis, dtype, x, where)
    return out, from_residuals(linear_part, residuals, tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _logsumexp(
    axis: Axis, keepdims: bool, dtype: np.dtype, x: Array, where: Where
) -> Array:
    sums = jax.nn.logsumexp(widen(x), axis, where=where, keepdims=keepdims)
    return sums.astype(dtype)


@_logsumexp.defjvp
def _logsumexp_rule(
    axis: Axis, keepdims: bool, dtype: np.dtype, primals: PyTree, tangents: PyTree
) -> PyTree:
    x, where = primals

    def linear_part(residuals: PyTree, dot: Array) -> Array:
        x, statistics, where = residuals
        p = probabilities(x, statistics, where)
        weighted = p * widen(dot)
        return jnp.sum(weighted, axis, where=where, keepdims=keepdims).astype(dtype)

    residuals = x, row_statistics(x, axis, where), where
    out = _logsumexp(axis, keepdims, dtype, x, where)
    return out, from_residuals(linear_part, residuals, tangents[0])
