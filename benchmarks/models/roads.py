"""Models of other kinds at the sizes of large ones, as steps for GPUs.

They are functions of their layers (`weights`), as those of `arranged` are. Norms but
for root mean squares are computed in two passes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from . import various
from .arranged import Model, Order, Sizes, cross_entropy, of_tokens, rms_norm
from .on_tpu import mixed
from .weights import Layers

GROUPS, HEAD, WINDOW = 32, 64, 1024


def averaged(learning_rate: float) -> optax.GradientTransformation:
    """Adam, whose state has a moving average of the weights."""

    def update(updates: Any, average: Any, weights: Any) -> tuple[Any, Any]:
        new = optax.apply_updates(weights, updates)
        return updates, optax.tree.update_moment(new, average, 0.999, 1)

    average = optax.GradientTransformation(lambda weights: weights, update)
    return optax.chain(optax.adam(learning_rate), average)


def by_windows(query: Array, key: Array, value: Array, is_causal: bool) -> Array:
    """Attention to the last 1,024 tokens, for so many at once; again when backward."""
    at = jnp.arange(2 * WINDOW)[None] - jnp.arange(WINDOW)[:, None]
    is_seen = (at > 0) & (at <= WINDOW)

    @jax.checkpoint
    def turn(before: tuple[Array, Array], now: tuple[Array, ...]) -> tuple:
        key, value = (
            jnp.concatenate(both, 1) for both in zip(before, now[1:], strict=True)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", now[0], key).astype(jnp.float32)
        scores = jnp.where(is_seen, scores / key.shape[-1] ** 0.5, -1e30)
        weights = jax.nn.softmax(scores).astype(value.dtype)
        return now[1:], jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    blocks = len(query), -1, WINDOW, *query.shape[2:]
    now = [jnp.swapaxes(x.reshape(blocks), 0, 1) for x in (query, key, value)]
    zeros = jnp.zeros_like(now[1][0])
    found = jax.lax.scan(turn, (zeros, zeros), tuple(now))[1]
    return jnp.swapaxes(found, 0, 1).reshape(query.shape)


def _bias(layers: Layers, name: str, y: Array) -> Array:
    return y + layers.weight(f"{name} bias", y.shape[-1]).astype(y.dtype)


def _dense(layers: Layers, name: str, x: Array, features: int) -> Array:
    return _bias(layers, name, layers.dense(name, x, features))


def _convolve(layers: Layers, name: str, x: Array, channels: int, *how: int) -> Array:
    return _bias(layers, name, layers.convolve(name, x, channels, *how or (3,)))


def _norm(layers: Layers, name: str, x: Array, groups: int = 0) -> Array:
    """Over channels, or over rows and groups of them; a scale and a bias if named."""
    full, axes = x.astype(jnp.float32), (1, 3) if groups else -1
    if groups:
        full = full.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean = jnp.mean(full, axes, keepdims=True)
    square = jnp.mean(jnp.square(full - mean), axes, keepdims=True)
    full = ((full - mean) * jax.lax.rsqrt(square + 1e-5)).reshape(x.shape)
    if name:
        full = full * layers.weight(f"{name} weight", x.shape[-1]).astype(jnp.float32)
        full = _bias(layers, name, full)
    return full.astype(x.dtype)


def _of_time(layers: Layers, times: Array, dtype: Any, inner: int, width: int) -> Array:
    """A vector for the time of diffusion."""
    angles = times[:, None] * 1e4 ** -(jnp.arange(inner // 2) / (inner // 2))
    found = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
    found = jax.nn.silu(_dense(layers, "time1", found, width))
    return _dense(layers, "time2", found, width)


# --- Of images ------------------------------------------------------------------------


def _normed(layers: Layers, name: str, x: Array, channels: int) -> Array:
    x = jax.nn.silu(_norm(layers, f"{name} norm", x, GROUPS))
    return _convolve(layers, name, x, channels)


def _residual(layers: Layers, x: Array, time: Array, channels: int) -> Array:
    inner = _normed(layers, "conv1", x, channels)
    inner = inner + _dense(layers, "time", jax.nn.silu(time), channels)[:, None, None]
    inner = _normed(layers, "conv2", inner, channels)
    is_same = x.shape == inner.shape
    return (x if is_same else _convolve(layers, "around", x, channels, 1)) + inner


def residual_blocks(sizes: Sizes, order: Order) -> Model:
    """The mean square of what blocks with group norms give, at a time of diffusion."""

    def loss(layers: Layers, batch: tuple[Array, Array]) -> Array:
        x, time = batch
        x = _convolve(layers, "in", x, sizes.width)
        for index in range(sizes.layers):
            x = _residual(layers.at(f"block{index}"), x, time, sizes.width)
        x = _normed(layers, "out", x, batch[0].shape[-1])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return loss


def _attended(layers: Layers, name: str, x: Array, of: Array) -> Array:
    """What `x` takes from others, or from itself."""
    width, heads = x.shape[-1], x.shape[-1] // HEAD
    parts = (
        layers.dense(f"{name} {what}", each, width).reshape(*each.shape[:2], heads, -1)
        for what, each in (("query", x), ("key", of), ("value", of))
    )
    found = layers.attend(*parts, is_causal=False).reshape(x.shape)
    return _dense(layers, f"{name} out", found, width)


def _to_text(layers: Layers, x: Array, text: Array) -> Array:
    """Attention to the image and to a text, and a gated MLP."""
    width = x.shape[-1]
    rows = _norm(layers, "norm", x, GROUPS).reshape(len(x), -1, width)
    y = _dense(layers, "into", rows, width)
    normed = _norm(layers, "norm1", y)
    y = y + _attended(layers, "image", normed, normed)
    y = y + _attended(layers, "text", _norm(layers, "norm2", y), text)
    hidden = _dense(layers, "up", _norm(layers, "norm3", y), 8 * width)
    hidden, gate = jnp.split(hidden, 2, -1)
    y = y + _dense(layers, "down", hidden * jax.nn.gelu(gate), width)
    return x + _dense(layers, "from", y, width).reshape(x.shape)


def unet(sizes: Sizes, order: Order) -> Model:
    """Squared error of noise that is found in an image, by a time and a text."""
    every = [sizes.width, 2 * sizes.width, 4 * sizes.width]

    def loss(layers: Layers, batch: tuple[Array, ...]) -> Array:
        images, noise, times, text = batch
        time = _of_time(layers, times, images.dtype, every[0], every[-1])

        def level(name: str, x: Array, index: int) -> Array:
            part = layers.at(name)
            x = _residual(part, x, time, every[index])
            return _to_text(part.at("text"), x, text) if index else x

        angle = (times * (jnp.pi / 2000))[:, None, None, None]
        x = (jnp.cos(angle) * images + jnp.sin(angle) * noise).astype(images.dtype)
        x, kept = _convolve(layers, "in", x, every[0]), []
        for index, channels in enumerate(every):
            x = level(f"into{index}", x, index)
            kept.append(x)
            if channels != every[-1]:
                x = _convolve(layers, f"down{index}", x, channels, 3, 2)
        x = level("middle", x, 2)
        x = _residual(layers.at("behind"), x, time, every[-1])
        for index, channels in reversed(list(enumerate(every))):
            x = level(f"from{index}", jnp.concatenate([x, kept[index]], -1), index)
            if index:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
                x = _convolve(layers, f"up{index}", x, channels)
        found = _normed(layers, "out", x, images.shape[-1]).astype(jnp.float32)
        return jnp.mean(jnp.square(found - noise))

    return loss


def transformer(sizes: Sizes, order: Order) -> Model:
    """The same of patches, by blocks that a time and a class shift and scale (DiT)."""
    width = sizes.width

    def shifted(layers: Layers, x: Array, shift: Array, scale: Array) -> Array:
        return _norm(layers, "", x) * (1 + scale[:, None]) + shift[:, None]

    def loss(layers: Layers, batch: tuple[Array, ...]) -> Array:
        patches, noise, times, labels = batch
        x = _dense(layers, "in", patches, width)
        x = x + layers.weight("positions", x.shape[1], width).astype(x.dtype)
        time = _of_time(layers, times, x.dtype, 256, width)
        time = time + layers.weight("classes", sizes.classes, width)[labels]
        time = jax.nn.silu(time)

        def block(layers: Layers, x: Array) -> Array:
            by_time = jnp.split(_dense(layers, "time", time, 6 * width), 6, -1)
            joined = shifted(layers, x, *by_time[:2])
            joined = _dense(layers, "qkv", joined, 3 * width)
            found = _dense(layers, "out", mixed(layers, joined, sizes.heads), width)
            x = x + by_time[2][:, None] * found
            hidden = shifted(layers, x, *by_time[3:5])
            hidden = jax.nn.gelu(_dense(layers, "up", hidden, sizes.hidden))
            return x + by_time[5][:, None] * _dense(layers, "down", hidden, width)

        x = order.run(layers, sizes.layers, block, x)
        by_time = jnp.split(_dense(layers, "last time", time, 2 * width), 2, -1)
        x = shifted(layers, x, *by_time)
        found = _dense(layers, "last", x, patches.shape[-1]).astype(jnp.float32)
        return jnp.mean(jnp.square(found - noise))

    return loss


# --- Of tokens, and of a graph --------------------------------------------------------


def _convolved(layers: Layers, x: Array) -> Array:
    """Over the last four tokens, as shifts and sums."""
    taps = layers.weight("taps", 4, x.shape[-1]).astype(x.dtype)
    padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    shifts = (padded[:, at : at + x.shape[1]] * taps[at] for at in range(4))
    return jax.nn.silu(_bias(layers, "taps", sum(shifts)))


def state_space(sizes: Sizes, order: Order) -> Model:
    """Of states that are computed by matmuls in chunks of tokens (SSD of Mamba 2)."""
    inner, state, size = sizes.hidden, 128, 256
    heads, both = inner // HEAD, inner + 2 * state

    def block(layers: Layers, x: Array) -> Array:
        names = "decay", "rate", "around"
        decay, more, around = (layers.weight(name, heads) for name in names)
        normed = rms_norm(layers, "norm", x)
        found = layers.dense("into", normed, inner + both + heads)
        gate, drive, rate = jnp.split(found, [inner, inner + both], -1)
        drive = _convolved(layers, drive).reshape(len(x), -1, size, both)
        drive, into, out = jnp.split(drive, [inner, inner + state], -1)
        drive = drive.reshape(*drive.shape[:3], heads, HEAD)
        rate = jax.nn.softplus(rate.astype(jnp.float32) + more)
        rate = rate.reshape(drive.shape[:-1])
        total = jnp.cumsum(-jnp.exp(decay) * rate, 2)
        driven = (drive.astype(jnp.float32) * rate[..., None]).astype(x.dtype)
        # Within a chunk, and by the states that chunks hand on.
        is_before = jnp.tril(jnp.ones((size, size), bool))[..., None]
        between = total[:, :, :, None] - total[:, :, None]
        between = jnp.where(is_before, jnp.exp(jnp.where(is_before, between, 0)), 0)
        scores = jnp.einsum("bgin,bgjn->bgij", out, into).astype(jnp.float32)
        scores = (scores[..., None] * between).astype(x.dtype)
        y = jnp.einsum("bgijh,bgjhp->bgihp", scores, driven)
        left = jnp.exp(total[:, :, -1:] - total)[..., None]
        kept = (driven.astype(jnp.float32) * left).astype(x.dtype)
        kept = jnp.einsum("bgjn,bgjhp->gbhpn", into, kept)

        def turn(states: Array, new: tuple[Array, Array]) -> tuple[Array, Array]:
            after = states * new[0][..., None, None] + new[1].astype(jnp.float32)
            return after, states

        parts = jnp.exp(total[:, :, -1]).swapaxes(0, 1), kept
        first = jnp.zeros(kept.shape[1:], jnp.float32)
        states = jax.lax.scan(turn, first, parts)[1].astype(x.dtype)
        before = jnp.einsum("bgin,gbhpn->bgihp", out, states).astype(jnp.float32)
        y = y + (before * jnp.exp(total)[..., None]).astype(x.dtype)
        y = y + drive * around.astype(x.dtype)[:, None]
        y = rms_norm(layers, "out_norm", y.reshape(gate.shape) * jax.nn.silu(gate))
        return x + layers.dense("out", y, sizes.width)

    return of_tokens(sizes, order, block)


def _lstm_layer(layers: Layers, x: Array) -> Array:
    """Of [time, batch, width]; the input is multiplied before, gates are in float32."""
    of_state = layers.weight("state", x.shape[-1], 4 * x.shape[-1]).astype(x.dtype)

    def turn(carry: tuple[Array, Array], of_input: Array) -> tuple[Any, Array]:
        gates = (of_input + carry[0] @ of_state).astype(jnp.float32)
        into, forget, cell, out = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(forget) * carry[1] + jax.nn.sigmoid(into) * jnp.tanh(cell)
        h = (jax.nn.sigmoid(out) * jnp.tanh(c)).astype(x.dtype)
        return (h, c), h

    first = jnp.zeros(x.shape[1:], x.dtype), jnp.zeros(x.shape[1:], jnp.float32)
    return jax.lax.scan(turn, first, _dense(layers, "input", x, 4 * x.shape[-1]))[1]


lstm = functools.partial(various.lstm, layer=_lstm_layer)


def graph(sizes: Sizes, order: Order) -> Model:
    """Cross entropy of nodes, by what edges send, which is summed where they end."""

    def loss(layers: Layers, batch: tuple[Array, ...]) -> Array:
        x, edges, sources, ends, labels = batch
        x = jax.nn.relu(_dense(layers, "in", x, sizes.width))
        for index in range(sizes.layers):
            part = layers.at(f"block{index}")
            sent = jnp.concatenate([x[sources], x[ends], edges], -1)
            sent = jax.nn.silu(_dense(part, "edge1", sent, sizes.width))
            sent = _dense(part, "edge2", sent, sizes.width)
            found = jax.ops.segment_sum(sent, ends, len(x)).astype(x.dtype)
            both = jnp.concatenate([_norm(part, "norm", x), found], -1)
            x = x + _dense(part, "node", both, sizes.width)
        return cross_entropy(_dense(layers, "out", x, sizes.classes), labels)

    return loss
