"""Models as they are trained on TPUs, beside those of `arranged` and `various`.

Attention whose scores are scaled and masked in float32 or in half precision, and by
JAX's own flash attention in Pallas; a ViT with biases; experts by einsum; a U-Net.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .arranged import (
    Model,
    Order,
    Sizes,
    cross_entropy,
    head,
    layer_norm,
)
from .various import EXPERTS, TAKEN, experts
from .weights import Attention, Layers

# --- Attention of [batch, length, heads, size] ----------------------------------------


def plain(
    query: Array, key: Array, value: Array, *, full: bool, is_causal: bool
) -> Array:
    """By products; scores are scaled and masked in float32, or as they come."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = (scores.astype(jnp.float32) if full else scores) / query.shape[-1] ** 0.5
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


IN_FLOAT32: Attention = functools.partial(plain, full=True, is_causal=True)
# How scores are scaled and masked where the naive cast runs the model; float32 may be
# what autocast makes of both.
SCORES: dict[str, Attention] = {
    "float32": IN_FLOAT32,
    "half": functools.partial(plain, full=False, is_causal=True),
}
OF_IMAGES: Attention = functools.partial(plain, full=False, is_causal=False)


def by_pallas(query: Array, key: Array, value: Array) -> Array:
    """Causal, by the kernel that comes with JAX."""
    from jax.experimental.pallas.ops.tpu import flash_attention

    turned = (jnp.swapaxes(one, 1, 2) for one in (query, key, value))
    scale = query.shape[-1] ** -0.5
    mixed = flash_attention.flash_attention(*turned, causal=True, sm_scale=scale)
    return jnp.swapaxes(mixed, 1, 2)


def _mixed(layers: Layers, x: Array, heads: int) -> Array:
    """What attention makes of one product for query, key and value."""
    batch, length, three_times = x.shape
    joined = x.reshape(batch, length, 3 * heads, -1)
    mixed = layers.attend(*jnp.split(joined, 3, axis=2))
    return mixed.reshape(batch, length, three_times // 3)


# --- Models ---------------------------------------------------------------------------


def vit(sizes: Sizes, order: Order) -> Model:
    """Cross entropy of images in patches, with a token for the class before them."""
    width = sizes.width

    def bias(layers: Layers, name: str, x: Array) -> Array:
        return layers.weight(f"{name} bias", x.shape[-1]).astype(x.dtype)

    def dense(layers: Layers, name: str, x: Array, features: int) -> Array:
        found = layers.dense(name, x, features)
        return found + bias(layers, name, found)

    def block(layers: Layers, x: Array) -> Array:
        joined = dense(layers, "qkv", layer_norm(layers, "norm1", x), 3 * width)
        mixed = _mixed(layers, joined, sizes.heads)
        # As it is written: the bias comes behind the sum.
        x = x + layers.dense("out", mixed, width) + bias(layers, "out", x)
        hidden = dense(layers, "up", layer_norm(layers, "norm2", x), sizes.hidden)
        x = x + layers.dense("down", jax.nn.gelu(hidden), width)
        return x + bias(layers, "down", x)

    def loss(layers: Layers, batch: tuple[Array, Array]) -> Array:
        patches, labels = batch
        x = layers.dense("embed", patches, width)
        token = layers.weight("token", 1, 1, width).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, width)), x], 1)
        x = x + layers.weight("positions", *x.shape[1:]).astype(x.dtype)
        x = layer_norm(layers, "norm", order.run(layers, sizes.layers, block, x)[:, 0])
        return cross_entropy(head(layers, x, sizes.classes), labels)

    return loss


