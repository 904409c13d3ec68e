"""Flax Linen: a transformer, layers in a scan with remat, statistics and dropout."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from .program import mean_square, normal, program

WIDTH = 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(num_heads=2)
        y = nn.LayerNorm()(x)
        x = x + attention(y, mask=nn.make_causal_mask(x[..., 0]))
        y = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(y)))


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Step(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return Block()(x), None

        scanned = nn.scan(
            nn.remat(Step, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scanned()(x, None)[0]


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        x = nn.avg_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(4)(x.reshape(len(x), -1))


@program(third_party=True)
def linen_scan_over_layers_with_remat(key):
    keys = jax.random.split(key)
    module, x = Layers(), normal(keys[0], 2, 12, WIDTH)

    def loss(variables, x):
        y = module.apply(variables, x)
        return mean_square(y - 1), y

    return loss, (jax.jit(module.init)(keys[1], x), x)


@program(third_party=True)
def linen_batch_norm_and_dropout(key):
    keys = jax.random.split(key, 4)
    module, x = Noisy(), normal(keys[0], 8, 6, 6, 2)
    variables = jax.jit(module.init)({"params": keys[1], "dropout": keys[2]}, x)

    def loss(weights, statistics, x, key):
        y, new = module.apply(
            {"params": weights, **statistics},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return mean_square(y - 1), (y, new)

    statistics = {"batch_stats": variables["batch_stats"]}
    return loss, (variables["params"], statistics, x, jnp.asarray(keys[3]))
