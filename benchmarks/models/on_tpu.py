"""Further models as they are trained on TPUs, and ways to write attention there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .arranged import Model, Order, Sizes, cross_entropy, head, layer_norm
from .various import EXPERTS, TAKEN, experts, state_space, weights_of_experts
from .weights import Attention, Layers


def plain(
    query: Array, key: Array, value: Array, *, full: bool, is_causal: bool = True
) -> Array:
    """Of [batch, length, heads, size]; scores are in float32, or as they come."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = (scores.astype(jnp.float32) if full else scores) / query.shape[-1] ** 0.5
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


# By what the naive cast scales and masks scores in.
SCORES: dict[str, Attention] = {
    "float32": functools.partial(plain, full=True),
    "half": functools.partial(plain, full=False),
}


def by_pallas(query: Array, key: Array, value: Array, is_causal: bool = True) -> Array:
    """By the kernel that comes with JAX."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    turned = (jnp.swapaxes(one, 1, 2) for one in (query, key, value))
    scale = query.shape[-1] ** -0.5
    mixed = flash_attention(*turned, causal=is_causal, sm_scale=scale)
    return jnp.swapaxes(mixed, 1, 2)


def mixed(layers: Layers, joined: Array, heads: int) -> Array:
    """What attention makes of one product for query, key and value."""
    parts = joined.reshape(*joined.shape[:2], 3 * heads, -1)
    found = layers.attend(*jnp.split(parts, 3, axis=2), is_causal=False)
    return found.reshape(*joined.shape[:2], -1)


def vit(sizes: Sizes, order: Order) -> Model:
    """Cross entropy of images in patches; biases come behind sums, as written."""

    def biased(layers: Layers, name: str, x: Array) -> Array:
        return x + layers.weight(f"{name} bias", x.shape[-1]).astype(x.dtype)

    def block(layers: Layers, x: Array) -> Array:
        joined = layers.dense("qkv", layer_norm(layers, "norm1", x), 3 * sizes.width)
        found = mixed(layers, biased(layers, "qkv", joined), sizes.heads)
        x = biased(layers, "out", x + layers.dense("out", found, sizes.width))
        hidden = layers.dense("up", layer_norm(layers, "norm2", x), sizes.hidden)
        hidden = jax.nn.gelu(biased(layers, "up", hidden))
        return biased(layers, "down", x + layers.dense("down", hidden, sizes.width))

    def loss(layers: Layers, batch: tuple[Array, Array]) -> Array:
        patches, labels = batch
        x = layers.dense("embed", patches, sizes.width)
        token = layers.weight("token", 1, 1, sizes.width).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), *token.shape[1:])), x], 1)
        x = x + layers.weight("positions", *x.shape[1:]).astype(x.dtype)
        x = layer_norm(layers, "norm", order.run(layers, sizes.layers, block, x)[:, 0])
        return cross_entropy(head(layers, x, sizes.classes), labels)

    return loss


def by_einsum(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Experts have room for 1.25 of their share of a text; the rest is dropped."""
    batch, length, _ = x.shape
    room = int(length * TAKEN / EXPERTS * 1.25)
    logits = head(layers, x, EXPERTS).astype(jnp.float32)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), TAKEN)
    shares = shares / jnp.sum(shares, -1, keepdims=True)
    hot = jax.nn.one_hot(chosen, EXPERTS).reshape(batch, length * TAKEN, EXPERTS)
    place = (jnp.cumsum(hot, 1) * hot).astype(jnp.int32) - 1
    fits = (place < room) & (hot > 0)
    at = jax.nn.one_hot(jnp.max(jnp.where(fits, place, -1), -1), room)
    sent = (hot * fits)[..., None] * at[:, :, None]
    sent = sent.reshape(batch, length, TAKEN, EXPERTS, room)
    combine = jnp.sum(sent * shares[..., None, None], 2)
    dispatch, combine = (combine > 0).astype(x.dtype), combine.astype(x.dtype)
    rows = jnp.einsum("btec,btd->becd", dispatch, x)
    gate, up, down = weights_of_experts(layers, x, sizes)
    hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", rows, gate))
    hidden = hidden * jnp.einsum("becd,edf->becf", rows, up)
    back = jnp.einsum("becf,efd->becd", hidden, down)
    return jnp.einsum("btec,becd->btd", combine, back)


dispatched = functools.partial(experts, mix=by_einsum)
float32_scan = functools.partial(state_space, full=jnp.float32)
CHANNELS = (128, 256, 512)


def unet(sizes: Sizes, order: Order) -> Model:
    """Squared error of an image that is found again, at a time of diffusion."""
    del order

    def normed(layers: Layers, name: str, x: Array) -> Array:
        scale, shift = (
            layers.weight(f"{name}_{what}", x.shape[-1]).astype(jnp.float32)
            for what in ("scale", "shift")
        )
        parts = x.astype(jnp.float32).reshape(*x.shape[:3], 32, -1)
        parts = parts - jnp.mean(parts, (1, 2, 4), keepdims=True)
        square = jnp.mean(jnp.square(parts), (1, 2, 4), keepdims=True)
        normed = (parts * jax.lax.rsqrt(square + 1e-5)).reshape(x.shape)
        return (normed * scale + shift).astype(x.dtype)

    def convolved(layers: Layers, name: str, x: Array, channels: int) -> Array:
        x = jax.nn.silu(normed(layers, f"{name}_norm", x))
        return layers.convolve(name, x, channels, 3)

    def block(layers: Layers, x: Array, time: Array, channels: int) -> Array:
        inner = convolved(layers, "conv1", x, channels)
        inner = inner + layers.dense("time", jax.nn.silu(time), channels)[:, None, None]
        inner = convolved(layers, "conv2", inner, channels)
        is_same = x.shape == inner.shape
        return inner + (x if is_same else layers.convolve("around", x, channels, 1))

    def loss(layers: Layers, batch: tuple[Array, Array]) -> Array:
        images, times = batch
        angles = times[:, None] * jnp.exp(-jnp.arange(128) / 14.0)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = layers.dense("time1", time.astype(images.dtype), sizes.width)
        time = layers.dense("time2", jax.nn.silu(time), sizes.width)
        x, kept = layers.convolve("in", images, CHANNELS[0], 3), []
        for index, channels in enumerate(CHANNELS):
            x = block(layers.at(f"into{index}"), x, time, channels)
            if channels != CHANNELS[-1]:
                kept.append(x)
                x = layers.convolve(f"down{index}", x, channels, 3, 2)
        rows = normed(layers, "attention", x).reshape(len(x), -1, channels)
        joined = layers.dense("qkv", rows, 3 * channels)
        found = layers.dense("out", mixed(layers, joined, sizes.heads), channels)
        x = block(layers.at("middle"), x + found.reshape(x.shape), time, channels)
        for index, skipped in reversed(list(enumerate(kept))):
            x, channels = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), CHANNELS[index]
            x = layers.convolve(f"up{index}", x, channels, 3)
            x = jnp.concatenate([x, skipped], -1)
            x = block(layers.at(f"from{index}"), x, time, channels)
        found = convolved(layers, "last", x, images.shape[-1])
        return jnp.mean(jnp.square((found - images).astype(jnp.float32)))

    return loss
