"""Softmax, log-softmax, logsumexp, mean, variance and cross entropy.

Softmax saves only its result for backward, the half-precision probabilities.
Log-softmax, logsumexp and cross entropy save the half-precision scores and two float32
for each row: its maximum, and the sum of its exponentials relative to that. From a
rounded logarithm, a probability's error would grow with the logarithm.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from .._base.dtypes import is_half
from .._base.errors import describe
from .._base.typing import DTypeLike
from ._recomputed import Keep, known, linear, recomputed, result_dtype, widen

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
    """Returns two numbers of each row, and the logarithms of the probabilities.

    The numbers are the maximum of a row, and the logarithm of its sum relative to that.
    They are not added: their sum, log Z, would lose its last digits in float32, which
    changes every probability by 2e-3 at 6e4.

    A row with every element excluded is computed as if all were included, so that its
    derivative is finite.
    """
    seen = x
    if where is not None:
        takes_part = where | ~jnp.any(where, axis, keepdims=True)
        seen = jnp.where(takes_part, x, -jnp.inf)
    # The peak cancels wherever it is used, so it needs no derivative.
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
    r"""Returns $p (\dot x - \sum p \dot x)$, the tangent of probabilities."""
    return p * (dot - jnp.sum(p * dot, axis, where=where, keepdims=True))


# --- Means and variances, summed in float32 -------------------------------------------


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


# --- Cross entropy --------------------------------------------------------------------
#
# Saved for backward: the half-precision logits, the labels, and for each row its
# maximum and the sum of its exponentials relative to that, in float32.

_CALL = "`mpx.nn.cross_entropy(logits, labels)`"


def cross_entropy(
    logits: Float[Array, "..."],
    labels: Shaped[Array, "..."],
    *,
    axis: int = -1,
    label_smoothing: float = 0.0,
    where: Where = None,
) -> Float[Array, "..."]:
    r"""Computes the cross entropy of logits with labels in float32.

    $$L = -\sum_i q_i \log p_i, \qquad
    q_i = (1 - s)\, y_i + \frac{s}{K}, \qquad p = \operatorname{softmax}(x)$$

    where $y$ is 1 at an integer label and 0 elsewhere, or the given distribution.

    Args:
        logits: $x$, in any floating dtype.
        labels: Integers from 0 to $K - 1$, in the shape of the logits without `axis`;
            or the distribution $y$, floating, in the shape of the logits. Negative
            integers count from the end as in numpy; others out of range give NaN.
        axis: The axis of the classes.
        label_smoothing: $s$, from 0 to 1.
        where: The classes to include, all by default; broadcasts to the logits. $K$
            counts them, and the loss of a row without any is 0.

    Returns:
        The losses, in the shape of the logits without `axis`; float32, or float64 for
        float64 logits. Exclude rows with `mpx.nn.mean(losses, where=rows)`.

    Raises:
        ValueError: The shape of the labels does not match, or `label_smoothing` is not
            between 0 and 1.
        TypeError: The labels are neither integers nor floating.

    Saved for backward: the half-precision logits, which exist anyway, the labels, and
    two float32 for each row.

    At the edges: a class with $y_i = 0$ may have the logit `-inf`; a row of `-inf`
    gives NaN.

    Examples:
        >>> import jax.numpy as jnp, mpx.nn
        >>> logits = jnp.array([[1e4, 1e4], [0, 1e4]], jnp.float16)
        >>> mpx.nn.cross_entropy(logits, jnp.array([0, 0]))
        Array([6.931472e-01, 1.000000e+04], dtype=float32)
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    axis = axis + logits.ndim if axis < 0 else axis
    _check(logits, labels, axis, label_smoothing)
    smoothing = float(label_smoothing)
    if where is not None:
        where = jnp.broadcast_to(where, logits.shape)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        if labels.dtype.itemsize < 4:  # the number of classes need not fit
            labels = labels.astype(jnp.int32)
        labels = jnp.where(labels < 0, labels + logits.shape[axis], labels)

    def evaluate(keep: Keep, logits: Array, labels: Array, where: Where) -> Array:
        return _losses(keep, axis, smoothing, logits, labels, where)

    return recomputed(evaluate, logits, labels, where)


def _check(logits: Array, labels: Array, axis: int, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            "`label_smoothing` of `mpx.nn.cross_entropy` must be between 0 and 1; "
            f"got {label_smoothing}. 0 disables it."
        )
    if not 0 <= axis < logits.ndim:
        raise ValueError(
            f"`axis` of {_CALL} must be an axis of `logits`, {describe(logits)}; got "
            f"{axis}. The last axis is -1."
        )
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    if jnp.issubdtype(labels.dtype, jnp.integer):
        expected, remedy = (
            rows,
            ("Or pass distributions, floating, of the logits' shape"),
        )
    elif jnp.issubdtype(labels.dtype, jnp.floating):
        expected, remedy = logits.shape, "Or pass the integers of the classes"
    else:
        raise TypeError(
            f"`labels` of {_CALL} must be integers or distributions; got "
            f"{describe(labels)}. Cast them: `labels.astype(int)`."
        )
    if labels.shape != expected:
        raise ValueError(
            f"`labels` of {_CALL} must have the shape {expected} for the logits "
            f"{describe(logits)} and their axis {axis}; got {describe(labels)}. "
            f"{remedy}."
        )


def _losses(
    keep: Keep,
    axis: int,
    smoothing: float,
    logits: Array,
    labels: Array,
    where: Where,
) -> Array:
    wide = widen(logits)
    (peak, log_total), log_p = log_probabilities(keep, wide, axis, where)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        places = jnp.expand_dims(labels, axis)
        classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, axis)
        # A lookup with the gradient of a comparison: its own would be a scatter.
        chosen = known(
            widen(jnp.take_along_axis(logits, places, axis)),
            jnp.sum(jnp.where(classes == places, wide, 0), axis, keepdims=True),
        )
        loss = jnp.squeeze(log_total - (chosen - peak), axis)
    else:
        y = labels.astype(log_p.dtype)
        # Avoids 0 * inf: a class with label 0 may have the logit -inf.
        terms = y * jnp.where((y == 0) & jnp.isinf(log_p), 0, log_p)
        loss = -jnp.sum(terms, axis, where=where)
    if smoothing:
        even = -jnp.mean(log_p, axis, where=where)
        loss = (1 - smoothing) * loss + smoothing * even
    return loss if where is None else jnp.where(jnp.any(where, axis), loss, 0)
