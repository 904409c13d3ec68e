r"""Attention from two matmuls and a softmax, for every device and dtype.

$$P = \operatorname{softmax}\!\big(s\, Q K^\top + \text{bias}\big), \qquad O = P\, V$$

The scores are summed and exponentiated in float32. Saved for backward: $Q$, $K$, $V$
and $P$ in half precision. `jax.nn.dot_product_attention` saves $P$ in float32 and in
half precision, three times as much, unless cuDNN computes it. Gradients of the scores
are half precision, as in flash attention, so no matmul of the backward pass has a
float32 operand.

Operands, options and masks are defined here, too. Axes are named as in
`jax.nn.dot_product_attention`: batch, query sequence, heads and size of a head for
queries; batch, key sequence, groups and size for keys and values. Masks and biases have
four axes, (batch, heads, query sequence, key sequence), each of the full length or 1.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._quantize import Target
from ._recomputed import drop, linear, widen
from ._softmax import tangent_of_softmax

Implementation = Literal["xla", "cudnn", "pallas"] | None


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of attention; hashable.

    Attributes:
        scale: The factor of the scores.
        is_causal: Whether no query attends to a later key.
        window: How many keys before and after itself a query attends to, or None.
        rate: The probability with which a probability is dropped.
        implementation: As in `mpx.nn.dot_product_attention`.
        with_residual: Whether the logarithms of the rows' sums are a result, too.
        target: The device to compile for, if it was set, or None.
        without_kernel: Why the kernel must not be used; empty if it may.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    rate: float = 0.0
    implementation: Implementation = None
    with_residual: bool = False
    target: Target | None = None
    without_kernel: str = ""

    def __str__(self) -> str:
        """Returns all options in one line, without "/", which would split scopes."""
        target = None if self.target is None else self.target.name
        values = vars(self) | {"target": target}
        return ",".join(str(v).replace("/", "|") for v in values.values())


class Operands(NamedTuple):
    """The arrays that are the operands of attention; None if absent.

    Attributes:
        query: (batch, query sequence, heads, size).
        key: (batch, key sequence, groups, size).
        value: As `key`.
        bias: Is added to the scaled scores.
        mask: True allows attention to a key.
        keep: True where a probability is not dropped.
        query_lengths: The number of queries of each batch row, int32.
        key_lengths: The same for keys and values.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    keep: Any = None
    query_lengths: Any = None
    key_lengths: Any = None

    def dropped(self, rate: float, key: PRNGKeyArray | None) -> Self:
        """Returns the operands with a dropout mask drawn by a key, if any."""
        if not rate or key is None:
            return self
        return self._replace(keep=jax.random.bernoulli(key, 1 - rate, self.shape))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands that are not None."""
        return tuple(n for n in self._fields if getattr(self, n) is not None)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, query sequence, key sequence: the shape of the scores."""
        batch, length, heads, _ = self.query.shape
        return batch, heads, length, self.key.shape[1]


class Visibility(NamedTuple):
    """Which keys each query attends to; None for all.

    Attributes:
        order: The mask by positions (causal, windows), (1, 1, query sequence, key
            sequence).
        given: The mask by `mask` and lengths.
        seen: Whether both allow a query any key; the last axis has length 1.
    """

    order: Array | None
    given: Array | None
    seen: Array | None

    @property
    def allowed(self) -> Array | None:
        """Both masks. A query without any key attends to all that `order` allows."""
        if self.given is None or self.seen is None:
            return self.order
        given = self.given | ~self.seen
        return given if self.order is None else given & self.order


def visibility(options: AttentionOptions, x: Operands) -> Visibility:
    """Returns which keys each query attends to."""
    _, _, length, keys = x.shape
    order = order_mask(options.is_causal, options.window, length, keys)
    given = x.mask
    if x.key_lengths is not None:
        within = _places(keys, 3) < x.key_lengths.reshape(-1, 1, 1, 1)
        given = within if given is None else given & within
    both = given if order is None or given is None else given & order
    if order is not None and options.window is not None:
        if length - options.window[0] > keys:  # the last queries have no key
            both = order if given is None else both
            order = order | ~jnp.any(order, axis=-1, keepdims=True)
    if both is None:
        return Visibility(order, None, None)
    return Visibility(order, given, jnp.any(both, axis=-1, keepdims=True))


def order_mask(
    is_causal: bool, window: tuple[int, int] | None, length: int, keys: int
) -> Array | None:
    """Returns the mask by positions, (1, 1, length, keys), or None."""
    if not is_causal and window is None:
        return None
    ahead = _places(keys, 3) - _places(length, 2)
    left, right = window or (length, keys)
    right = min(right, 0) if is_causal else right
    mask = ahead <= right
    return mask & (ahead >= -left) if window is not None else mask


def within_lengths(x: Array, lengths: Array | None) -> Array:
    """Returns an array of (batch, sequence, ...) with zeros after each row's length."""
    if lengths is None:
        return x
    inside = _places(x.shape[1], 1, x.ndim) < lengths.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(inside, x, jnp.zeros((), x.dtype))


def _places(count: int, axis: int, ndim: int = 4) -> Array:
    """Returns the positions along an axis, int32 like lengths, even with x64."""
    shape = [1] * ndim
    shape[axis] = count
    return jnp.arange(count, dtype=jnp.int32).reshape(shape)


# --- The matmuls ----------------------------------------------------------------------


