"""Qwix: quantized training of its own, under autocast."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, normal
from ..record import client

NOTE = "Its products are quantized already: a recipe of mpx finds none."


def quantized(key, rule):
    """A network of Flax whose products Qwix takes over."""
    import qwix
    from flax import linen as nn

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(64)(x))
            x = nn.relu(nn.Dense(64)(x))
            return nn.Dense(8)(x)

    model = qwix.quantize_model(MLP(), qwix.QtProvider([rule]))
    keys = jax.random.split(key, 3)
    x = normal(keys[0], 32, 32)

    def loss(params, x, y):
        logits = model.apply(params, x)
        return cross_entropy(logits, y), logits

    return loss, model.init(keys[1], x), (x, labels(keys[2], 32, classes=8))


@client(note=NOTE)
def qwix_int8(key):
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.int8,
        act_qtype=jnp.int8,
        bwd_qtype=jnp.int8,
    )
    return quantized(key, rule)


@client(note=NOTE)
def qwix_float8(key):
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )
    return quantized(key, rule)
