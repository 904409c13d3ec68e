r"""The core of attention: scores, probabilities and what they select.

$$P = \operatorname{softmax}\!\Big(\frac{Q K^\top}{\sqrt d} + \text{bias}
+ \text{mask}\Big), \qquad O = P\, V$$

The scores are added up and exponentiated in float32; what is kept for the backward pass
is $Q$, $K$, $V$ and $P$ in half precision. `jax.nn.dot_product_attention` keeps $P$ in
float32 and in half precision, three times as much, unless cuDNN computes it; and it
knows no dropout. Gradients of the scores are half precision, as in flash attention, so
that no product of the backward pass has a float32 operand.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ._elementwise import dropout
from ._linear_part import from_residuals, widen


def attention(
    query: Float[Array, "batch q_seq heads size"],
    key: Float[Array, "batch kv_seq groups size"],
    value: Float[Array, "batch kv_seq groups size"],
    mask: Bool[Array, "#batch #heads #q_seq #kv_seq"] | None,
    bias: Float[Array, "#batch #heads #q_seq #kv_seq"] | None,
    is_causal: bool,
    rate: float,
    dropout_key: PRNGKeyArray | None,
) -> Float[Array, "batch q_seq heads size"]:
    """Attention of grouped queries, in the dtype of the query."""
    batch, length, heads, size = query.shape
    groups = key.shape[2]
    if is_causal:
        causal = jnp.tril(jnp.ones((1, 1, length, key.shape[1]), bool))
        mask = causal if mask is None else mask & causal
    mask = None if mask is None else _grouped(mask, groups)
    bias = None if bias is None else _grouped(bias, groups)
    query = query.reshape(batch, length, groups, heads // groups, size)
    p = _probabilities(query, key, mask, bias)
    if dropout_key is not None and rate > 0:
        p = dropout(p, rate, dropout_key)
    out = jnp.einsum("bgnts,bsgh->btgnh", p, value)
    return out.reshape(batch, length, heads, size)


def _grouped(mask: Array, groups: int) -> Array:
    """A mask or bias with two axes of heads: the groups, and the heads of each."""
    heads = mask.shape[1]
    split = (1, 1) if heads == 1 else (groups, heads // groups)
    return mask.reshape(mask.shape[0], *split, *mask.shape[2:])


@jax.custom_jvp
def _probabilities(
    query: Array, key: Array, mask: Array | None, bias: Array | None
) -> Array:
    wide = widen(query[:0]).dtype
    scores = jnp.einsum("btgnh,bsgh->bgnts", query, key, preferred_element_type=wide)
    scores = scores * _scale(query)
    if bias is not None:
        scores = scores + bias.astype(wide)
    if mask is not None:
        # Not -inf: a row of which nothing is left is uniform, and not NaN.
        scores = jnp.where(mask, scores, 0.7 * jnp.finfo(wide).min)
    return jax.nn.softmax(scores, -1).astype(query.dtype)


def _scale(query: Array) -> float:
    return query.shape[-1] ** -0.5


@_probabilities.defjvp
def _probabilities_rule(primals: Any, tangents: Any) -> Any:
    query, key, mask, bias = primals
    query_dot, key_dot, _, bias_dot = tangents
    p = _probabilities(query, key, mask, bias)
    product = functools.partial(jnp.einsum, "btgnh,bsgh->bgnts")
    dot = product(query_dot, key) + product(query, key_dot)

    def linear_part(residuals: Any, dots: Any) -> Array:
        p, mask = residuals
        dot, bias_dot = dots
        p, dot = widen(p), widen(dot) * _scale(query)
        if bias_dot is not None:
            dot = dot + bias_dot.astype(dot.dtype)
        if mask is not None:  # matters in rows of which nothing is left
            dot = jnp.where(mask, dot, 0)
        inner = jnp.sum(p * dot, -1, keepdims=True)
        return (p * (dot - inner)).astype(query.dtype)

    return p, from_residuals(linear_part, (p, mask), (dot, bias_dot))


def rotate(
    x: Float[Array, "batch seq heads size"], base: float
) -> Float[Array, "batch seq heads size"]:
    r"""Rotary positions: turns pairs of channels by angles that grow with the position.

    $$\begin{pmatrix} y_i \\ y_{i + d/2} \end{pmatrix} =
    \begin{pmatrix} \cos t\theta_i & -\sin t\theta_i \\
    \sin t\theta_i & \cos t\theta_i \end{pmatrix}
    \begin{pmatrix} x_i \\ x_{i + d/2} \end{pmatrix}, \qquad
    \theta_i = \text{base}^{-2i/d}$$

    Angles, sines and cosines are float32; kept for the backward pass is nothing of the
    size of x. Reference: Su et al., RoFormer, 2021, equation 34.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    dtype = widen(x[:0]).dtype
    rates = base ** (-jnp.arange(half, dtype=dtype) / half)
    angles = jnp.arange(length, dtype=dtype)[:, None] * rates[None, :]

    def linear_part(turns: Any, x: Array) -> Array:
        cos, sin = (turn[None, :, None, :] for turn in turns)
        first, second = jnp.split(widen(x), 2, axis=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(turned, -1).astype(x.dtype)

    return from_residuals(linear_part, (jnp.cos(angles), jnp.sin(angles)), x)
