"""Whole models as people train them: blocks in a loop or a scan, recomputed or kept.

A Llama, a GPT, MLP blocks, and a Llama that is fine-tuned by adapters. They are
functions of their layers (`weights`), so that mpx, casts by hand and the peers run the
same lines. Norms and rotary positions are computed in float32, as Llama's own code has
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from .weights import Block, Layers, Loop, Weights

Policy = Callable[..., Any]
Model = Callable[[Layers, Any], Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model.

    Attributes:
        width: Of the residual stream.
        hidden: Of the MLP.
        classes: Of the head, and of the embedding if there is one.
        layers: How many blocks.
        heads: Of attention.
        kernel: Attention is cuDNN's kernel, not products and a softmax.
        groups: Heads of keys and values, which need `kernel`; 0 has `heads`.
        chunks: In how many parts logits are computed, again in the backward pass.
        tied: The embedding is the head, too.
        gathers: The label's logit is looked up, whose gradient is a scatter.
    """

    width: int
    hidden: int
    classes: int
    layers: int
    heads: int = 0
    kernel: bool = False
    groups: int = 0
    chunks: int = 1
    tied: bool = False
    gathers: bool = False


@dataclasses.dataclass(frozen=True)
class Order:
    """How the blocks of a model follow each other.

    Attributes:
        loop: What runs them with slices of stacked weights; None has weights for each.
        remat: Whether each is in `jax.checkpoint`.
        policy: Of that.
    """

    loop: Loop | None = None
    remat: bool = True
    policy: Policy | None = None

    def run(self, layers: Layers, count: int, block: Block, x: Array) -> Array:
        """The blocks, one after the other."""
        if self.loop is not None:
            return layers.scan("blocks", count, self._kept(block), x, self.loop)
        for index in range(count):
            x = self._kept(block)(layers.at(f"block{index}"), x)
        return x

    def _kept(self, block: Block) -> Block:
        """The block, or what computes it again in the backward pass."""
        if not self.remat:
            return block

        def again(layers: Layers, x: Array) -> Array:
            return jax.checkpoint(lambda x: block(layers, x), policy=self.policy)(x)

        return again


def of_tokens(sizes: Sizes, order: Order, block: Block) -> Model:
    """Cross entropy of the next token, by blocks."""

    def loss(layers: Layers, tokens: Array) -> Array:
        table = layers.weight("embed", sizes.classes, sizes.width)
        x = order.run(layers, sizes.layers, block, table[tokens[:, :-1]])
        tied = table.T if sizes.tied else None
        return next_token_loss(layers, x, tokens, sizes, tied)

    return loss


def llama(sizes: Sizes, order: Order) -> Model:
    """Blocks of attention with rotary positions, and a gated MLP."""
    return of_tokens(sizes, order, functools.partial(_llama_block, sizes=sizes))


def embed(layers: Layers, tokens: Array, sizes: Sizes) -> Array:
    """Vectors of all tokens but the last."""
    return layers.weight("embed", sizes.classes, sizes.width)[tokens[:, :-1]]


def head(layers: Layers, x: Array, classes: int) -> Array:
    """Logits, by a weight that no arm quantizes."""
    return x @ layers.weight("head", x.shape[-1], classes).astype(x.dtype)