def attend_by_products(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    """Returns the result of attention and, if requested, the rows' logarithms."""
    return _attend(options, x, _probabilities)


def decomposed(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    """Returns the same without a derivative rule; callers have one per operation."""
    return _attend(options, x, _softmax_of_scores)


def _attend(
    options: AttentionOptions, x: Operands, probabilities: Callable[..., Array]
) -> tuple[Array, ...]:
    batch, length, heads, size = x.query.shape
    groups = x.key.shape[2]
    seen = Visibility(*(_split(mask, groups) for mask in visibility(options, x)))
    bias = _split(x.bias, groups)
    query = x.query.reshape(batch, length, groups, heads // groups, size)
    operands = query, x.key, bias, seen.allowed, seen.seen
    p = probabilities(options.scale, *operands)
    if x.keep is not None:
        p = drop(p, _split(x.keep, groups), options.rate)
    out = jnp.einsum("bgnts,bsgh->btgnh", p, x.value)
    out = within_lengths(out.reshape(batch, length, heads, size), x.query_lengths)
    if not options.with_residual:
        return (out,)
    scores = _scores(options.scale, *jax.lax.stop_gradient(operands))
    rows = jax.nn.logsumexp(scores, axis=-1).reshape(batch, heads, length)
    return out, rows


def _split(mask: Any, groups: int) -> Any:
    """Splits the head axis of a mask or bias in two: the groups, and heads of each."""
    if mask is None:
        return None
    heads = mask.shape[1]
    split = (1, 1) if heads == 1 else (groups, heads // groups)
    return mask.reshape(mask.shape[0], *split, *mask.shape[2:])


def _scores(
    scale: float,
    query: Float[Array, "batch q_seq groups heads size"],
    key: Float[Array, "batch kv_seq groups size"],
    bias: Array | None,
    allowed: Array | None,
    seen: Array | None,
) -> Float[Array, "batch groups heads q_seq kv_seq"]:
    # A slice of no rows: only the dtype is needed.
    wide = widen(query[:0]).dtype
    # Not -inf: a row without any key is then uniform, and not NaN.
    lowest = 0.7 * jnp.finfo(wide).min
    scores = jnp.einsum("btgnh,bsgh->bgnts", query, key, preferred_element_type=wide)
    scores = scores * scale
    if bias is not None:
        scores = scores + jnp.maximum(bias.astype(wide), lowest)
    if seen is not None:
        scores = jnp.where(seen, scores, 0)
    return scores if allowed is None else jnp.where(allowed, scores, lowest)


def _softmax_of_scores(scale: float, query: Array, *rest: Any) -> Array:
    return jax.nn.softmax(_scores(scale, query, *rest), -1).astype(query.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _probabilities(
    scale: float,
    query: Array,
    key: Array,
    bias: Array | None,
    allowed: Array | None,
    seen: Array | None,
) -> Array:
    return _softmax_of_scores(scale, query, key, bias, allowed, seen)


def _probabilities_rule(scale: float, primals: PyTree, tangents: PyTree) -> PyTree:
    query, key, _, _, seen = primals
    query_dot, key_dot, bias_dot, *_ = (
        None if isinstance(dot, SymbolicZero) else dot for dot in tangents
    )
    p = _probabilities(scale, *primals)
    product = functools.partial(jnp.einsum, "btgnh,bsgh->bgnts")
    terms = [] if query_dot is None else [product(query_dot, key)]
    terms += [] if key_dot is None else [product(query, key_dot)]
    dot = sum(terms[1:], terms[0]) if terms else None
    if dot is None and bias_dot is None:
        return p, jnp.zeros_like(p)

    def evaluate(residuals: PyTree, dots: PyTree) -> Array:
        p, seen = residuals
        dot, bias_dot = dots
        p = widen(p)
        total = jnp.zeros_like(p) if dot is None else widen(dot) * scale
        if bias_dot is not None:
            total = total + bias_dot.astype(p.dtype)
        if seen is not None:
            total = jnp.where(seen, total, 0)
        return tangent_of_softmax(p, total).astype(query.dtype)

    return p, linear(evaluate, (p, seen), (dot, bias_dot))


_probabilities.defjvp(_probabilities_rule, symbolic_zeros=True)


# --- Under `vmap` ---------------------------------------------------------------------


def folded(size: int, batched: Operands, x: Operands, *, apart: bool) -> Operands:
    """Merges the operands of several calls into those of one, along the batch.

    Args:
        size: The number of calls.
        batched: Which operands have a first axis for the calls.
        x: The operands.
        apart: Whether calls that share a bias get one each, for its gradient.
    """
    first = 1 if batched.query else 0
    batch = x.query.shape[first]

    def fold(name: str) -> Any:
        array, has_axis = getattr(x, name), getattr(batched, name)
        if array is None:
            return None
        rows = array.shape[1 if has_axis else 0]
        is_shared = rows == 1 and not has_axis and (name != "bias" or not apart)
        if is_shared and name in ("bias", "mask"):
            return array
        rest = array.shape[2 if has_axis else 1 :]
        array = array if has_axis else array[None]
        return jnp.broadcast_to(array, (size, batch, *rest)).reshape(-1, *rest)

    return Operands(**{name: fold(name) for name in x.names})


def unfolded(size: int, array: Array, rows: int | None = None) -> Array:
    """Splits a result of folded calls: adds a first axis for the calls.

    Args:
        size: The number of calls.
        array: The result, whose first axis is that of the batch.
        rows: The length of the batch axis; if it is 1, the parts are summed.
    """
    parts = array.reshape(size, -1, *array.shape[1:])
    return jnp.sum(parts, axis=1, keepdims=True) if rows == 1 else parts
