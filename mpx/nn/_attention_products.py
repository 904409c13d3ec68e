r"""Attention from two matrix products and a softmax, for every device and dtype.

$$P = \operatorname{softmax}\!\big(s\, Q K^\top + \text{bias}\big), \qquad O = P\, V$$

The scores are added up and exponentiated in float32; what is kept for the backward pass
is $Q$, $K$, $V$ and $P$ in half precision. `jax.nn.dot_product_attention` keeps $P$ in
float32 and in half precision, three times as much, unless cuDNN computes it. Gradients
of the scores are half precision, as in flash attention, so that no product of the
backward pass has a float32 operand.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ._attention_operands import (
    AttentionOptions,
    Operands,
    Visibility,
    visibility,
    within_lengths,
)
from ._elementwise import drop
from ._linear_part import active, from_residuals, widen


def attend_by_products(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    """The result of attention and, where that is asked for, the rows' logarithms."""
    return _attend(options, x, _probabilities)


def decomposed(options: AttentionOptions, x: Operands) -> tuple[Array, ...]:
    """The same without a derivative rule: for whoever has one for each operation."""
    return _attend(options, x, _softmax_of_scores)


def _attend(
    options: AttentionOptions, x: Operands, probabilities: Callable[..., Array]
) -> tuple[Array, ...]:
    batch, length, heads, size = x.query.shape
    groups = x.key.shape[2]
    seen = _grouped(visibility(options, x), groups)
    bias = None if x.bias is None else _split(x.bias, groups)
    query = x.query.reshape(batch, length, groups, heads // groups, size)
    operands = query, x.key, bias, seen.allowed, seen.seen
    p = probabilities(options.scale, *operands)
    if x.keep is not None:
        p = drop(p, _split(x.keep, groups), options.rate)
    out = jnp.einsum("bgnts,bsgh->btgnh", p, x.value)
    out = within_lengths(out.reshape(batch, length, heads, size), x.query_lengths)
    if not options.with_residual:
        return (out,)
    scores = _scores(options.scale, *map(_without_derivative, operands))
    rows = jax.nn.logsumexp(scores, axis=-1).reshape(batch, heads, length)
    return out, rows


def _without_derivative(x: object) -> Any:
    return None if x is None else jax.lax.stop_gradient(x)


def _grouped(found: Visibility, groups: int) -> Visibility:
    return Visibility(*(x if x is None else _split(x, groups) for x in found))


def _split(mask: Array, groups: int) -> Array:
    """A mask or bias with two axes of heads: the groups, and the heads of each."""
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
    # Of no rows: only the dtype is asked for.
    wide = widen(query[:0]).dtype
    # Not -inf: a row of which nothing is left is even, and not NaN.
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
    query_dot, key_dot, bias_dot, *_ = map(active, tangents)
    p = _probabilities(scale, *primals)
    product = functools.partial(jnp.einsum, "btgnh,bsgh->bgnts")
    terms = [] if query_dot is None else [product(query_dot, key)]
    terms += [] if key_dot is None else [product(query, key_dot)]
    dot = sum(terms[1:], terms[0]) if terms else None
    if dot is None and bias_dot is None:
        return p, jnp.zeros_like(p)

    def linear_part(residuals: PyTree, dots: PyTree) -> Array:
        p, seen = residuals
        dot, bias_dot = dots
        p = widen(p)
        total = 0 if dot is None else widen(dot) * scale
        if bias_dot is not None:
            total = total + bias_dot.astype(p.dtype)
        if seen is not None:
            total = jnp.where(seen, total, 0)
        inner = jnp.sum(p * total, -1, keepdims=True)
        return (p * (total - inner)).astype(query.dtype)

    return p, from_residuals(linear_part, (p, seen), (dot, bias_dot))


_probabilities.defjvp(_probabilities_rule, symbolic_zeros=True)
