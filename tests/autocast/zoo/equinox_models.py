"""Equinox's own layers, recurrent cells in every loop, modules with other leaves."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .program import OUTER, mean_square, normal, program

WIDTH = 16


class NormBlock(eqx.Module):
    """A residual block with two kinds of normalization."""

    first: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    second: eqx.nn.RMSNorm
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[0])
        self.second = eqx.nn.RMSNorm(2 * WIDTH)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[1])

    def __call__(self, x):
        hidden = self.second(jax.nn.gelu(self.up(self.first(x))))
        return x + self.down(hidden)


@program()
def equinox_layer_norm(key):
    keys = jax.random.split(key, 2)

    def loss(model, x):
        y = jax.vmap(model)(x)
        return mean_square(y), y

    # Far from zero, so that a mean or variance taken in half precision shows.
    return loss, (NormBlock(keys[0]), 5 + normal(keys[1], 8, WIDTH))


@program(third_party=True)
def equinox_batch_norm_ema(key):
    def make(key):
        keys = jax.random.split(key)
        norm = eqx.nn.BatchNorm(WIDTH, "batch", momentum=0.9, mode="ema")
        first, last = (
            eqx.nn.Linear(*sizes, key=k)
            for sizes, k in zip(((8, WIDTH), (WIDTH, 4)), keys, strict=True)
        )
        return eqx.nn.Sequential([first, norm, eqx.nn.Lambda(jax.nn.relu), last])

    keys = jax.random.split(key, 3)
    model, state = eqx.nn.make_with_state(make)(keys[0])

    def loss(model, state, x):
        y, state = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(x, state)
        return mean_square(y), (y, state)

    # The first batch fills the statistics, so that "ema" normalizes with them.
    _, (_, state) = loss(model, state, normal(keys[1], 16, 8))
    return loss, (model, state, normal(keys[2], 16, 8))


class Convolutions(eqx.Module):
    """An encoder with both kinds of pooling, and a decoder that goes back up."""

    stem: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    pool: eqx.nn.AvgPool2d
    deep: eqx.nn.Conv2d
    peak: eqx.nn.MaxPool2d
    back: eqx.nn.ConvTranspose2d

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.stem = eqx.nn.Conv2d(2, 8, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.GroupNorm(4, 8)
        self.pool = eqx.nn.AvgPool2d(2, 2)
        self.deep = eqx.nn.Conv2d(8, 8, 3, padding=1, groups=2, key=keys[1])
        self.peak = eqx.nn.MaxPool2d(2, 2)
        self.back = eqx.nn.ConvTranspose2d(8, 2, 4, stride=4, key=keys[2])

    def __call__(self, x):
        x = self.pool(jax.nn.silu(self.norm(self.stem(x))))
        return self.back(self.peak(self.deep(x)))


@program()
def equinox_group_norm_cnn(key):
    keys = jax.random.split(key, 2)

    def loss(model, x):
        y = jax.vmap(model)(x)
        return mean_square(y - x), y

    return loss, (Convolutions(keys[0]), normal(keys[1], 4, 2, 8, 8))


@program(OUTER)
def equinox_gru_in_scan(key):
    keys = jax.random.split(key, 2)
    cell = eqx.nn.GRUCell(4, WIDTH, key=keys[0])

    def loss(cell, xs):
        def step(state, x):
            state = cell(x, state)
            return state, state

        last, states = lax.scan(step, jnp.zeros(WIDTH), xs)
        return mean_square(last), states

    return loss, (cell, normal(keys[1], 12, 4))


@program(forward_mode=True)
def equinox_lstm_in_while(key):
    keys = jax.random.split(key, 2)
    cell, xs = eqx.nn.LSTMCell(4, 4, key=keys[0]), normal(keys[1], 10, 4)

    def loss(cell, xs, steps):
        def body(carry):
            i, state = carry
            return i + 1, cell(xs[i], state)

        start = (jnp.int32(0), (jnp.zeros(4), jnp.zeros(4)))
        steps_done, state = lax.while_loop(lambda c: c[0] < steps, body, start)
        return mean_square(state[0]), (state, steps_done)

    return loss, (cell, xs, jnp.int32(10))


@program()
def equinox_tied_embedding(key):
    """One array in two places of the model: Equinox's own way to tie weights."""
    keys = jax.random.split(key, 3)

    def tie(keys):
        embedding = eqx.nn.Embedding(24, WIDTH, key=keys[0])
        head = eqx.nn.Linear(WIDTH, 24, key=keys[1])
        return eqx.nn.Shared(
            (embedding, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight
        )

    def loss(model, tokens):
        embedding, head = model()
        logits = jax.vmap(lambda t: head(jax.nn.gelu(embedding(t))))(tokens)
        log_probabilities = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=1)
        return -jnp.mean(picked), logits

    return loss, (tie(keys), jax.random.randint(keys[2], (16,), 0, 24))


class WithOtherLeaves(eqx.Module):
    """Leaves that are no arrays, static fields, integers and masks."""

    weight: jax.Array
    slope: float
    activation: Callable
    mask: jax.Array
    order: jax.Array
    nothing: None
    label: str
    scale: float = eqx.field(static=True)


@program()
def static_leaves(key):
    keys = jax.random.split(key, 2)
    model = WithOtherLeaves(
        normal(keys[0], WIDTH, WIDTH, scale=0.25),
        0.5,
        jax.nn.silu,
        jnp.arange(WIDTH) % 3 > 0,
        jnp.arange(WIDTH)[::-1],
        None,
        "dense",
        scale=2.0,
    )

    def loss(model, x, options):
        hidden = model.activation(x @ model.weight * model.scale)[:, model.order]
        y = jnp.where(model.mask, hidden, model.slope * x)
        if options["square"]:
            y = y * y
        return jnp.mean(y), {"y": y, "name": model.label, "call": model.activation}

    options = {"square": True, "name": "static", "call": jnp.tanh, "none": None}
    return loss, (model, normal(keys[1], 8, WIDTH), options)
