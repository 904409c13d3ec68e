"""Haiku: statistics, dropout and attention; a stack of layers in a scan."""

import haiku as hk
import jax

from .program import mean_square, normal, program

WIDTH = 16


@program(third_party=True)
def haiku_layer_stack(key):
    keys = jax.random.split(key)

    @hk.without_apply_rng
    @hk.transform
    def module(x):
        def layer(x):
            return x + jax.nn.gelu(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))

        return hk.experimental.layer_stack(3)(layer)(x)

    x = normal(keys[0], 8, WIDTH)

    def loss(weights, x):
        y = module.apply(weights, x)
        return mean_square(y - 1), y

    return loss, (jax.jit(module.init)(keys[1], x), x)
