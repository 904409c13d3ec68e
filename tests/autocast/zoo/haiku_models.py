"""Haiku: statistics, dropout and attention; a stack of layers in a scan."""

import haiku as hk
import jax

from .program import mean_square, normal, program

WIDTH = 16


@program(third_party=True)
def haiku_model(key):
    keys = jax.random.split(key, 3)

    def forward(x):
        x = hk.Linear(WIDTH)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        attention = hk.MultiHeadAttention(
            2, WIDTH // 2, w_init=hk.initializers.VarianceScaling()
        )
        x = x + hk.dropout(hk.next_rng_key(), 0.25, attention(x, x, x))
        x = hk.LayerNorm(-1, True, True)(x)
        return hk.Linear(4)(jax.nn.relu(x))

    module = hk.transform_with_state(forward)
    x = normal(keys[0], 4, 6, 8)
    weights, state = module.init(keys[1], x)

    def loss(weights, state, key, x):
        y, state = module.apply(weights, state, key, x)
        return mean_square(y - 1), (y, state)

    return loss, (weights, state, keys[2], x)


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

    return loss, (module.init(keys[1], x), x)