def next_token_loss(
    layers: Layers, x: Array, tokens: Array, sizes: Sizes, weight: Array | None = None
) -> Array:
    """Of all tokens but the first; by the weight of a head or of its own."""
    x, labels = rms_norm(layers, "norm", x), tokens[:, 1:]
    if weight is None:
        weight = layers.weight("head", sizes.width, sizes.classes)
    weight = weight.astype(x.dtype)
    if sizes.chunks == 1:
        return cross_entropy(x @ weight, labels, sizes.gathers)
    shape = sizes.chunks, labels.size // sizes.chunks

    @jax.checkpoint
    def turn(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        return total + cross_entropy(part[0] @ weight, part[1]), None

    parts = x.reshape(*shape, -1), labels.reshape(shape)
    return jax.lax.scan(turn, jnp.float32(0), parts)[0] / sizes.chunks


def cross_entropy(logits: Array, labels: Array, gathers: bool = False) -> Array:
    """Mean cross entropy, in float32.

    The label's logit is found by a comparison, whose gradient is no scatter in float32,
    or it `gathers`, as Optax does.
    """
    logits = logits.astype(jnp.float32)
    if gathers:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    of_label = jnp.sum(jnp.where(is_label, logits, 0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_label)


def attention(layers: Layers, x: Array, sizes: Sizes) -> Array:
    """Causal, behind a norm, with rotary positions."""
    normed = rms_norm(layers, "attention_norm", x)
    fewer = (sizes.groups or sizes.heads) * (sizes.width // sizes.heads)
    query, key, value = (
        _heads(layers.dense(name, normed, width), sizes)
        for name, width in (("query", sizes.width), ("key", fewer), ("value", fewer))
    )
    mixed = _attend(layers, rotary(query), rotary(key), value, sizes)
    return layers.dense("out", mixed, sizes.width)


def _llama_block(layers: Layers, x: Array, sizes: Sizes) -> Array:
    x = x + attention(layers, x, sizes)
    normed = rms_norm(layers, "mlp_norm", x)
    gate = layers.dense("gate", normed, sizes.hidden)
    up = layers.dense("up", normed, sizes.hidden)
    return x + layers.dense("down", jax.nn.silu(gate) * up, sizes.width)


def _heads(x: Array, sizes: Sizes) -> Array:
    return x.reshape(*x.shape[:2], -1, sizes.width // sizes.heads)


def _attend(
    layers: Layers,
    query: Array,
    key: Array,
    value: Array,
    sizes: Sizes,
    is_causal: bool = True,
) -> Array:
    """Attention of [batch, length, heads, size], its heads joined."""
    batch, length, _, size = query.shape
    shape = batch, length, -1
    if sizes.kernel:
        return layers.attend(query, key, value, is_causal=is_causal).reshape(shape)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
    mask = jnp.tril(jnp.ones((length, length), bool)) if is_causal else None
    full = logits.astype(jnp.float32)
    full = full if mask is None else jnp.where(mask, full, -jnp.inf)
    weights = jax.nn.softmax(full).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(shape)


def rms_norm(layers: Layers, name: str, x: Array) -> Array:
    """Root mean square norm over the last axis, with a scale."""
    scale = layers.weight(name, x.shape[-1]).astype(jnp.float32)
    full = x.astype(jnp.float32)
    square = jnp.mean(jnp.square(full), -1, keepdims=True)
    return (full * jax.lax.rsqrt(square + 1e-5) * scale).astype(x.dtype)


def rotary(x: Array) -> Array:
    """Rotary positions of [batch, length, heads, size]."""
    length, size = x.shape[1], x.shape[-1]
    rates = 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None, None] * rates
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def gpt(sizes: Sizes, order: Order) -> Model:
    """The same, with learned positions; the embedding is the weight of the logits."""
    block = functools.partial(gpt_block, sizes=sizes)

    def loss(layers: Layers, tokens: Array) -> Array:
        length = tokens.shape[1] - 1
        table = layers.weight("embed", sizes.classes, sizes.width)
        x = table[tokens[:, :-1]] + layers.weight("positions", length, sizes.width)
        x = layer_norm(layers, "norm", order.run(layers, sizes.layers, block, x))
        logits = x @ table.T.astype(x.dtype)
        return cross_entropy(logits, tokens[:, 1:], sizes.gathers)

    return loss


def gpt_block(layers: Layers, x: Array, sizes: Sizes, is_causal: bool = True) -> Array:
    """Attention, whose query, key and value are one product, and an MLP with gelu."""
    normed = layer_norm(layers, "attention_norm", x)
    joined = jnp.split(layers.dense("qkv", normed, 3 * sizes.width), 3, axis=-1)
    query, key, value = (_heads(one, sizes) for one in joined)
    mixed = _attend(layers, query, key, value, sizes, is_causal)
    x = x + layers.dense("out", mixed, sizes.width)
    hidden = layers.dense("up", layer_norm(layers, "mlp_norm", x), sizes.hidden)
    return x + layers.dense("down", jax.nn.gelu(hidden), sizes.width)


def layer_norm(layers: Layers, name: str, x: Array) -> Array:
    """Over the last axis, with a scale and a bias; computed in float32."""
    scale = layers.weight(f"{name} weight", x.shape[-1]).astype(jnp.float32)
    bias = layers.weight(f"{name} bias", x.shape[-1]).astype(jnp.float32)
    normed = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5)
    return (normed * scale + bias).astype(x.dtype)


def mlp(sizes: Sizes, order: Order) -> Model:
    """Cross entropy of rows of numbers, by blocks of a norm, silu and a residual."""

    def block(layers: Layers, x: Array) -> Array:
        hidden = layers.dense("up", rms_norm(layers, "norm", x), sizes.hidden)
        return x + layers.dense("down", jax.nn.silu(hidden), sizes.width)

    def loss(layers: Layers, batch: tuple[Array, Array]) -> Array:
        x, labels = batch
        x = order.run(layers, sizes.layers, block, x)
        return cross_entropy(head(layers, x, sizes.classes), labels)

    return loss


# --- What is around layers ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Around:
    """Layers that do more than those inside of them; see `weights.Layers`.

    Attributes:
        layers: Those inside.
    """

    layers: Layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layers, name)

    def at(self, name: str) -> Layers:
        return type(self)(self.layers.at(name))

    def scan(
        self, name: str, length: int, block: Block, x: Array, loop: Loop = jax.lax.scan
    ) -> Array:
        def around(layers: Layers, x: Array) -> Array:
            return block(type(self)(layers), x)

        return self.layers.scan(name, length, around, x, loop)


RANK = 16
ADAPTERS = (" adapter in", " adapter out")


class Adapted(Around):
    """Linear layers with an adapter of low rank each (LoRA)."""

    def dense(self, name: str, x: Array, features: int) -> Array:
        """What the layer gives, and what its adapter adds."""
        into, out = (name + suffix for suffix in ADAPTERS)
        first = self.layers.weight(into, x.shape[-1], RANK).astype(x.dtype)
        second = self.layers.weight(out, RANK, features).astype(x.dtype)
        return self.layers.dense(name, x, features) + (x @ first) @ second


def adapted_llama(sizes: Sizes, order: Order) -> Model:
    """The Llama with adapters."""
    model = llama(sizes, order)
    return lambda layers, tokens: model(Adapted(layers), tokens)


@dataclasses.dataclass(frozen=True)
class CastWeights(Weights):
    """Weights that are cast to bfloat16 by hand.

    Matrices are cast where they are used, stacks of them before their loop.
    """

    def weight(self, name: str, *shape: int) -> Array:
        """A matrix in bfloat16, a vector as it is."""
        return half(super().weight(name, *shape), axes=2)

    def scan(
        self, name: str, length: int, block: Block, x: Array, loop: Loop = jax.lax.scan
    ) -> Array:
        """The part with each of its weights."""
        stacked = jax.tree.map(lambda leaf: half(leaf, axes=3), self.tree[name])
        cast = dataclasses.replace(self, tree={name: stacked})
        return Weights.scan(cast, name, length, block, x, loop)


def half(weight: Array, axes: int) -> Array:
    return weight.astype(jnp.bfloat16) if weight.ndim >= axes else weight
