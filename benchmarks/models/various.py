"""Models of other kinds, for half precision: each has a way of its own to lose by it.

A Llama in a scan, with and without `jax.checkpoint`; a recurrent network, whose weights
are used at every step; a mixture of experts; a U-Net with group norms and attention; a
ResNet with batch norms. They are functions of their layers (`weights`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .weights import Layers
from .wide import (
    Sizes,
    attention,
    cross_entropy,
    embed,
    head,
    llama,
    llama_block,
    next_token_loss,
    rms_norm,
)


@dataclasses.dataclass(frozen=True)
class Various:
    """A model and its data.

    Attributes:
        title: In words.
        loss: From layers, a batch and the number of blocks.
        shape: Of one example: tokens, or the numbers of an image.
        classes: Of tokens, or of an image's labels; 0 where it is its own label.
    """

    title: str
    loss: Callable[[Layers, Any, int], Array]
    shape: tuple[int, ...]
    classes: int

    def random_batch(self, batch: int, key: Array) -> Any:
        """Tokens, images with labels, or images."""
        shape = (batch, *self.shape)
        if len(self.shape) == 1:
            return jax.random.randint(key, shape, 0, self.classes)
        x = jax.random.normal(key, shape)
        return x, jax.random.randint(key, (batch,), 0, max(self.classes, 1))


# --- Of tokens ------------------------------------------------------------------------


def llama_in(way: str, sizes: Sizes) -> Callable[[Layers, Any, int], Array]:
    """The loss of a Llama whose blocks are unrolled, in a scan, or checkpointed too."""

    def loss(layers: Layers, tokens: Any, blocks: int) -> Array:
        of_size = dataclasses.replace(sizes, layers=blocks)
        if way == "unrolled":
            return llama(layers, tokens, of_size)

        def block(layers: Layers, x: Array) -> Array:
            if way == "scan":
                return llama_block(layers, x, sizes)
            return jax.checkpoint(lambda x: llama_block(layers, x, sizes))(x)

        x = layers.scan("blocks", blocks, block, embed(layers, tokens, sizes))
        return next_token_loss(layers, x, tokens, sizes)

    return loss


def _lstm(sizes: Sizes) -> Callable[[Layers, Any, int], Array]:
    def loss(layers: Layers, tokens: Any, blocks: int) -> Array:
        x = jnp.swapaxes(embed(layers, tokens, sizes), 0, 1)
        for index in range(blocks):
            x = _lstm_layer(layers.at(f"block{index}"), x)
        return next_token_loss(layers, jnp.swapaxes(x, 0, 1), tokens, sizes)

    return loss


def _lstm_layer(layers: Layers, x: Array) -> Array:
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


# How many there are, how many each token takes, and the room each has for tokens, over
# what it would need if all were taken equally often.
EXPERTS, TAKEN, ROOM = 8, 2, 1.25


def experts(
    way: Callable[..., Array], sizes: Sizes
) -> Callable[[Layers, Any, int], Array]:
    def loss(layers: Layers, tokens: Any, blocks: int) -> Array:
        x = embed(layers, tokens, sizes)
        for index in range(blocks):
            block = layers.at(f"block{index}")
            x = x + attention(block, x, sizes)
            x = x + way(block, rms_norm(block, "norm", x), sizes)
        return next_token_loss(layers, x, tokens, sizes)

    return loss


def _routed(layers: Layers, x: Array) -> tuple[Array, Array]:
    """Of each token: its experts, and how much of each."""
    router = layers.weight("router", x.shape[-1], EXPERTS).astype(x.dtype)
    logits, chosen = jax.lax.top_k((x @ router).astype(jnp.float32), TAKEN)
    return chosen, jax.nn.softmax(logits).astype(x.dtype)


def by_einsum(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Tokens of a text go to places of their experts by a product with a mask."""
    chosen, shares = _routed(layers, x)
    room = int(ROOM * x.shape[1] * TAKEN / EXPERTS)
    is_of = jax.nn.one_hot(chosen, EXPERTS)  # [batch, tokens, taken, experts]
    flat = is_of.reshape(x.shape[0], -1, EXPERTS)
    place = (jnp.cumsum(flat, 1) * flat - 1).reshape(is_of.shape)
    places = jax.nn.one_hot(place, room, dtype=x.dtype)  # those without one are zeros
    dispatch = jnp.sum(places, 2)
    combine = jnp.einsum("btkec,btk->btec", places, shares)
    rows = jnp.einsum("btec,btd->ebcd", dispatch, x)
    hidden = jax.nn.silu(layers.experts("gate", rows, sizes.hidden))
    hidden = hidden * layers.experts("up", rows, sizes.hidden)
    rows = layers.experts("down", hidden, sizes.width)
    return jnp.einsum("btec,ebcd->btd", combine, rows)


