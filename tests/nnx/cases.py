"""NNX models that change themselves, and training steps with NNX alone and with mpx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpx
import mpx.nnx

FLOAT16 = "params=float32,compute=float16,output=float32"
BFLOAT16 = "params=float32,compute=bfloat16,output=float32"
WIDTH = 8

mean = mpx.force_full_precision(jnp.mean, jnp.float32)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, WIDTH, rngs=rngs) for _ in range(1)])
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mask = jnp.linspace(0.5, 1.5, WIDTH)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        self.calls[...] += 1
        x = self.norm(x) * self.mask[None]
        return self.head(self.dropout(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.linear(self.norm(x))))


class Scanned(nnx.Module):
    """A scan over stacked blocks, each computed again for the backward pass."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def blocks(rngs):
            return Block(rngs)

        self.embed = nnx.Linear(4, WIDTH, rngs=rngs)
        self.blocks = blocks(rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, block):
            return block(x)

        return self.head(forward(self.embed(x), self.blocks))


class Tied(nnx.Module):
    """One weight in two places."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


class Convolutional(nnx.Module):
    """A convolution with its statistics, then dropout from a stream of its own."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, WIDTH, (2,), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x[..., None])))
        return self.head(self.dropout(x.mean(axis=1), rngs=self.rngs))


MODELS = {
    "normed": Normed,
    "scanned": Scanned,
    "tied": Tied,
    "convolutional": Convolutional,
}


def loss_fn(model, x, y):
    prediction = model(x)
    return mean((prediction - y) ** 2), prediction


def batch(seed, size=8):
    keys = jax.random.split(jax.random.key(seed))
    return jax.random.normal(keys[0], (size, 4)), jax.random.normal(keys[1], (size, 1))


def make(name, optimizer=None, seed=0):
    model = MODELS[name](nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optimizer or optax.adam(1e-2), wrt=nnx.Param)


def plain_step(model, optimizer, scaling, x, y):
    (value, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
    optimizer.update(model, grads)
    return value, aux, grads, scaling


def mpx_step(model, optimizer, scaling, x, y, **options):
    result = mpx.nnx.value_and_grad(loss_fn, scaling, has_aux=True, **options)(
        model, x, y
    )
    mpx.nnx.update(optimizer, model, result.grads, result.finite)
    return result.value, result.aux, result.grads, result.scaling


full_step = functools.partial(mpx_step, use_mixed_precision=False)


def compiled(differentiate, loss, scaling, **options):
    """A gradient function of mpx under `nnx.jit`, with the scaling as an argument."""

    def run(scaling, *args, **kwargs):
        return differentiate(loss, scaling, **options)(*args, **kwargs)

    return functools.partial(nnx.jit(run), scaling)


def numbers(tree):
    """Every array of a tree by path, as numpy has it; random keys as their data."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def assert_equal(a, b, tolerance=0.0):
    """Same paths and dtypes; integers alike and floats near."""
    a, b = numbers(a), numbers(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        y = b[name]
        assert x.dtype == y.dtype and x.shape == y.shape, name
        if tolerance and jnp.issubdtype(x.dtype, jnp.floating):
            x, y = np.float64(x), np.float64(y)
            assert np.abs(x - y).max() <= tolerance * max(1, np.abs(y).max()), name
        else:
            assert x.tobytes() == y.tobytes(), f"{name}: {x} and {y}"
