"""A block of a Vision Transformer, that numbers are measured on."""

from typing import Any

import jax
import jax.numpy as jnp


def vit_parameters(key: jax.Array, width: int = 384) -> dict[str, Any]:
    keys = jax.random.split(key, 4)

    def dense(key: jax.Array, n: int, m: int) -> dict[str, Any]:
        return {"w": jax.random.normal(key, (n, m)) / n**0.5, "b": jnp.zeros(m)}

    return {
        "norm1": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "qkv": [dense(k, width, width) for k in jax.random.split(keys[0], 3)],
        "out": dense(keys[1], width, width),
        "norm2": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "up": dense(keys[2], width, 4 * width),
        "down": dense(keys[3], 4 * width, width),
    }


def layer_norm(p: dict[str, Any], x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    normal = (x - mean) * jax.lax.rsqrt(variance + 1e-6)
    scale, bias = (jnp.broadcast_to(p[n], x.shape) for n in ("scale", "bias"))
    return normal * scale + bias


def dense(p: dict[str, Any], x: jax.Array) -> jax.Array:
    y = x @ p["w"]
    return y + jnp.broadcast_to(p["b"], y.shape)


def attention(
    p: dict[str, Any], x: jax.Array, heads: int = 6, causal: bool = False
) -> jax.Array:
    batch, tokens, width = x.shape
    shape = (batch, tokens, heads, width // heads)
    q, k, v = (dense(one, x).reshape(shape) for one in p["qkv"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    if causal:
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))
        mask = jnp.broadcast_to(mask, scores.shape)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return dense(p["out"], mixed.reshape(x.shape))


def block(p: dict[str, Any], x: jax.Array, causal: bool = False) -> jax.Array:
    x = x + attention(p, layer_norm(p["norm1"], x), causal=causal)
    return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x))))


def vit_loss(p: dict[str, Any], x: jax.Array) -> jax.Array:
    return jnp.mean(block(p, x) ** 2)
