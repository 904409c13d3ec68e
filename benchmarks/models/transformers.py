"""Plain transformers of Equinox's own layers: no line of them is about precision.

A ViT with dropout on attention's probabilities and on what attention and MLP give, and
a stack of causal blocks over bytes, one after the other or as a scan. Explicit casts
want norms in full precision; their arms say so by `full`, which is put around a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .problems import Problem

BYTES = 256

Full = Callable[[Callable[..., Any], Any], Callable[..., Any]]


def as_it_is(func: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """What is put around a norm where nobody casts by hand: nothing."""
    del dtype
    return func


class Block(eqx.Module):
    """Attention and MLP of one sequence, each behind a norm, with a residual."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    dense_in: eqx.nn.Linear
    dense_out: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    full: Full = eqx.field(static=True)
    is_causal: bool = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        key: Array,
        *,
        dropout: float = 0.0,
        is_causal: bool = False,
        full: Full = as_it_is,
    ):
        keys = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(
            heads,
            width,
            use_query_bias=not is_causal,
            use_key_bias=not is_causal,
            use_value_bias=not is_causal,
            use_output_bias=True,
            dropout_p=dropout,
            inference=dropout == 0,
            key=keys[0],
        )
        self.mlp_norm = eqx.nn.LayerNorm(width)
        self.dense_in = eqx.nn.Linear(width, hidden, key=keys[1])
        self.dense_out = eqx.nn.Linear(hidden, width, key=keys[2])
        self.dropout = eqx.nn.Dropout(dropout, inference=dropout == 0)
        self.full = full
        self.is_causal = is_causal

    def __call__(self, x: Array, key: Array | None = None) -> Array:
        first, second, third = (None,) * 3 if key is None else jax.random.split(key, 3)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if self.is_causal else None
        normed = jax.vmap(self.full(self.attention_norm, x.dtype))(x)
        mixed = self.attention(normed, normed, normed, mask, key=first)
        x = x + self.dropout(mixed, key=second)
        hidden = jax.vmap(self.dense_in)(jax.vmap(self.full(self.mlp_norm, x.dtype))(x))
        out = jax.vmap(self.dense_out)(jax.nn.gelu(hidden))
        return x + self.dropout(out, key=third)


class ViT(eqx.Module):
    """Patches, blocks, linear classifier; one image at a time.

    What is classified is the mean over the tokens, or a token of its own before them.
    """

    embed: eqx.nn.Linear
    class_token: Array | None
    place: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)
    full: Full = eqx.field(static=True)

    def __init__(
        self,
        problem: Problem,
        blocks: int,
        dropout: float,
        key: Array,
        full: Full = as_it_is,
        *,
        class_token: bool = False,
    ):
        height, width, channels = problem.image_shape
        patch = problem.patch
        keys = jax.random.split(key, blocks + 2)
        self.embed = eqx.nn.Linear(patch * patch * channels, problem.width, key=keys[0])
        tokens = (height // patch) * (width // patch) + class_token
        self.class_token = jnp.zeros((1, problem.width)) if class_token else None
        self.place = jnp.zeros((tokens, problem.width))
        sizes = problem.width, problem.hidden, problem.heads
        self.blocks = [
            Block(*sizes, key, dropout=dropout, full=full) for key in keys[2:]
        ]
        self.norm = eqx.nn.LayerNorm(problem.width)
        self.head = eqx.nn.Linear(problem.width, problem.classes, key=keys[1])
        self.patch = patch
        self.full = full

    def __call__(self, image: Array, key: Array | None = None) -> Array:
        height, width, channels = image.shape
        p = self.patch
        x = image.reshape(height // p, p, width // p, p, channels)
        x = x.transpose(0, 2, 1, 3, 4).reshape(-1, p * p * channels)
        x = jax.vmap(self.embed)(x)
        if self.class_token is not None:
            x = jnp.concatenate([self.class_token, x])
        x = x + self.place
        count = len(self.blocks)
        keys = [None] * count if key is None else jax.random.split(key, count)
        for block, block_key in zip(self.blocks, keys, strict=True):
            x = block(x, block_key)
        x = jax.vmap(self.full(self.norm, x.dtype))(x)
        if self.class_token is not None:
            return self.head(x[0])
        return self.head(self.full(jnp.mean, x.dtype)(x, 0))


class GPT(eqx.Module):
    """Embedded bytes, causal blocks, a linear layer for the logits; one text."""

    embed: eqx.nn.Embedding
    place: Array
    blocks: Any
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    full: Full = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        context: int,
        blocks: int,
        key: Array,
        *,
        scan: bool = False,
        full: Full = as_it_is,
    ):
        keys = jax.random.split(key, 3 + blocks)
        self.embed = eqx.nn.Embedding(BYTES, width, key=keys[0])
        self.place = 0.5 * jax.random.normal(keys[1], (context, width))

        def block(key: Array) -> Block:
            return Block(width, hidden, heads, key, is_causal=True, full=full)

        self.blocks = (
            eqx.filter_vmap(block)(keys[3:]) if scan else [*map(block, keys[3:])]
        )
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, BYTES, use_bias=False, key=keys[2])
        self.full = full

    def __call__(self, text: Array) -> Array:
        x = jax.vmap(self.embed)(text) + self.place
        if isinstance(self.blocks, list):
            for block in self.blocks:
                x = block(x)
        else:
            stacked, rest = eqx.partition(self.blocks, eqx.is_array)

            def turn(x: Array, weights: Any) -> tuple[Array, None]:
                return eqx.combine(weights, rest)(x), None

            x, _ = jax.lax.scan(turn, x, stacked)
        return jax.vmap(self.head)(jax.vmap(self.full(self.norm, x.dtype))(x))
