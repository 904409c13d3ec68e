r"""Cross entropy.

With the probabilities $p$ of the logits $x$, $\log Z = \log \sum_j e^{x_j}$, and the
target distribution $q$, the loss and its tangent are

$$L = -\sum_i q_i (x_i - \log Z), \qquad
\dot L = \sum_i \big(p_i \textstyle\sum_j q_j - q_i\big)\, \dot x_i
- \sum_i \dot q_i (x_i - \log Z).$$

Kept are the half-precision logits, the labels, and of each row its maximum and $\log Z$
relative to that, in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from .._dtypes import full_precision_of
from .._errors import describe
from ._linear_part import active, from_residuals, widen
from ._softmax import Where, log_probabilities, probabilities, row_statistics

_CALL = "`mpx.nn.cross_entropy(logits, labels)`"


def cross_entropy(
    logits: Float[Array, "..."],
    labels: Shaped[Array, "..."],
    *,
    axis: int = -1,
    label_smoothing: float = 0.0,
    where: Where = None,
) -> Float[Array, "..."]:
    r"""Cross entropy of the softmax of logits with labels, computed in float32.

    $$L = -\sum_i q_i \log p_i, \qquad
    q_i = (1 - s)\, y_i + \frac{s}{K}, \qquad p = \operatorname{softmax}(x)$$

    where $y$ is 1 at an integer label and 0 elsewhere, or the distribution given.

    Args:
        logits: $x$, in any floating dtype.
        labels: Integers from 0 to $K - 1$, in the shape of the logits without `axis`;
            or the distribution $y$, floating, in the shape of the logits. Other
            integers give NaN, but negative ones count from the end as in numpy.
        axis: The axis of the classes.
        label_smoothing: $s$, from 0 to 1.
        where: Which classes take part; broadcasts to the logits. $K$ counts them, and
            the loss of a row without any is 0.

    Returns:
        The losses, in the shape of the logits without `axis`; float32, or float64 for
        float64 logits. Leave rows out with `mpx.nn.mean(losses, where=rows)`.

    Raises:
        ValueError: The shape of the labels does not fit, or `label_smoothing` does not
            lie between 0 and 1.
        TypeError: The labels are neither integers nor floating.

    Kept for the backward pass: the half-precision logits, which are there anyway, the
    labels, and two float32 for each row.

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
    if where is not None:
        where = jnp.broadcast_to(where, logits.shape)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        if labels.dtype.itemsize < 4:  # the number of classes need not fit
            labels = labels.astype(jnp.int32)
        labels = jnp.where(labels < 0, labels + logits.shape[axis], labels)
    return _cross_entropy(axis, float(label_smoothing), logits, labels, where)


def _check(logits: Array, labels: Array, axis: int, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            "`label_smoothing` of `mpx.nn.cross_entropy` must lie between 0 and 1; got "
            f"{label_smoothing}. 0 switches it off."
        )
    if not 0 <= axis < logits.ndim:
        raise ValueError(
            f"`axis` of {_CALL} must be an axis of `logits`, {describe(logits)}; got "
            f"{axis}. The last axis is -1."
        )
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    if jnp.issubdtype(labels.dtype, jnp.integer):
        expected, remedy = rows, "Or give distributions, floating, of the logits' shape"
    elif jnp.issubdtype(labels.dtype, jnp.floating):
        expected, remedy = logits.shape, "Or give the integers of the classes"
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _cross_entropy(
    axis: int, smoothing: float, logits: Array, labels: Array, where: Where
) -> Array:
    return _evaluate(axis, smoothing, logits, labels, where)[0]


def _evaluate(
    axis: int, smoothing: float, logits: Array, labels: Array, where: Where
) -> tuple[Array, tuple[Array, Array]]:
    """The losses, and the two numbers of each row that give its probabilities."""
    wide = widen(logits)
    statistics = row_statistics(logits, axis, where)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        chosen = jnp.take_along_axis(logits, jnp.expand_dims(labels, axis), axis)
        loss = -jnp.squeeze(log_probabilities(chosen, statistics), axis)
    else:
        y = labels.astype(wide.dtype)
        terms = jnp.where(y == 0, 0, y * jax.nn.log_softmax(wide, axis, where))
        loss = -jnp.sum(terms, axis, where=where)
    if smoothing:
        even = -jnp.mean(log_probabilities(logits, statistics), axis, where=where)
        loss = (1 - smoothing) * loss + smoothing * even
    if where is not None:
        loss = jnp.where(jnp.any(where, axis), loss, 0)
    return loss, statistics


def _cross_entropy_rule(
    axis: int, smoothing: float, primals: PyTree, tangents: PyTree
) -> PyTree:
    logits, labels, where = primals
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    loss, statistics = _evaluate(axis, smoothing, logits, labels, where)

    def linear_part(residuals: PyTree, dots: PyTree) -> Array:
        logits, labels, statistics, where = residuals
        q, weight = _target(axis, smoothing, logits, labels, where)
        logits_dot, labels_dot = dots
        dot = jnp.zeros_like(loss)
        if logits_dot is not None:
            p = probabilities(logits, statistics, where)
            dot = dot + jnp.sum((p * weight - q) * widen(logits_dot), axis)
        if labels_dot is not None:
            log_p = log_probabilities(logits, statistics)
            log_p = log_p if where is None else jnp.where(where, log_p, 0)
            labels_dot = labels_dot.astype(log_p.dtype)
            dot = dot - (1 - smoothing) * jnp.sum(log_p * labels_dot, axis)
        if where is not None:
            dot = jnp.where(jnp.any(where, axis), dot, 0)
        return dot

    dots = active(tangents[0]), None if is_integer else active(tangents[1])
    residuals = logits, labels, statistics, where
    return loss, from_residuals(linear_part, residuals, dots)


_cross_entropy.defjvp(_cross_entropy_rule, symbolic_zeros=True)


def _target(
    axis: int, smoothing: float, logits: Array, labels: Array, where: Where
) -> tuple[Array, Array | float]:
    """The target distribution among the classes that take part, and its sum."""
    dtype = full_precision_of(logits.dtype)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, axis)
        y = (classes == jnp.expand_dims(labels, axis)).astype(dtype)
        total: Array | float = 1.0
    else:
        y = labels.astype(dtype)
        y = y if where is None else jnp.where(where, y, 0)
        total = jnp.sum(y, axis, keepdims=True)
    if not smoothing:
        return y, total
    if where is None:
        even = jnp.full_like(y, 1 / logits.shape[axis])
    else:
        included = where.astype(dtype)
        count = jnp.sum(included, axis, keepdims=True)
        even = included / jnp.maximum(count, 1)
    return (1 - smoothing) * y + smoothing * even, (1 - smoothing) * total + smoothing
