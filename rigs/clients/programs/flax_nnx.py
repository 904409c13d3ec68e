"""Flax NNX: modules split into a graph and a state, as JAX's transforms need them."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, normal
from ..record import client


@client("flax", linear=True, layouts=True)
def nnx_transformer(key):
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.LayerNorm(32, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
            self.second = nnx.LayerNorm(32, rngs=rngs)
            self.up = nnx.Linear(32, 128, rngs=rngs)
            self.down = nnx.Linear(128, 32, rngs=rngs)

        def __call__(self, x):
            mask = nnx.make_causal_mask(x[..., 0])
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class GPT(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(24, 32, rngs=rngs)
            self.blocks = nnx.List([Block(rngs), Block(rngs)])
            self.norm = nnx.LayerNorm(32, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(self.norm(x))

    keys = jax.random.split(key, 2)
    graph, params = nnx.split(GPT(nnx.Rngs(keys[0])))
    tokens = labels(keys[1], 8, 17, classes=24)

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), logits

    return loss, params, (tokens,)


@client("flax", linear=True)
def nnx_batch_norm(key):
    """Statistics that the module mutates, brought out as state."""
    from flax import nnx

    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, use_running_average=False, rngs=rngs)
            self.head = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.conv(x)))
            return self.head(jnp.mean(x, axis=(1, 2)))

    keys = jax.random.split(key, 3)
    graph, params, rest = nnx.split(CNN(nnx.Rngs(keys[0])), nnx.Param, ...)

    def loss(params, x, y, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        logits = model(x)
        return cross_entropy(logits, y), (logits, nnx.split(model, nnx.Param, ...)[2])

    batch = (normal(keys[1], 8, 10, 10, 3), labels(keys[2], 8, classes=8), rest)
    return loss, params, batch


@client("flax", linear=True)
def nnx_gru(key):
    from flax import nnx

    class Reader(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.GRUCell(8, 32, rngs=rngs))
            self.head = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.rnn(x)[:, -1])

    keys = jax.random.split(key, 3)
    graph, params = nnx.split(Reader(nnx.Rngs(keys[0])))

    def loss(params, x, y):
        logits = nnx.merge(graph, params)(x)
        return cross_entropy(logits, y), logits

    return loss, params, (normal(keys[1], 16, 10, 8), labels(keys[2], 16, classes=4))
