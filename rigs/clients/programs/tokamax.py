"""Tokamax: operations with derivative rules of their own, on a CPU by XLA."""

import jax
import jax.numpy as jnp

from ..data import mean_square, normal
from ..record import client


@client(linear=True)
def tokamax_attention(key):
    import tokamax

    keys = jax.random.split(key, 3)
    params = normal(keys[0], 32, 3, 4, 8) / 6, normal(keys[1], 4, 8, 32) / 6

    def loss(params, x):
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, params[0]), 2, 0)
        y = tokamax.dot_product_attention(q, k, v, is_causal=True)
        y = jnp.einsum("bthk,hkd->btd", y, params[1])
        return mean_square(x + y), y

    return loss, params, (normal(keys[2], 4, 16, 32),)


@client(linear=True)
def tokamax_gated_linear_unit(key):
    import tokamax

    keys = jax.random.split(key, 3)
    params = {
        "up": normal(keys[0], 32, 2, 64) / 6,
        "down": normal(keys[1], 64, 32) / 8,
        "scale": jnp.ones(32),
        "bias": jnp.zeros(32),
    }

    def loss(params, x):
        y = tokamax.layer_norm(x, params["scale"], params["bias"])
        y = tokamax.gated_linear_unit(y, params["up"], activation=jax.nn.swish)
        return mean_square(x + y @ params["down"] - 1), y

    return loss, params, (normal(keys[2], 32, 32),)


@client(linear=True)
def tokamax_ragged_dot(key):
    """A mixture of experts."""
    import tokamax

    keys = jax.random.split(key, 4)
    params = {
        "route": normal(keys[0], 32, 4) / 6,
        "up": normal(keys[1], 4, 32, 64) / 6,
        "down": normal(keys[2], 4, 64, 32) / 8,
    }

    def loss(params, x):
        logits = x @ params["route"]
        chosen = jnp.argmax(logits, axis=1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=4).astype(jnp.int32)
        y = tokamax.ragged_dot(x[order], params["up"], sizes)
        y = tokamax.ragged_dot(jax.nn.gelu(y), params["down"], sizes)
        weight = jnp.max(jax.nn.softmax(logits), axis=1)[order]
        y = jnp.zeros_like(x).at[order].set(y * weight[:, None])
        return mean_square(x + y - 1), (y, sizes)

    return loss, params, (normal(keys[3], 64, 32),)