def _by_ragged_dot(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Tokens are sorted by their experts."""
    inside, outside = (sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
    shapes = {"gate": inside, "up": inside, "down": outside}
    gate, up, down = (
        layers.weight(name, EXPERTS, *shape).astype(x.dtype)
        for name, shape in shapes.items()
    )
    rows = x.reshape(-1, x.shape[-1])
    chosen, shares = _routed(layers, rows)
    order = jnp.argsort(chosen.reshape(-1))
    counts = jnp.bincount(chosen.reshape(-1), length=EXPERTS).astype(jnp.int32)
    sorted_rows = rows[order // TAKEN]
    hidden = jax.nn.silu(jax.lax.ragged_dot(sorted_rows, gate, counts))
    hidden = hidden * jax.lax.ragged_dot(sorted_rows, up, counts)
    out = jax.lax.ragged_dot(hidden, down, counts)
    back = jnp.argsort(order)
    out = out[back].reshape(-1, TAKEN, x.shape[-1]) * shares[..., None]
    return jnp.sum(out, 1).reshape(x.shape)


# --- Of images ------------------------------------------------------------------------


def _normed(x: Array, axes: tuple[int, ...]) -> Array:
    """Mean zero and variance one over some axes, with statistics in float32."""
    full = x.astype(jnp.float32)
    mean = jnp.mean(full, axes, keepdims=True)
    variance = jnp.mean(jnp.square(full), axes, keepdims=True) - jnp.square(mean)
    return ((full - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def _affine(layers: Layers, name: str, x: Array) -> Array:
    scale = layers.weight(f"{name}_scale", x.shape[-1]).astype(x.dtype)
    return x * scale + layers.weight(f"{name}_shift", x.shape[-1]).astype(x.dtype)


def _group_norm(layers: Layers, name: str, x: Array) -> Array:
    groups = x.reshape(*x.shape[:-1], 32, -1)
    return _affine(layers, name, _normed(groups, (1, 2, 4)).reshape(x.shape))


def _batch_norm(layers: Layers, name: str, x: Array) -> Array:
    return _affine(layers, name, _normed(x, (0, 1, 2)))


def _residual(layers: Layers, x: Array, channels: int) -> Array:
    """Two convolutions behind group norms, and what goes around them."""
    inner = jax.nn.silu(_group_norm(layers, "norm1", x))
    inner = layers.convolve("conv1", inner, channels, 3)
    inner = jax.nn.silu(_group_norm(layers, "norm2", inner))
    inner = layers.convolve("conv2", inner, channels, 3)
    if x.shape[-1] != channels:
        x = layers.convolve("around", x, channels, 1)
    return x + inner


def _pixel_attention(layers: Layers, x: Array) -> Array:
    batch, height, width, channels = x.shape
    heads, length = 4, height * width
    normed = _group_norm(layers, "norm", x).reshape(batch, length, channels)
    q, k, v = (
        layers.dense(name, normed, channels).reshape(batch, length, heads, -1)
        for name in ("query", "key", "value")
    )
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    out = layers.dense("out", mixed.reshape(batch, length, channels), channels)
    return x + out.reshape(x.shape)


def unet(layers: Layers, batch: Any, blocks: int) -> Array:
    """Down, attention, and up again; the image is to be found behind noise."""
    images, _ = batch
    channels = images.shape[-1]
    down = images
    for index in range(blocks):
        down = _residual(layers.at(f"down{index}"), down, channels)
    x = layers.convolve("half", down, 2 * channels, 3, stride=2)
    x = _residual(layers.at("middle1"), x, 2 * channels)
    x = _pixel_attention(layers.at("attention"), x)
    x = _residual(layers.at("middle2"), x, 2 * channels)
    x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
    x = jnp.concatenate([layers.convolve("twice", x, channels, 3), down], axis=-1)
    for index in range(blocks):
        x = _residual(layers.at(f"up{index}"), x, channels)
    return jnp.mean(jnp.square((x - images).astype(jnp.float32)))


def bottlenecks(layers: Layers, batch: Any, blocks: int) -> Array:
    """A ResNet of bottlenecks: this many in each of four stages."""
    x, labels = batch
    x = jax.nn.relu(_batch_norm(layers, "norm", layers.convolve("in", x, 64, 7, 2)))
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")
    for stage in range(4):
        for index in range(blocks):
            part = layers.at(f"stage{stage}_{index}")
            x = _bottleneck(part, x, 64 * 2**stage, 2 if stage and not index else 1)
    pooled = jnp.mean(x, (1, 2))
    sizes = Sizes(pooled.shape[-1], 0, CLASSES, blocks)
    return cross_entropy(pooled @ head(layers, pooled, sizes), labels)


def _bottleneck(layers: Layers, x: Array, channels: int, stride: int) -> Array:
    inner = _batch_norm(layers, "norm1", layers.convolve("conv1", x, channels, 1))
    inner = layers.convolve("conv2", jax.nn.relu(inner), channels, 3, stride)
    inner = jax.nn.relu(_batch_norm(layers, "norm2", inner))
    inner = layers.convolve("conv3", inner, 4 * channels, 1)
    if x.shape != inner.shape:
        x = layers.convolve("around", x, 4 * channels, 1, stride)
        x = _batch_norm(layers, "around_norm", x)
    return jax.nn.relu(x + _batch_norm(layers, "norm3", inner))


# What half precision is compared on: model, blocks and batch.
SETUPS = (
    ("llama, unrolled", 4, 4),
    ("llama, scan", 4, 4),
    ("llama, checkpoint", 4, 4),
    ("lstm", 2, 64),
    ("state space 1024", 4, 8),
    ("moe, einsum", 2, 8),
    ("moe, ragged", 2, 8),
    ("unet", 1, 16),
    ("bottlenecks", 1, 32),
)
CLASSES = 1000
_LLAMA = Sizes(1024, 2816, 8192, layers=0, heads=16, key_heads=4)
_LSTM = Sizes(512, 0, 256, layers=0)
_MOE = Sizes(512, 1536, 256, layers=0, heads=8, key_heads=8)
VARIOUS = {
    "llama, unrolled": Various(
        "Llama, width 1024", llama_in("unrolled", _LLAMA), (1025,), 8192
    ),
    "llama, scan": Various("Llama in a scan", llama_in("scan", _LLAMA), (1025,), 8192),
    "llama, checkpoint": Various(
        "Llama in a scan with `jax.checkpoint`",
        llama_in("checkpoint", _LLAMA),
        (1025,),
        8192,
    ),
    "lstm": Various("LSTM, width 512, 256 steps", _lstm(_LSTM), (257,), 256),
    "moe, einsum": Various(
        "8 experts by einsum", experts(by_einsum, _MOE), (1025,), 256
    ),
    "moe, ragged": Various(
        "8 experts by `ragged_dot`", experts(_by_ragged_dot, _MOE), (1025,), 256
    ),
    "unet": Various("U-Net block with group norms", unet, (64, 64, 128), 0),
    "bottlenecks": Various(
        "ResNet with batch norms", bottlenecks, (128, 128, 3), CLASSES
    ),
}
