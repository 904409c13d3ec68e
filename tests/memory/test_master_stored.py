"""Weights in 8 bits under `mpx.master_weights`: how a step writes them."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from ..helpers import assert_same_bits, slow_but, unscaled

pytestmark = [pytest.mark.third_party, unscaled]

FORMATS = {"E4M3": mpx.Format.E4M3, "E5M2": mpx.Format.E5M2}
each_format = pytest.mark.parametrize("format", slow_but(["E4M3"], FORMATS))
SIZE = 128
GRADIENT = jnp.linspace(-1, 1, 64).reshape(8, 8)


def stored_and_optimizer(optimizer, weights=None, format="E4M3"):
    weights = jnp.linspace(-0.5, 0.7, 64).reshape(8, 8) if weights is None else weights
    quantizer = mpx.quantization.TensorQuantizer(FORMATS[format])
    model = mpx.quantization.quantize_weights({"w": weights}, quantizer)
    tx = mpx.master_weights(optimizer)
    return model, tx, tx.init(model, {"w": weights})


@functools.partial(jax.jit, static_argnums=1)
def compiled(model, tx, *args):
    return mpx.optimizer_update(model, tx, *args)


def update(model, tx, state, gradient=GRADIENT, finite=True):
    return compiled(model, tx, state, {"w": gradient}, jnp.asarray(finite))


def numbers(model):
    return np.asarray(mpx.quantization.dequantize_weights(model)["w"])


def largest(model):
    quantized = model["w"].quantized
    return quantized.format.largest * float(quantized.inverse_scale)


@each_format
def test_a_step_writes_its_masters_rounded_with_a_scale_known_before(format: str):
    model, tx, state = stored_and_optimizer(optax.sgd(1e-2), format=format)
    for _ in range(3):
        before = state.masters["w"]
        found = [update(model, tx, state, GRADIENT * k) for k in (1, -20, 1000)]
        scales = {float(m["w"].quantized.inverse_scale) for m, _ in found}
        assert len(scales) == 1  # whatever the gradients are
        for after, new in found:
            scale = 1 / after["w"].quantized.inverse_scale
            given = new.masters["w"], model["w"].quantizer
            expected = mpx.quantization.quantize(*given, scale=scale)
            assert_same_bits(after["w"].quantized.payload, expected.payload)
            assert_same_bits(new.ranges["w"].amax, jnp.max(jnp.abs(before)))
        model, state = found[0]
        assert 4 <= largest(model) / float(jnp.max(jnp.abs(before))) <= 9
        error = np.abs(numbers(model) - state.masters["w"])
        digits = {"E4M3": 4, "E5M2": 3}[format]
        assert np.all(error <= 2.0**-digits * np.abs(state.masters["w"]) + 1e-4)


def test_numbers_beyond_the_scale_saturate_and_masters_keep_them():
    model, tx, state = stored_and_optimizer(optax.sgd(1.0))
    model, state = update(model, tx, state, -GRADIENT * 1000)
    assert np.max(np.abs(numbers(model))) == np.float32(largest(model))
    assert float(jnp.max(jnp.abs(state.masters["w"]))) > 900
    kept = state.masters
    for _ in range(2):
        model, state = update(model, tx, state, jnp.zeros((8, 8)))
        assert_same_bits(state.masters, kept)
    np.testing.assert_allclose(numbers(model), kept["w"], rtol=2**-4)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_shows_as_nan_and_leaves_its_neighbours(bad):
    model, tx, state = stored_and_optimizer(optax.sgd(1e-2))
    for _ in range(3):
        model, state = update(model, tx, state, GRADIENT.at[2, 3].set(bad))
        is_nan = np.isnan(numbers(model))
        assert is_nan[2, 3] and is_nan.sum() == 1
        assert np.max(np.abs(numbers(model)), where=~is_nan, initial=0) > 0.5


@pytest.mark.parametrize(("format", "rate"), [("E4M3", 1e-4), ("E5M2", 1e-2)])
def test_weights_that_begin_as_zeros_grow(format: str, rate: float):
    zeros = jnp.zeros((8, 8))
    model, tx, state = stored_and_optimizer(optax.adam(rate), zeros, format)
    for _ in range(12):
        model, state = update(model, tx, state)
        near = {"rtol": 2**-3, "atol": rate / 25}
        np.testing.assert_allclose(numbers(model), state.masters["w"], **near)


def test_the_number_that_is_stored_does_not_depend_on_the_scale():
    model, tx, state = stored_and_optimizer(optax.set_to_zero())
    model, state = update(model, tx, state)
    wide = state.ranges["w"]._replace(amax=state.ranges["w"].amax * 30.0)
    found = [
        update(model, tx, state._replace(ranges=ranges))[0]
        for ranges in (state.ranges, {**state.ranges, "w": wide})
    ]
    assert largest(found[0]) < largest(found[1])
    np.testing.assert_array_equal(*map(numbers, found))


SKIPS = {
    "by the step": (optax.adam(1e-2), GRADIENT, False),
    "inside": (mpx.skip_nonfinite(optax.adam(1e-2)), GRADIENT * jnp.nan, True),
}


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_skipped_step_leaves_everything_as_it_was(name: str, steps: int):
    optimizer, bad, finite = SKIPS[name]
    model, tx, state = stored_and_optimizer(optimizer)
    for _ in range(steps):
        model, state = update(model, tx, state)
    after, new = update(model, tx, state, bad, finite)
    assert_same_bits(after, model)
    assert_same_bits((new.masters, new.ranges), (state.masters, state.ranges))


def test_a_weight_from_outside_is_taken_as_it_is():
    model, tx, state = stored_and_optimizer(optax.sgd(1e-6))
    for _ in range(3):
        model, state = update(model, tx, state)
    masters = state.masters["w"]
    clipped = mpx.quantization.quantize_weights({"w": jnp.clip(masters, -0.3, 0.3)})
    grown = mpx.quantization.quantize_weights({"w": masters * 1000})
    payload = model["w"].quantized.payload.at[0, 0].set(2.0)
    changed = eqx.tree_at(lambda m: m["w"].quantized.payload, model, payload)
    for other in (clipped, grown, changed):
        expected = numbers(other)
        after, new = update(other, tx, state)
        is_own = np.isclose(masters, expected, rtol=2**-4, atol=1e-3)
        wanted = np.where(is_own, masters, expected)
        np.testing.assert_allclose(new.masters["w"], wanted, rtol=0.07, atol=1e-4)
        np.testing.assert_allclose(numbers(after), expected, rtol=0.13, atol=1e-3)
    assert np.max(numbers(clipped)) < 0.31 and np.max(numbers(grown)) > 600


def model_of(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"up": (32, SIZE), "mid": (2, SIZE, SIZE), "down": (SIZE, 32)}
    normal = lambda key, s: jax.random.normal(key, s) / np.sqrt(s[-2])  # noqa: E731
    return {n: normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}


def loss(model, x):
    layer = lambda h, w: (h + jax.nn.relu(h @ w), None)  # noqa: E731
    h, _ = jax.lax.scan(layer, x @ model["up"], model["mid"])
    return jnp.mean((h @ model["down"] - jnp.sin(3 * x)) ** 2)


LOW = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*"))
FUNC = mpx.autocast(loss, recipe=mpx.DelayedScaling(amax_history_len=4), rules=LOW)


def rows(i):
    return jax.random.normal(jax.random.key(i), (64, 32))


def begun(model, is_stored):
    tx = mpx.master_weights(optax.adam(2e-3))
    weights = mpx.quantization.quantize_weights(model) if is_stored else model
    return weights, tx.init(weights, model), mpx.init_scaling(FUNC, weights, rows(0))


@jax.jit
def step(weights, state, scaling, x):
    tx = mpx.master_weights(optax.adam(2e-3))
    result = mpx.filter_value_and_grad(FUNC, scaling)(weights, x)
    return (*mpx.optimizer_step(weights, tx, state, result), result.value)


def losses(model, is_stored, steps=100):
    run, found = begun(model, is_stored), []
    for i in range(steps):
        *run, value = step(*run, rows(i))
        found.append(float(value))
    return np.array(found)


@pytest.mark.exhaustive
def test_a_hundred_steps_follow_those_of_float32_weights():
    model = model_of(0)
    stored, plain = (losses(model, is_stored) for is_stored in (True, False))
    assert plain[-10:].mean() < 0.5 * plain[0]
    np.testing.assert_allclose(stored[-10:].mean(), plain[-10:].mean(), rtol=0.05)


@pytest.mark.slow
def test_a_restored_run_continues_bit_for_bit():
    run = begun(model_of(1), True)
    for i in range(5):
        *run, _ = step(*run, rows(i))
    # Equinox's own format has no numbers of 8 bits.
    restored = pickle.loads(pickle.dumps(jax.device_get(run)))
    restored = jax.tree.map(jnp.asarray, restored)
    for i in range(5, 8):
        *run, value = step(*run, rows(i))
        *restored, again = step(*restored, rows(i))
        assert_same_bits((run, value), (restored, again))


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.parametrize("is_other", [False, True])
def test_the_choice_of_masters_keeps_a_skipped_weight(name: str, is_other: bool):
    """From which programs for TPUs compute weights."""
    optimizer, bad, finite = SKIPS[name]
    model, tx, state = stored_and_optimizer(optimizer)
    for _ in range(2):
        model, state = update(model, tx, state)
    if is_other:
        model = mpx.quantization.quantize_weights({"w": 3 * state.masters["w"]})

    @jax.jit
    def on_tpus(model, state, gradient, apply):
        updates, _ = tx.update({"w": gradient}, state, model)
        is_new = lambda u: hasattr(u, "_by_master")  # noqa: E731
        return jax.tree.map(lambda u: u._by_master(apply), updates, is_leaf=is_new)

    assert_same_bits(on_tpus(model, state, bad, jnp.asarray(finite)), model)
    found = on_tpus(model, state, GRADIENT, jnp.asarray(True))
    assert_same_bits(found, update(model, tx, state)[0])
