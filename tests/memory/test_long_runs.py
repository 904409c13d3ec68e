"""State in few bits over thousands of steps: what does not move, and what follows.

One program trains with a transformation and with it in each format, by the same draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import mpx

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

SHAPE = (32, 128)
FORMATS = ("8bit", "16bit", "bfloat16")
IS_OLD = jnp.arange(SHAPE[1]) % 2 == 0  # occurs at the beginning only


def noise(number, seed=0):
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), SHAPE)


def each_format(tx):
    return {"": tx} | {name: mpx.compress_state(tx, name) for name in FORMATS}


def moved_without_gradient(tx, steps=2300):
    """How far weights move from step 300 on that have no gradient from step 100 on."""
    arms = each_format(tx)

    def step(carry, number):
        grads = noise(number) + 0.5
        old = jnp.where(number < 100, grads / 20, 0.0)
        grads, ends = jnp.where(IS_OLD, old, grads), {}
        for name, (w, state, at_300) in carry.items():
            updates, state = arms[name].update(grads, state, w)
            at_300 = jnp.where(number == 300, w, at_300)
            ends[name] = optax.apply_updates(w, updates), state, at_300
        return ends, None

    def run():
        w = jnp.zeros(SHAPE)
        begin = {name: (w, arms[name].init(w), w) for name in arms}
        ends = jax.lax.scan(step, begin, jnp.arange(steps))[0]
        return {
            name: jnp.abs(w - at_300)[:, IS_OLD].mean()
            for name, (w, _, at_300) in ends.items()
        }

    return {name: float(x) for name, x in jax.jit(run)().items()}


momentum = functools.partial(optax.sgd, momentum=0.9)
rmsprop = functools.partial(optax.rmsprop, momentum=0.9)
MAKERS = {
    "adam": (optax.adam, ()),
    "b2 0.95": (functools.partial(optax.adamw, b2=0.95, weight_decay=0.0), ()),
    "lion": (optax.lion, pytest.mark.slow),
    "momentum": (momentum, pytest.mark.slow),
    "rmsprop": (rmsprop, pytest.mark.slow),
}
MARKED = [pytest.param(one, marks=marks) for one, marks in MAKERS.values()]


@pytest.mark.parametrize("make", MARKED, ids=MAKERS)
def test_weights_without_a_gradient_stand_still(make):
    """2,000 full steps of Adam would be 2. Lion moves on in float32, by its sign."""
    moved = moved_without_gradient(make(1e-3))
    for name in FORMATS:
        assert moved[name] < moved[""] + 0.01, moved


def last_states(tx, gradient, steps):
    arms, w = each_format(tx), jnp.ones(SHAPE)

    def step(states, number):
        grads = gradient(number)
        new = {name: arms[name].update(grads, states[name], w)[1] for name in arms}
        return new, None

    def run():
        begin = {name: arms[name].init(w) for name in arms}
        return jax.lax.scan(step, begin, jnp.arange(steps))[0]

    return {name: mpx.full_state(state) for name, state in jax.jit(run)().items()}


def error(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def test_a_slow_average_follows():
    """AdEMAMix' (0.9999), whose mean gradient turns; it was 0.81 off in 8 bits."""
    mean = noise(1, seed=1)
    turned = lambda i: jnp.where(i < 1500, mean, -mean[::-1]) + noise(i)  # noqa: E731
    tx = contrib.scale_by_ademamix()
    m2 = {name: s.m2 for name, s in last_states(tx, turned, 3000).items()}
    for name, limit in (("8bit", 0.005), ("16bit", 0.005), ("bfloat16", 0.1)):
        assert error(m2[name], m2[""]) < limit, name
    moments = mpx.compress_state(tx).init(jnp.ones(SHAPE)).inner_state
    bits = [moments.m1.code.bits, moments.m2.code.bits, moments.nu.code.bits]
    assert bits == [8, 16, 8]


def test_a_second_moment_follows_gradients_that_fall():
    """By a factor of ten, in a quarter of each block; it stayed 54 times too large."""
    fell = jnp.arange(SHAPE[1]) % 4 == 0
    gradient = lambda i: noise(i) * jnp.where(fell & (i > 1000), 0.1, 1.0)  # noqa: E731
    states = last_states(optax.scale_by_adam(), gradient, 5000)
    for name in FORMATS:
        ratio = np.asarray(states[name].nu / states[""].nu)
        assert abs(ratio[:, ~fell].mean() - 1) < 0.02, name
        assert abs(ratio[:, fell].mean() - 1) < 0.05, name


# Of docs/guides/state.md: the error of an average of noise, relative to its norm.
NOISE = {
    (0.9, 0.95): {"8bit": (0.022, 0.023), "bfloat16": (0.0055, 0.0078)},
    (0.9, 0.99): {"8bit": (0.022, 0.046), "bfloat16": (0.0055, 0.018)},
    (0.99, 0.999): {"8bit": (0.066, 0.091), "bfloat16": (0.017, 0.039)},
}


MARKED = [pytest.param(*of, marks=[pytest.mark.slow] * (of[1] > 0.95)) for of in NOISE]


@pytest.mark.parametrize(("b1", "b2"), MARKED)
def test_the_noise_of_rounding_is_as_documented(b1, b2):
    tx = optax.scale_by_adam(b1=b1, b2=b2)
    states = last_states(tx, noise, round(5 / (1 - b2)))
    wanted = NOISE[b1, b2] | {"16bit": (0.0003, 0.0006)}
    for name, limits in wanted.items():
        for field, limit in zip(("mu", "nu"), limits, strict=True):
            a, b = (getattr(states[arm], field) for arm in ("", name))
            least = 0.7 * limit if name != "16bit" else 0
            assert least < error(b, a) < 1.3 * limit, (name, field, error(b, a))
        ratio = np.asarray(states[name].nu / states[""].nu)
        assert abs(ratio.mean() - 1) < 0.01
