"""Plain models whose blocks are no ViT's: what their regions keep is another question.

A Llama (root mean square norms, rotary positions, a gated MLP), a gated state space
model (an associative scan between two products), a ResNet (batch statistics between
convolutions). No line of them is about precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

BYTES = 256


class LlamaBlock(eqx.Module):
    """Causal attention with rotary positions, and a gated MLP, of one sequence."""

    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    rotary: eqx.nn.RotaryPositionalEmbedding
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    gate_and_up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, hidden: int, heads: int, key: Array):
        keys = jax.random.split(key, 4)
        self.norms = (eqx.nn.RMSNorm(width), eqx.nn.RMSNorm(width))
        self.rotary = eqx.nn.RotaryPositionalEmbedding(width // heads)
        self.qkv = _linear(width, 3 * width, keys[0])
        self.out = _linear(width, width, keys[1])
        self.gate_and_up = _linear(width, 2 * hidden, keys[2])
        self.down = _linear(hidden, width, keys[3])
        self.heads = heads

    def __call__(self, x: Array) -> Array:
        length, width = x.shape
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x))
        q, k, v = jnp.moveaxis(qkv.reshape(length, 3, self.heads, -1), 1, 0)
        turn = jax.vmap(self.rotary, in_axes=1, out_axes=1)
        logits = jnp.einsum("qhd,khd->hqk", turn(q), turn(k)) / q.shape[-1] ** 0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
        mixed = jnp.einsum("hqk,khd->qhd", weights, v).reshape(length, width)
        x = x + jax.vmap(self.out)(mixed)
        both = jax.vmap(self.gate_and_up)(jax.vmap(self.norms[1])(x))
        gate, up = jnp.split(both, 2, axis=-1)
        return x + jax.vmap(self.down)(jax.nn.silu(gate) * up)


class StateSpaceBlock(eqx.Module):
    """States `h[t] = a[t] h[t-1] + (1 - a[t]) x[t]`, gated, of one sequence."""

    norm: eqx.nn.LayerNorm
    into: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, key: Array):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.into = _linear(width, 3 * hidden, keys[0])
        self.out = _linear(hidden, width, keys[1])

    def __call__(self, x: Array) -> Array:
        found = jax.vmap(self.into)(jax.vmap(self.norm)(x))
        drive, decay, gate = jnp.split(found, 3, axis=-1)
        decay = jax.nn.sigmoid(decay)

        def combine(first: Any, second: Any) -> tuple[Array, Array]:
            return first[0] * second[0], second[0] * first[1] + second[1]

        pairs = decay, (1 - decay) * drive
        _, states = jax.lax.associative_scan(combine, pairs)
        return x + jax.vmap(self.out)(states * jax.nn.silu(gate))


class SequenceModel(eqx.Module):
    """Embedded bytes, blocks, logits of the next byte; one text."""

    embed: eqx.nn.Embedding
    blocks: list[Any]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(
        self, width: int, blocks: int, key: Array, make: Callable[[Array], Any]
    ):
        keys = jax.random.split(key, 2 + blocks)
        self.embed = eqx.nn.Embedding(BYTES, width, key=keys[0])
        self.blocks = [make(block_key) for block_key in keys[2:]]
        self.norm = eqx.nn.RMSNorm(width)
        self.head = _linear(width, BYTES, keys[1])

    def __call__(self, text: Array) -> Array:
        x = jax.vmap(self.embed)(text)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


class ResNet(eqx.Module):
    """Residual blocks of two convolutions, each with the statistics of its batch."""

    first: eqx.nn.Conv2d
    blocks: list[tuple[eqx.nn.Conv2d, eqx.nn.Conv2d]]
    scales: list[Array]
    shifts: list[Array]
    head: eqx.nn.Linear

    def __init__(self, channels: int, blocks: int, classes: int, key: Array):
        keys = iter(jax.random.split(key, 2 + 2 * blocks))

        def convolution(inside: int) -> eqx.nn.Conv2d:
            return eqx.nn.Conv2d(inside, channels, 3, padding=1, key=next(keys))

        self.first = convolution(3)
        self.blocks = [
            (convolution(channels), convolution(channels)) for _ in range(blocks)
        ]
        self.scales = [jnp.ones(channels) for _ in range(2 * blocks)]
        self.shifts = [jnp.zeros(channels) for _ in range(2 * blocks)]
        self.head = eqx.nn.Linear(channels, classes, key=next(keys))

    def __call__(self, images: Array) -> Array:
        x = jax.vmap(self.first)(images.transpose(0, 3, 1, 2))
        affine = iter(zip(self.scales, self.shifts, strict=True))
        for first, second in self.blocks:
            inner = jax.nn.relu(_batch_norm(jax.vmap(first)(x), *next(affine)))
            x = jax.nn.relu(x + _batch_norm(jax.vmap(second)(inner), *next(affine)))
        return jax.vmap(self.head)(jnp.mean(x, (2, 3)))


def _batch_norm(x: Array, scale: Array, shift: Array) -> Array:
    mean = jnp.mean(x, (0, 2, 3), keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), (0, 2, 3), keepdims=True)
    normed = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normed * scale[:, None, None] + shift[:, None, None]


def _linear(inside: int, outside: int, key: Array) -> eqx.nn.Linear:
    return eqx.nn.Linear(inside, outside, use_bias=False, key=key)


def llama(sizes: dict[str, int], blocks: int, key: Array) -> SequenceModel:
    """A Llama of these sizes."""

    def make(key: Array) -> LlamaBlock:
        return LlamaBlock(sizes["width"], sizes["hidden"], sizes["heads"], key)

    return SequenceModel(sizes["width"], blocks, key, make)


def state_space(sizes: dict[str, int], blocks: int, key: Array) -> SequenceModel:
    """A gated state space model of these sizes."""

    def make(key: Array) -> StateSpaceBlock:
        return StateSpaceBlock(sizes["width"], sizes["hidden"], key)

    return SequenceModel(sizes["width"], blocks, key, make)
