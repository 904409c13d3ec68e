"""Models of other kinds, for half precision: each has a way of its own to lose by it.

A recurrent network, whose weights are used at every step; a gated state space model; a
mixture of experts; a ResNet with batch norms. They are functions of their layers
(`weights`), as those of `arranged` are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .arranged import (
    Model,
    Order,
    Sizes,
    attention,
    cross_entropy,
    embed,
    head,
    next_token_loss,
    of_tokens,
    rms_norm,
)
from .weights import Layers

# --- Of tokens ------------------------------------------------------------------------


def lstm(sizes: Sizes, order: Order, layer: Any = None) -> Model:
    """Cross entropy of the next token; by layers of `lstm_layer`, or of others."""
    del order

    def loss(layers: Layers, tokens: Any) -> Array:
        x = jnp.swapaxes(embed(layers, tokens, sizes), 0, 1)
        for index in range(sizes.layers):
            x = (layer or lstm_layer)(layers.at(f"block{index}"), x)
        return next_token_loss(layers, jnp.swapaxes(x, 0, 1), tokens, sizes)

    return loss


def lstm_layer(layers: Layers, x: Array) -> Array:
    """Of [time, batch, width]."""
    width = x.shape[-1]
    of_input = layers.weight("input", width, 4 * width).astype(x.dtype)
    of_state = layers.weight("state", width, 4 * width).astype(x.dtype)
    bias = layers.weight("bias", 4 * width).astype(x.dtype)

    def turn(carry: tuple[Array, Array], x: Array) -> tuple[Any, Array]:
        h, c = carry
        gates = x @ of_input + h @ of_state + bias
        into, forget, cell, out = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(into) * jnp.tanh(cell)
        h = jax.nn.sigmoid(out) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros(x.shape[1:], x.dtype)
    return jax.lax.scan(turn, (zeros, zeros), x)[1]


def state_space(sizes: Sizes, order: Order, full: Any = None) -> Model:
    """Of blocks of states `h[t] = a[t] h[t-1] + (1 - a[t]) x[t]`, gated; of a dtype."""

    def block(layers: Layers, x: Array) -> Array:
        found = layers.dense("into", rms_norm(layers, "norm", x), 3 * sizes.hidden)
        drive, decay, gate = jnp.split(found, 3, axis=-1)
        decay = jax.nn.sigmoid(decay.astype(full or x.dtype))

        def combine(first: Any, second: Any) -> tuple[Array, Array]:
            return first[0] * second[0], second[0] * first[1] + second[1]

        pairs = decay, (1 - decay) * drive.astype(decay.dtype)
        _, states = jax.lax.associative_scan(combine, pairs, axis=1)
        gated = states * jax.nn.silu(gate)
        return x + layers.dense("out", gated.astype(x.dtype), sizes.width)

    return of_tokens(sizes, order, block)


# How many there are, and how many each token takes.
EXPERTS, TAKEN = 8, 2


def _routed(layers: Layers, x: Array) -> tuple[Array, Array]:
    """Of each token: its experts, and how much of each."""
    router = layers.weight("router", x.shape[-1], EXPERTS).astype(x.dtype)
    logits, chosen = jax.lax.top_k((x @ router).astype(jnp.float32), TAKEN)
    return chosen, jax.nn.softmax(logits).astype(x.dtype)


def weights_of_experts(layers: Layers, x: Array, sizes: Sizes) -> Iterator[Array]:
    """Into the hidden layer twice, and out of it."""
    inside, outside = (sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
    for name, shape in {"gate": inside, "up": inside, "down": outside}.items():
        yield layers.weight(name, EXPERTS, *shape).astype(x.dtype)


def _by_ragged_dot(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Tokens are sorted by their experts."""
    gate, up, down = weights_of_experts(layers, x, sizes)
    rows = x.reshape(-1, x.shape[-1])
    chosen, shares = _routed(layers, rows)
    order = jnp.argsort(chosen.reshape(-1))
    counts = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    sorted_rows = rows[order // TAKEN]
    hidden = jax.nn.silu(jax.lax.ragged_dot(sorted_rows, gate, counts))
    hidden = hidden * jax.lax.ragged_dot(sorted_rows, up, counts)
    out = jax.lax.ragged_dot(hidden, down, counts)
    out = out[jnp.argsort(order)].reshape(-1, TAKEN, x.shape[-1]) * shares[..., None]
    return jnp.sum(out, 1).reshape(x.shape)


def experts(sizes: Sizes, order: Order, mix: Any = _by_ragged_dot) -> Model:
    """Of blocks of attention, and experts of which each token takes some."""

    def block(layers: Layers, x: Array) -> Array:
        x = x + attention(layers, x, sizes)
        return x + mix(layers, rms_norm(layers, "norm", x), sizes)

    return of_tokens(sizes, order, block)


# --- Of images ------------------------------------------------------------------------


def _batch_norm(layers: Layers, name: str, x: Array) -> Array:
    """Mean zero and variance one, with statistics in float32; a scale and a shift."""
    full, axes = x.astype(jnp.float32), (0, 1, 2)
    mean = jnp.mean(full, axes, keepdims=True)
    variance = jnp.mean(jnp.square(full), axes, keepdims=True) - jnp.square(mean)
    normed = ((full - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)
    scale = layers.weight(f"{name}_scale", x.shape[-1]).astype(x.dtype)
    return normed * scale + layers.weight(f"{name}_shift", x.shape[-1]).astype(x.dtype)


def resnet(sizes: Sizes, order: Order) -> Model:
    """Of bottlenecks: so many in each of four stages."""
    del order
    return lambda layers, batch: _resnet(layers, *batch, sizes)


def _resnet(layers: Layers, x: Array, labels: Array, sizes: Sizes) -> Array:
    x = jax.nn.relu(_batch_norm(layers, "norm", layers.convolve("in", x, 64, 7, 2)))
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")
    for stage in range(4):
        for index in range(sizes.layers):
            part = layers.at(f"stage{stage}_{index}")
            x = _bottleneck(part, x, 64 * 2**stage, 2 if stage and not index else 1)
    return cross_entropy(head(layers, jnp.mean(x, (1, 2)), sizes.classes), labels)


def _bottleneck(layers: Layers, x: Array, channels: int, stride: int) -> Array:
    inner = _batch_norm(layers, "norm1", layers.convolve("conv1", x, channels, 1))
    inner = layers.convolve("conv2", jax.nn.relu(inner), channels, 3, stride)
    inner = jax.nn.relu(_batch_norm(layers, "norm2", inner))
    inner = layers.convolve("conv3", inner, 4 * channels, 1)
    if x.shape != inner.shape:
        x = layers.convolve("around", x, 4 * channels, 1, stride)
        x = _batch_norm(layers, "around_norm", x)
    return jax.nn.relu(x + _batch_norm(layers, "norm3", inner))
