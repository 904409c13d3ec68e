"""Models of four frameworks around a plant: each gives a loss and its model."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as linen
import haiku
import jax
import jax.numpy as jnp
from flax import nnx

from .containers import LAYERS, WIDTH

Made = tuple[Callable[..., Any], Any]


class Block(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, h, f, planted):
        return planted(jnp.tanh(jax.vmap(self.linear)(h)), f)


class Stack(eqx.Module):
    blocks: list[Block]

    def __call__(self, h, f, planted):
        for block, one in zip(self.blocks, f, strict=True):
            h = block(h, one, planted)
        return h


def equinox(planted, mean) -> Made:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    blocks = [Block(eqx.nn.Linear(WIDTH, WIDTH, key=key)) for key in keys]

    return lambda model, x, f: mean(model(x, f, planted)), Stack(blocks)


def equinox_scan(planted, mean) -> Made:
    """Layers in one module of stacked weights, as Equinox's users scan them."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    block = eqx.filter_vmap(lambda k: Block(eqx.nn.Linear(WIDTH, WIDTH, key=k)))(keys)

    def loss(model, x, f):
        arrays, static = eqx.partition(model, eqx.is_array)

        def body(h, layer):
            arrays, one = layer
            return eqx.combine(arrays, static)(h, one, planted), None

        return mean(jax.lax.scan(body, x, (arrays, f))[0])

    return loss, block


def flax_linen(planted, mean) -> Made:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, h, f):
            for i in range(LAYERS):
                h = planted(jnp.tanh(linen.Dense(WIDTH)(h)), f[i])
            return h

    module = Model()
    shapes = jnp.ones((1, WIDTH)), jnp.ones((LAYERS,))

    variables = module.init(jax.random.key(0), *shapes)
    return lambda variables, x, f: mean(module.apply(variables, x, f)), variables


def flax_nnx(planted, mean) -> Made:
    class Model(nnx.Module):
        def __init__(self, rngs):
            make = lambda _: nnx.Linear(WIDTH, WIDTH, rngs=rngs)  # noqa: E731
            self.layers = nnx.List(map(make, range(LAYERS)))

        def __call__(self, h, f):
            for i, layer in enumerate(self.layers):
                h = planted(jnp.tanh(layer(h)), f[i])
            return h

    return lambda model, x, f: mean(model(x, f)), Model(nnx.Rngs(0))


def of_haiku(planted, mean) -> Made:
    def forward(h, f):
        for i in range(LAYERS):
            h = planted(jnp.tanh(haiku.Linear(WIDTH)(h)), f[i])
        return h

    module = haiku.without_apply_rng(haiku.transform(forward))
    shapes = jnp.ones((1, WIDTH)), jnp.ones((LAYERS,))

    params = module.init(jax.random.key(0), *shapes)
    return lambda params, x, f: mean(module.apply(params, x, f)), params


FRAMEWORKS = {
    "Equinox": equinox,
    "Equinox, scan": equinox_scan,
    "Linen": flax_linen,
    "NNX": flax_nnx,
    "Haiku": of_haiku,
}
