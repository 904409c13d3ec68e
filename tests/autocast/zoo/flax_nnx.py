"""Flax NNX in its functional form: split, merge inside of the function, split again."""

import flax.nnx as nnx
import jax

from .program import Tolerance, mean_square, normal, program

WIDTH = 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(8, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.embed(x))
        x = x + self.dropout(self.attention(x))
        return self.out(nnx.gelu(x))


@program(third_party=True, float16=Tolerance(1.5e-3, 2.5e-3))
def nnx_block_with_statistics(key):
    keys = jax.random.split(key)
    graph, weights, rest = nnx.split(Block(nnx.Rngs(keys[0])), nnx.Param, ...)

    def loss(weights, rest, x):
        model = nnx.merge(graph, weights, rest, copy=True)
        y = model(x)
        return mean_square(y - x), (y, nnx.split(model, nnx.Param, ...)[2])

    return loss, (weights, rest, normal(keys[1], 4, 6, 8))