def by_einsum(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Experts have room for 1.25 of their share of a text; the rest is dropped."""
    batch, length, width = x.shape
    room = int(length * TAKEN / EXPERTS * 1.25)
    router = layers.weight("router", width, EXPERTS).astype(x.dtype)
    shares = jax.nn.softmax((x @ router).astype(jnp.float32))
    shares, chosen = jax.lax.top_k(shares, TAKEN)
    shares = shares / jnp.sum(shares, -1, keepdims=True)
    hot = jax.nn.one_hot(chosen, EXPERTS).reshape(batch, length * TAKEN, EXPERTS)
    place = (jnp.cumsum(hot, 1) * hot).astype(jnp.int32) - 1
    fits = (place < room) & (hot > 0)
    at = jax.nn.one_hot(jnp.max(jnp.where(fits, place, -1), -1), room)
    sent = ((hot * fits)[..., None] * at[:, :, None]).reshape(
        batch, length, TAKEN, EXPERTS, room
    )
    combine = jnp.sum(sent * shares[..., None, None], 2)
    dispatch, combine = (combine > 0).astype(x.dtype), combine.astype(x.dtype)
    rows = jnp.einsum("btec,btd->becd", dispatch, x)
    inside, outside = (width, sizes.hidden), (sizes.hidden, width)
    gate, up, down = (
        layers.weight(name, EXPERTS, *shape).astype(x.dtype)
        for name, shape in (("gate", inside), ("up", inside), ("down", outside))
    )
    hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", rows, gate))
    hidden = hidden * jnp.einsum("becd,edf->becf", rows, up)
    back = jnp.einsum("becf,efd->becd", hidden, down)
    return jnp.einsum("btec,becd->btd", combine, back)


dispatched = functools.partial(experts, mix=by_einsum)


def group_norm(layers: Layers, name: str, x: Array, groups: int = 32) -> Array:
    """Over places and the channels of a group, in float32."""
    scale, shift = (
        layers.weight(f"{name}_{what}", x.shape[-1]).astype(jnp.float32)
        for what in ("scale", "shift")
    )
    parts = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    normed = jax.nn.standardize(parts, (1, 2, 4), epsilon=1e-5).reshape(x.shape)
    return (normed * scale + shift).astype(x.dtype)


CHANNELS = (128, 256, 512)


def unet(sizes: Sizes, order: Order) -> Model:
    """Squared error of an image that is found again, at a time of diffusion."""
    del order

    def active(layers: Layers, name: str, x: Array) -> Array:
        return jax.nn.silu(group_norm(layers, name, x))

    def block(layers: Layers, x: Array, time: Array, channels: int) -> Array:
        inner = layers.convolve("conv1", active(layers, "norm1", x), channels, 3)
        inner = inner + layers.dense("time", jax.nn.silu(time), channels)[:, None, None]
        inner = layers.convolve("conv2", active(layers, "norm2", inner), channels, 3)
        if x.shape != inner.shape:
            x = layers.convolve("around", x, channels, 1)
        return inner + x

    def mix(layers: Layers, x: Array) -> Array:
        channels = x.shape[-1]
        rows = group_norm(layers, "norm", x).reshape(len(x), -1, channels)
        joined = layers.dense("qkv", rows, 3 * channels)
        mixed = _mixed(layers, joined, sizes.heads)
        return x + layers.dense("out", mixed, channels).reshape(x.shape)

    def loss(layers: Layers, batch: tuple[Array, Array]) -> Array:
        images, times = batch
        angles = times[:, None] * jnp.exp(-jnp.arange(128) / 14.0)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = layers.dense("time1", waves.astype(images.dtype), sizes.width)
        time = layers.dense("time2", jax.nn.silu(time), sizes.width)
        x, kept = layers.convolve("in", images, CHANNELS[0], 3), []
        for index, channels in enumerate(CHANNELS):
            x = block(layers.at(f"into{index}"), x, time, channels)
            if channels != CHANNELS[-1]:
                kept.append(x)
                x = layers.convolve(f"down{index}", x, channels, 3, 2)
        x = mix(layers.at("attention"), x)
        x = block(layers.at("middle"), x, time, CHANNELS[-1])
        for index, skipped in reversed(list(enumerate(kept))):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = layers.convolve(f"up{index}", x, skipped.shape[-1], 3)
            x = jnp.concatenate([x, skipped], -1)
            x = block(layers.at(f"out{index}"), x, time, skipped.shape[-1])
        found = layers.convolve("out", active(layers, "norm", x), images.shape[-1], 3)
        return jnp.mean(jnp.square((found - images).astype(jnp.float32)))

    return loss
