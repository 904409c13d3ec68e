"""Wide models, whose products fill a device: two MLP blocks, and a layer of Llama.

Both are functions of their layers (`weights`), so that mpx, casts by hand and the peers
run the same lines. No line is about precision but for norms, whose statistics are in
float32 as everyone has them, and a weight that takes the dtype of its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from .weights import Layers


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a wide model.

    Attributes:
        width: Of the residual stream.
        hidden: Of the MLP.
        classes: Of the head, and of the embedding if there is one.
        layers: How many blocks.
        heads: Of queries.
        key_heads: Of keys and values.
        kernel: Attention is cuDNN's kernel, not products and a softmax.
    """

    width: int
    hidden: int
    classes: int
    layers: int
    heads: int = 0
    key_heads: int = 0
    kernel: bool = False


def ffn(
    layers: Layers, batch: Any, sizes: Sizes, activation: Callable[[Array], Array]
) -> Array:
    """Cross entropy of MLP blocks on rows of numbers, each behind a norm."""
    x, labels = batch
    for index in range(sizes.layers):
        block = layers.at(f"block{index}")
        hidden = block.dense("up", rms_norm(block, "norm", x), sizes.hidden)
        x = x + block.dense("down", activation(hidden), sizes.width)
    return cross_entropy(x @ head(layers, x, sizes), labels)


def llama(layers: Layers, tokens: Array, sizes: Sizes) -> Array:
    """Cross entropy of the next token, block after block."""
    x = embed(layers, tokens, sizes)
    for index in range(sizes.layers):
        x = llama_block(layers.at(f"block{index}"), x, sizes)
    return next_token_loss(layers, x, tokens, sizes)


def llama_block(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Attention, and a gated MLP, each behind a norm."""
    x = x + attention(layers, x, sizes)
    normed = rms_norm(layers, "mlp_norm", x)
    gate = layers.dense("gate", normed, sizes.hidden)
    up = layers.dense("up", normed, sizes.hidden)
    return x + layers.dense("down", jax.nn.silu(gate) * up, sizes.width)


def attention(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Causal, with rotary positions and grouped keys; softmax in float32 as Llama's."""
    batch, length, _ = x.shape
    size = sizes.width // sizes.heads
    normed = rms_norm(layers, "attention_norm", x)

    def heads_of(name: str, count: int) -> Array:
        flat = layers.dense(name, normed, count * size)
        return flat.reshape(batch, length, count, size)

    query = rotary(heads_of("query", sizes.heads))
    key = rotary(heads_of("key", sizes.key_heads))
    value = heads_of("value", sizes.key_heads)
    mixed = attend(layers, query, key, value, sizes)
    return layers.dense("out", mixed, sizes.width)


def attend(
    layers: Layers, query: Array, key: Array, value: Array, sizes: Sizes
) -> Array:
    """Causal attention of [batch, length, heads, size], its heads joined."""
    batch, length, _, size = query.shape
    if sizes.kernel:
        return layers.attend(query, key, value).reshape(batch, length, -1)
    groups = sizes.heads // sizes.key_heads
    query = query.reshape(batch, length, sizes.key_heads, groups, size)
    logits = jnp.einsum("bqkgd,bskd->bkgqs", query, key) / size**0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    full = jnp.where(mask, logits.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(full).astype(value.dtype)
    mixed = jnp.einsum("bkgqs,bskd->bqkgd", weights, value)
    return mixed.reshape(batch, length, -1)


def rms_norm(layers: Layers, name: str, x: Array) -> Array:
    """Root mean square norm over the last axis, with a scale."""
    scale = layers.weight(name, x.shape[-1]).astype(x.dtype)
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def rotary(x: Array) -> Array:
    """Rotary positions of [batch, length, heads, size]."""
    length, size = x.shape[1], x.shape[-1]
    rates = 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None, None] * rates
    sine, cosine = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1)


def embed(layers: Layers, tokens: Array, sizes: Sizes) -> Array:
    """Vectors of all tokens but the last."""
    return layers.weight("embed", sizes.classes, sizes.width)[tokens[:, :-1]]


def head(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """The weight of the logits, which no arm quantizes."""
    return layers.weight("head", sizes.width, sizes.classes).astype(x.dtype)


def next_token_loss(layers: Layers, x: Array, tokens: Array, sizes: Sizes) -> Array:
    """Of all tokens but the first."""
    logits = rms_norm(layers, "norm", x) @ head(layers, x, sizes)
    return cross_entropy(logits, tokens[:, 1:])


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross entropy, in float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return jnp.mean(losses)
