"""Cross entropy.

Kept for the backward pass are the half-precision logits, the labels, and of each row
its maximum and the sum of its exponentials relative to that, in float32.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from .._errors import describe
from ._recomputed import Keep, known, recomputed, widen
from ._softmax import Where, log_probabilities

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
        # Looked up, with the gradient of a comparison: its own is a scatter.
        chosen = known(
            widen(jnp.take_along_axis(logits, places, axis)),
            jnp.sum(jnp.where(classes == places, wide, 0), axis, keepdims=True),
        )
        loss = jnp.squeeze(log_total - (chosen - peak), axis)
    else:
        y = labels.astype(log_p.dtype)
        # Nothing times infinity: a class that is not expected may be impossible.
        terms = y * jnp.where((y == 0) & jnp.isinf(log_p), 0, log_p)
        loss = -jnp.sum(terms, axis, where=where)
    if smoothing:
        even = -jnp.mean(log_p, axis, where=where)
        loss = (1 - smoothing) * loss + smoothing * even
    return loss if where is None else jnp.where(jnp.any(where, axis), loss, 0)
