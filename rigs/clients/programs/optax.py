"""Optax: losses, and a gradient step inside of a loss."""

import jax
import jax.numpy as jnp

from ..data import labels, mean_square, normal
from ..record import client

NOTE = (
    "It differentiates inside, where no recipe can tell gradients from data. Adam's "
    "first step divides a gradient by its own root, so errors of single sets of "
    "numbers differ by a hundred times in every way of casting: medians of 31 sets."
)


def network(params, x):
    """Two layers."""
    hidden = jax.nn.tanh(x @ params["in"] + params["bias"])
    return hidden @ params["out"]


def parameters(key, width, out):
    """Those of the network."""
    keys = jax.random.split(key)
    return {
        "in": normal(keys[0], width, 32) / width**0.5,
        "bias": jnp.zeros(32),
        "out": normal(keys[1], 32, out) / 32**0.5,
    }


@client(linear=True)
def optax_ctc(key):
    """Connectionist temporal classification: a scan over logarithms."""
    import optax

    keys = jax.random.split(key, 3)

    def loss(params, x, y):
        logits = network(params, x)
        zeros = jnp.zeros(x.shape[:2])
        each = optax.ctc_loss(logits, zeros, y, jnp.zeros(y.shape))
        return jnp.mean(each), (logits, each)

    batch = (normal(keys[0], 4, 12, 16), 1 + labels(keys[1], 4, 5, classes=7))
    return loss, parameters(keys[2], 16, 8), batch


@client(linear=True)
def optax_ranking(key):
    import optax

    keys = jax.random.split(key, 3)

    def loss(params, x, relevance):
        scores = network(params, x)[..., 0]
        value = optax.losses.ranking_softmax_loss(scores, relevance)
        return jnp.mean(value), scores

    relevance = labels(keys[1], 8, 10, classes=4).astype(jnp.float32)
    return loss, parameters(keys[2], 16, 1), (normal(keys[0], 8, 10, 16), relevance)


@client(linear=True)
def optax_contrastive(key):
    """NT-Xent with cosine similarities, and a Huber loss."""
    import optax

    keys = jax.random.split(key, 2)

    def loss(params, x, y):
        z = network(params, x)
        value = optax.losses.ntxent(z, y) + optax.losses.huber_loss(z, 0.1).mean()
        return jnp.mean(value), z

    y = jnp.arange(16) // 2
    return loss, parameters(keys[1], 16, 8), (normal(keys[0], 16, 16), y)


@client(note=NOTE, seeds=31)
def optax_step_inside(key):
    """Meta learning: the loss after one step of Adam on another batch."""
    import optax

    keys = jax.random.split(key, 3)
    optimizer = optax.adam(0.01)

    def inner(params, x, y):
        return mean_square(network(params, x)[:, 0] - y)

    def loss(params, x, y):
        half = x.shape[0] // 2
        grads = jax.grad(inner)(params, x[:half], y[:half])
        updates, state = optimizer.update(grads, optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        return inner(params, x[half:], y[half:]), state

    x = normal(keys[0], 32, 16)
    return loss, parameters(keys[1], 16, 1), (x, jnp.sin(jnp.sum(x, axis=1)))
