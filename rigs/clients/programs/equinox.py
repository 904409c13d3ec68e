"""Equinox: layers, state, recurrence."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, mean_square, normal
from ..record import client


@client(linear=True, layouts=True)
def equinox_mlp(key):
    import equinox as eqx

    keys = jax.random.split(key, 3)
    model = eqx.nn.MLP(32, 8, 64, 2, key=keys[0])

    def loss(model, x, y):
        logits = jax.vmap(model)(x)
        return cross_entropy(logits, y), logits

    return loss, model, (normal(keys[1], 32, 32), labels(keys[2], 32, classes=8))


@client(linear=True, layouts=True)
def equinox_transformer(key):
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: list
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x):
            mask = jnp.tril(jnp.ones((x.shape[0],) * 2, bool))
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y, mask)
            y = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
            return x + jax.vmap(self.down)(jax.nn.gelu(y))

    keys = jax.random.split(key, 6)
    block = Block(
        eqx.nn.MultiheadAttention(4, 32, key=keys[0]),
        [eqx.nn.LayerNorm(32), eqx.nn.LayerNorm(32)],
        eqx.nn.Linear(32, 128, key=keys[1]),
        eqx.nn.Linear(128, 32, key=keys[2]),
    )
    head = eqx.nn.Linear(32, 16, key=keys[3])

    def loss(model, x, y):
        block, head = model
        logits = jax.vmap(jax.vmap(head))(jax.vmap(block)(x))
        return cross_entropy(logits, y), logits

    batch = (normal(keys[4], 8, 16, 32), labels(keys[5], 8, 16, classes=16))
    return loss, (block, head), batch


@client(linear=True)
def equinox_batch_norm(key):
    """Convolutions, and statistics that are threaded through by hand."""
    import equinox as eqx

    def make(key):
        keys = jax.random.split(key, 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 16, 3, padding=1, key=keys[0]),
                eqx.nn.BatchNorm(16, "batch", mode="batch"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(16, 32, 3, stride=2, key=keys[1]),
                eqx.nn.AdaptiveAvgPool2d(1),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(32, 8, key=keys[2]),
            ]
        )

    keys = jax.random.split(key, 3)
    model, state = eqx.nn.make_with_state(make)(keys[0])

    def loss(model, x, y, state):
        logits, state = jax.vmap(
            model, in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )(x, state)
        return cross_entropy(logits, y), (logits, state)

    x, y = normal(keys[1], 16, 3, 12, 12), labels(keys[2], 16, classes=8)
    return loss, model, (x, y, state)


@client(linear=True)
def equinox_gru(key):
    import equinox as eqx

    keys = jax.random.split(key, 3)
    model = eqx.nn.GRUCell(8, 32, key=keys[0]), eqx.nn.Linear(32, 1, key=keys[1])

    def loss(model, xs):
        cell, head = model

        def run(xs):
            state, _ = jax.lax.scan(
                lambda state, x: (cell(x, state), None), jnp.zeros(32), xs
            )
            return head(state)

        prediction = jax.vmap(run)(xs)[:, 0]
        return mean_square(prediction - jnp.sum(xs, axis=(1, 2))), prediction

    return loss, model, (normal(keys[2], 16, 12, 8),)
