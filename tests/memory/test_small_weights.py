"""`mpx.master_weights` with 16, 8 or no bits beside bfloat16 weights."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from ..helpers import unchecked_annotations
from ..step.cases import same_bits

pytestmark = pytest.mark.third_party

BITS = (16, 8, 0)


def weights(seed=0):
    w = np.random.default_rng(seed).normal(size=(32, 128))
    return {"w": jnp.asarray(w, jnp.bfloat16), "norm": jnp.ones(3)}


def steps(tx, model, state, count, grad=1.0):
    @jax.jit
    def step(model, state):
        grads = jax.tree.map(lambda w: jnp.full(w.shape, grad), model)
        return mpx.optimizer_update(model, tx, state, grads, True)

    for _ in range(count):
        model, state = step(model, state)
    return model, state


def test_sixteen_bits_are_the_float32_master():
    """20 steps of one program of the optimizer, so that both get the same updates."""
    model, adam = weights(), optax.adam(3e-4)
    inner = optax.GradientTransformation(adam.init, jax.jit(adam.update))
    runs = {}
    for bits in (32, 16):
        tx = mpx.master_weights(inner, bits=bits)
        after, state = model, tx.init(model)
        for seed in range(20):
            grads = jax.tree.map(jnp.float32, weights(seed))
            after, state = mpx.optimizer_update(after, tx, state, grads, True)
        runs[bits] = mpx.full_weights(after, state), after
    assert same_bits(runs[16][0], runs[32][0])
    assert np.mean(np.asarray(runs[16][1]["w"] == runs[32][1]["w"])) > 0.9999


@pytest.mark.parametrize(("bits", "rate"), [(16, 1e-6), (8, 1e-5), (0, 1e-4)])
def test_weights_move_where_bfloat16_stands_still(bits, rate):
    model, tx = weights(), mpx.master_weights(optax.sgd(rate), bits=bits)
    start = np.float64(model["w"])
    share = lambda w: np.mean(np.float64(w) - start) / (-100 * rate)  # noqa: E731
    full = mpx.full_weights(*steps(tx, model, tx.init(model), 100))["w"]
    assert abs(share(full) - 1) < 0.02
    plain = model["w"]
    for _ in range(100):
        plain = (plain - jnp.float32(rate)).astype(jnp.bfloat16)
    assert abs(share(plain)) < 0.5


@pytest.mark.parametrize("bits", [8, 0])
def test_the_mean_of_4096_steps_is_the_step(bits):
    """From the same state at 4,096 steps, within four standard errors."""
    model = {"w": weights()["w"][:4]}
    tx = mpx.master_weights(optax.sgd(3e-5), bits=bits)
    state = tx.init(model)

    def once(step):
        grads = jax.tree.map(lambda w: jnp.ones(w.shape), model)
        updates, after = tx.update(grads, state._replace(step=step), model)
        return mpx.full_weights(optax.apply_updates(model, updates), after)["w"]

    found = np.float64(jax.jit(jax.vmap(once))(jnp.arange(4096, dtype=jnp.uint32)))
    wanted = np.float64(np.float32(model["w"]) - np.float32(3e-5))
    spread = found.std(0)
    errors = ((found.mean(0) - wanted) / (spread / 64))[spread > 0]
    assert errors.size > 100 and np.abs(errors).max() < 4.2
    assert abs(np.mean(errors)) < 4 / np.sqrt(errors.size)


@pytest.mark.parametrize("bits", BITS)
def test_a_skipped_step_keeps_all_bits(bits):
    tx = mpx.master_weights(mpx.skip_nonfinite(optax.sgd(1e-3)), bits=bits)
    model, state = steps(tx, weights(), tx.init(weights()), 2)
    after, new = steps(tx, model, state, 1, np.nan)
    assert same_bits(after, model)
    assert same_bits((new.low_bits, new.step), (state.low_bits, state.step))
    bad = jax.tree.map(lambda w: w * jnp.nan, model)
    kept = mpx.optimizer_update(model, tx, state, bad, False)
    assert same_bits(kept, (model, state))


@pytest.mark.parametrize("bits", BITS)
def test_a_restored_run_continues_bit_for_bit(bits):
    tx = mpx.master_weights(optax.adam(1e-4), bits=bits)
    run = steps(tx, weights(), tx.init(weights()), 3)
    restored = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(run)))
    assert same_bits(steps(tx, *restored, 2), steps(tx, *run, 2))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.filterwarnings("ignore:.*starts from `params`")
def test_masters_to_start_from(bits):
    masters = np.float32(np.random.default_rng(1).normal(size=(8, 8)))
    model = {"w": jnp.asarray(masters, jnp.bfloat16)}
    init = mpx.master_weights(optax.sgd(0.1), bits=bits).init
    state = init(model, {"w": jnp.asarray(masters)})
    full = np.asarray(mpx.full_weights(model, state)["w"])
    limit = {16: 0.0, 8: 2.0**-16, 0: 2.0**-8}[bits]
    assert np.all(np.abs(full / masters - 1) <= limit)
    state = init(model, {"w": jnp.asarray(2 * masters)})  # of another model
    full = mpx.full_weights(model, state)["w"]
    np.testing.assert_allclose(full, np.float32(model["w"]), rtol=2.0**-8)


@pytest.mark.parametrize("bits", [32, *BITS])
@pytest.mark.filterwarnings("ignore:.*starts from `params`")
def test_masters_that_are_stored_in_8_bits(bits):
    """They were an error of shapes with `bits` below 32."""
    stored = mpx.quantization.quantize_weights({"w": jnp.ones((32, 32)) / 3})
    full = mpx.quantization.dequantize_weights(stored)
    model = jax.tree.map(lambda w: w.astype(jnp.bfloat16), full)
    init = mpx.master_weights(optax.sgd(0.1), bits=bits).init
    found, wanted = (mpx.full_weights(model, init(model, m)) for m in (stored, full))
    assert same_bits(found, wanted)


def test_masters_that_are_lost_are_named():
    """With `bits=0`; not where the weights are the masters."""
    masters = {"w": jax.random.normal(jax.random.key(0), (8, 8)), "norm": jnp.ones(3)}
    half = {"w": masters["w"].astype(jnp.bfloat16), "norm": masters["norm"]}
    init = mpx.master_weights(optax.sgd(0.1), bits=0).init
    for start in (init, jax.jit(init)):
        with pytest.warns(UserWarning, match="with bits=0 starts from `params`"):
            start(half, masters)
    init(half, jax.tree.map(jnp.float32, half))
    init(half)
    mpx.master_weights(optax.sgd(0.1), bits=8).init(half, masters)


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_from_outside_is_taken_as_it_is(bits):
    tx = mpx.master_weights(optax.sgd(1e-6), bits=bits)
    model, state = steps(tx, weights(), tx.init(weights()), 3)
    other = {"w": model["w"].at[:2].set(0.0).at[2].set(7.0), "norm": model["norm"]}
    after, _ = steps(tx, other, state, 1)
    found = np.float32(after["w"])
    assert not np.isnan(found).any() and np.abs(found[:2]).max() < 1e-5
    np.testing.assert_allclose(found[2], 7, rtol=2.0**-7)


def wrong(case):
    model, sgd = weights(), optax.sgd(0.1)
    tx, other = (mpx.master_weights(sgd, bits=bits) for bits in (16, 8))
    stored = {"w": jnp.ones((32, 32))}
    calls = {
        "bits": lambda: mpx.master_weights(sgd, bits=12),
        "float16": lambda: tx.init({"w": jnp.ones((2, 2), jnp.float16)}),
        "stored": lambda: tx.init(mpx.quantization.quantize_weights(stored)),
        "masters": lambda: tx.init(model, model | {"w": model["w"][:2]}),
        "no weights": lambda: tx.update(model, tx.init(model)),
        "other bits": lambda: tx.update(model, other.init(model), model),
        "other state": lambda: tx.update(
            model, mpx.master_weights(sgd).init(model), model
        ),
        "cast": lambda: tx.update(model, tx.init(model), mpx.cast_to_float32(model)),
    }
    calls[case]()


@pytest.mark.parametrize(
    ("case", "error", "match"),
    [
        ("bits", ValueError, "must be 32, 16, 8 or 0; got 12"),
        ("float16", ValueError, r"got float16\[2,2\] at `\['w'\]`"),
        ("stored", ValueError, "use float32 masters, `bits=32`"),
        ("masters", ValueError, "have the shapes of `params`"),
        ("no weights", ValueError, "needs the weights"),
        ("other bits", ValueError, r"the one key 'int16'; got \['int8'\]"),
        ("other state", TypeError, "mpx.full_weights"),
        ("cast", ValueError, "the state of the weight"),
    ],
)
def test_errors(case, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        wrong(case)


@pytest.mark.parametrize("bits", [32, *BITS])
def test_a_weight_without_an_update_stays(bits):
    model = weights()
    tx = mpx.master_weights(optax.sgd(1.0), bits=bits)
    state = tx.init(model)
    updates, after = tx.update({"w": None, "norm": jnp.ones(3)}, state, model)
    new = eqx.apply_updates(model, updates)
    assert np.all(new["norm"] == 0) and same_bits(new["w"], model["w"])
    full = mpx.full_weights(new, after)["w"]
    assert same_bits(full, model["w"].astype(jnp.float32))
