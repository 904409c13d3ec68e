"""The state of `mpx.master_weights`: replaced weights, skips, devices, checkpoints."""

import functools
import operator
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx

from ..helpers import HALF, unchecked_annotations
from ..step.cases import same_bits

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

GRADIENT = mpx.filter_grad(jnp.sum, mpx.DynamicLossScaling())
in_half = pytest.mark.parametrize("dtype", HALF)


def small(dtype="bfloat16"):
    """An optimizer, and weights and state after one step."""
    tx = mpx.master_weights(optax.adam(1e-3))
    weights = jnp.linspace(-1, 1, 8).astype(dtype)
    updates, state = tx.update(jnp.ones(8), tx.init(weights), weights)
    return tx, optax.apply_updates(weights, updates), state


@in_half
def test_replaced_weights_are_right(dtype):
    """A weight from outside starts its master anew; the others keep theirs."""
    tx, weights, state = small(dtype)
    loaded = weights.at[2].set(7.0).at[3].set(-0.0)
    updates, new = tx.update(jnp.zeros(8), state, loaded)
    before = np.asarray(state.masters).copy()
    before[2], before[3] = 7.0, -0.0
    still = mpx.master_weights(optax.set_to_zero())
    own = still.init(loaded)._replace(masters=state.masters)
    _, kept = still.update(jnp.zeros(8), own, loaded)
    assert np.array_equal(np.asarray(kept.masters), before)
    assert abs(float(new.masters[2]) - 7) < 0.01
    assert same_bits(loaded + updates, new.masters.astype(dtype))


@in_half
@pytest.mark.parametrize("jit", [False, True])
def test_skipped_steps_change_nothing(dtype, jit):
    tx, weights, state = small(dtype)
    bad = jnp.full(8, jnp.nan)
    skip = lambda w, s, finite: mpx.optimizer_update(w, tx, s, bad, finite)  # noqa: E731
    after = (jax.jit(skip) if jit else skip)(weights, state, jnp.asarray(False))
    assert same_bits(after, (weights, state))


def test_skip_nonfinite_stands_inside():
    tx = mpx.master_weights(mpx.skip_nonfinite(optax.sgd(1.0)))
    weights = jnp.asarray([-0.0, 0.0, 1.003, -2.5], jnp.bfloat16)
    state = tx.init(weights)
    updates, after = tx.update(jnp.full(4, jnp.inf), state, weights)
    assert same_bits(optax.apply_updates(weights, updates), weights)
    assert same_bits(after.masters, state.masters)
    mpx.check(after.inner_state)
    assert int(after.inner_state.record.skipped) == 1


def test_overflow_of_the_rounding_is_a_bad_step():
    """The master is finite in float32, its float16 is not."""
    tx, weights = mpx.master_weights(optax.sgd(1.0)), jnp.full(2, 65504, jnp.float16)
    policy, scaling = mpx.get_policy("float16"), mpx.DynamicLossScaling(1.0)
    ascend = lambda w: -jnp.sum(100 * w.astype(jnp.float32))  # noqa: E731

    @functools.partial(jax.jit, static_argnames="check")
    def step(scaling, weights, state, check):
        result = mpx.filter_grad(ascend, scaling, policy=policy)(weights)
        return mpx.optimizer_step(weights, tx, state, result, check_update=check)

    state = tx.init(weights)
    for check, finite in ((False, True), (True, False)):
        new, after, scaling = step(scaling, weights, state, check)
        assert bool(scaling.finite) is finite
        assert bool(jnp.isinf(new).all()) is finite
    assert same_bits((new, after), (weights, state))


def test_master_weights_can_be_donated_and_are_copied():
    tx = mpx.master_weights(optax.adam(0.1))
    weights = {"w": jnp.ones(64, jnp.bfloat16), "norm": jnp.ones(64)}
    state = tx.init(weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state):
        return mpx.optimizer_update(weights, tx, state, weights, True)

    memory = step.lower(weights, state).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * (2 + 4 + 8 + 4 + 8)
    new, _ = step(weights, state)  # two of one buffer would raise
    assert weights["w"].is_deleted() and new["w"].dtype == jnp.bfloat16
    # What they were made from may be donated, or deleted, and the state lives on.
    model = {"w": jnp.asarray(np.full(64, 1.001, np.float32))}
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    state = mpx.master_weights(optax.sgd(0.1)).init(weights, model)
    model["w"].delete()
    np.testing.assert_array_equal(state.masters["w"], np.float32(1.001))


def test_masters_are_sharded_like_their_weights():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    specs = {"w": P("data", "model"), "b": P("model")}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    host = {"w": np.ones((8, 4), jnp.bfloat16), "b": np.ones(4, jnp.bfloat16)}
    weights, tx = jax.device_put(host, places), mpx.master_weights(optax.adam(0.1))

    @jax.jit
    def step(weights, state):
        grads = jax.tree.map(lambda w: 0.5 * w, weights)
        return mpx.optimizer_update(weights, tx, state, grads, True)

    for init in (tx.init, jax.jit(tx.init)):
        state = init(weights)
        new, after = step(weights, state)
        for name, place in places.items():
            for array in (state.masters[name], after.masters[name], new[name]):
                assert array.sharding.is_equivalent_to(place, array.ndim)
            assert state.masters[name].dtype == jnp.float32
    assert same_bits((new, after), step(host, tx.init(host)))


@pytest.mark.parametrize("how", ["pickle", "equinox"])
def test_checkpoints(how, tmp_path):
    tx, weights, state = small()
    if how == "pickle":
        restored = pickle.loads(pickle.dumps((weights, state)))
    else:
        eqx.tree_serialise_leaves(tmp_path / "x.eqx", (weights, state))
        like = jax.eval_shape(lambda: (weights, tx.init(weights)))
        restored = eqx.tree_deserialise_leaves(tmp_path / "x.eqx", like)
    assert same_bits(restored, (weights, state))
    update = lambda w, s: tx.update(jnp.ones(8), s, w)[1]  # noqa: E731
    assert same_bits(update(*restored), update(weights, state))


def test_scan_over_steps():
    """The updates never leave the function that makes them."""
    tx, weights, state = small()

    def step(carry, grad):
        updates, state = tx.update(grad, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    scan = jax.jit(functools.partial(jax.lax.scan, step))
    (weights, state), _ = scan((weights, state), jnp.ones((50, 8)))
    assert same_bits(weights, state.masters.astype(jnp.bfloat16))
    wanted = np.linspace(-1, 1, 8) - 0.051
    np.testing.assert_allclose(state.masters, wanted, atol=2**-9 + 1e-3)
    with jax.numpy_dtype_promotion("strict"):
        tx = mpx.master_weights(optax.sgd(0.5))
        weights = jnp.ones(2, jnp.bfloat16)
        updates, _ = tx.update(weights, tx.init(weights), weights)
        assert np.all(optax.apply_updates(weights, updates) == 0.5)


def test_unrolled_steps_keep_masters():
    """XLA may drop a cast to half precision and back; the masters do not notice."""
    tx, start = mpx.master_weights(optax.sgd(2.0**-12)), jnp.ones(2, jnp.bfloat16)

    @jax.jit
    def steps(weights, state):
        for _ in range(4):
            weights, state = mpx.optimizer_update(weights, tx, state, jnp.ones(2), True)
        return weights, state

    weights, state = steps(start, tx.init(start))
    assert np.all(state.masters == 1 - 4 * 2.0**-12)
    assert same_bits(weights, start)


def test_nnx():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tx = mpx.master_weights(optax.adam(1e-2))
    optimizer = nnx.Optimizer(layer, tx, wrt=nnx.Param)
    loss = lambda f, x: jnp.sum(f(x).astype(jnp.float32) ** 2)  # noqa: E731
    policy = "params=bfloat16,compute=bfloat16,output=float32"

    @nnx.jit
    def step(layer, optimizer, x):
        grad = mpx.nnx.value_and_grad(loss, mpx.NoLossScaling(), policy=policy)
        result = grad(layer, x)
        mpx.nnx.update(optimizer, layer, result.grads, result.finite)

    step(layer, optimizer, jnp.ones((3, 2)))
    masters = optimizer.opt_state.masters["kernel"][...]
    assert masters.dtype == jnp.float32
    assert same_bits(layer.kernel[...], masters.astype(jnp.bfloat16))


def wrong(case):
    tx, weights, state = small()
    updates, _ = tx.update(jnp.ones(8), state, weights)
    wide = {"w": jnp.ones(2)}
    half = {"w": jnp.ones(2, jnp.float16)}
    calls = {
        "optimizer": lambda: mpx.master_weights("adam"),
        "no weights": lambda: tx.update(jnp.ones(8), state),
        "structure": lambda: tx.update({"w": jnp.ones(8)}, state, {"w": weights}),
        "shape": lambda: tx.update(jnp.ones(7), state, weights[1:]),
        "cast model": lambda: tx.update(jnp.ones(8), state, jnp.float32(weights)),
        "half model": lambda: tx.update(wide, tx.init(wide), half),
        "other weight": lambda: optax.apply_updates(jnp.float32(weights), updates),
        "outside": lambda: optax.apply_updates(
            weights, jax.tree.map(lambda u: 0.5 * u, updates)
        ),
        "gradients": lambda: GRADIENT(jnp.ones(2, "float16")),
    }
    calls[case]()


INSIDE = r"put transformations of updates .* inside: `mpx.master_weights"


@pytest.mark.parametrize(
    ("case", "error", "match"),
    [
        ("optimizer", TypeError, r"`mpx.master_weights\(optimizer\)` needs an Optax"),
        ("no weights", ValueError, r"needs the weights: `optimizer.update\(grads, s"),
        ("structure", ValueError, r"weights of the structure passed to `init`"),
        ("shape", ValueError, r"got bfloat16\[7\] for the master float32\[8\]"),
        ("cast model", ValueError, r"got float32\[8\] for the master float32\[8\]"),
        ("half model", ValueError, r"got float16\[2\] for no master at `\['w'\]`"),
        ("other weight", ValueError, r"that weight, bfloat16\[8\]; got float32\[8\]"),
        ("outside", TypeError, INSIDE),
        (
            "gradients",
            ValueError,
            r"float32 masters: `mpx.master_weights\(optimizer\)`",
        ),
    ],
)
def test_errors(case, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        wrong(case)


BEHIND = {
    "decay": optax.add_decayed_weights(-1e-6),
    "trace": optax.trace(0.9),
    "apply_every": optax.apply_every(2),
    "ema": optax.ema(0.9),
    "scale": optax.scale(2.0),
    "clip": optax.clip(1.0),
    "norm": optax.clip_by_global_norm(1.0),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "nans": optax.zero_nans(),
    "not negative": optax.keep_params_nonnegative(),
}
AROUND = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-3),
    "skip_nonfinite": mpx.skip_nonfinite,
}
for name, last in BEHIND.items():
    AROUND[name] = lambda tx, last=last: optax.chain(tx, last)


@pytest.mark.parametrize("name", AROUND)
def test_what_changes_updates_from_outside_is_refused(name):
    """Weight decay behind it took the new weight for an update: 8, 16, 32, 64."""
    weights, sgd = jnp.ones(4, jnp.bfloat16), optax.sgd(1e-3)
    tx = AROUND[name](mpx.master_weights(sgd))
    inside = mpx.master_weights(AROUND[name](sgd))

    def step(tx, weights, state):
        return mpx.optimizer_update(weights, tx, state, jnp.ones(4), True)

    with pytest.raises((TypeError, ValueError, AttributeError), match="inside"):
        jax.jit(functools.partial(step, tx))(weights, tx.init(weights))
    step(inside, weights, inside.init(weights))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_noise_that_is_added_to_updates_is_refused(jit):
    tx, weights, state = small()

    def step(weights, state, noise):
        updates, state = tx.update(jnp.ones(8), state, weights)
        return optax.apply_updates(weights, jax.tree.map(operator.add, noise, updates))

    with pytest.raises(ValueError, match="added to that weight"):
        jit(step)(weights, state, jnp.zeros(8, jnp.bfloat16))


def with_bias(seed=0):
    """A model with a bias and a norm in float32, as mixed models have them."""
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(seed))
    linear = eqx.tree_at(lambda m: m.weight, linear, replace_fn=mpx.cast_to_bfloat16)
    return eqx.nn.Sequential([linear, eqx.nn.LayerNorm(4)])


def labels(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", tree)


def masters_of(rate):
    return mpx.master_weights(optax.sgd(rate))


FULL = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "labels": lambda tx: optax.partition(
        {"matrix": tx, "rest": masters_of(0.1)}, labels
    ),
    "hyperparameters": lambda tx: optax.inject_hyperparams(masters_of)(rate=0.1),
}


@pytest.mark.parametrize("name", FULL)
def test_full_weights_are_a_whole_model(name):
    """Those of masters alone have no biases, and Equinox takes None for it."""
    model, tx = with_bias(), FULL[name](masters_of(1e-4))
    params = eqx.filter(model, eqx.is_inexact_array)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = tx.update(grads, tx.init(params), params)
    model = eqx.apply_updates(model, updates)
    full = mpx.full_weights(model, state)
    weight, rounded = full[0].weight, model[0].weight
    assert weight.dtype == jnp.float32 and full[0].bias is model[0].bias
    assert full[1].weight is model[1].weight
    assert same_bits(weight.astype(jnp.bfloat16), rounded)
    assert not same_bits(weight, rounded.astype(jnp.float32))
    assert full(jnp.ones(4)).shape == (4,)


def lora(dtype="bfloat16"):
    base = {"w": jnp.full((8, 8), 3.0, dtype), "b": jnp.ones(8, dtype)}
    return {"base": base, "adapter": jnp.ones((8, 8), dtype)}


LABELS = {"base": "freeze", "adapter": "train"}
TRAINED = {"base": {"w": False, "b": False}, "adapter": True}
STILL = optax.set_to_zero()
FROZEN = {
    "partition": lambda tx: optax.partition({"train": tx, "freeze": STILL}, LABELS),
    "masked": lambda tx: optax.masked(tx, TRAINED),
    "None": lambda tx: tx,
}


@pytest.mark.parametrize("bits", [32, 16, 8, 0])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_weights_have_no_master_and_come_back_in_float32(name, bits):
    model, tx = lora(), FROZEN[name](mpx.master_weights(optax.sgd(1e-3), bits=bits))
    params = {"base": None, "adapter": model["adapter"]} if name == "None" else model
    state = tx.init(params)
    full = mpx.full_weights(model, state)
    assert {x.dtype.name for x in jax.tree.leaves(full)} == {"float32"}
    assert np.all(full["base"]["w"] == 3) and np.all(full["adapter"] == 1)
    with pytest.raises(ValueError, match=r"bfloat16\[2\] at `\['other'\]` with no"):
        mpx.full_weights({**model, "other": jnp.ones(2, jnp.bfloat16)}, state)


@pytest.mark.parametrize("bits", [32, 16, 8, 0])
def test_full_weights_refuse_the_state_of_another_model(bits):
    init = mpx.master_weights(optax.sgd(1e-3), bits=bits).init
    model = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    others = [{"v": model["w"]}, {"w": model["w"][:4]}, {"w": jnp.ones((8, 8))}]
    for other in others[: 1 if bits == 0 else 3]:
        with pytest.raises(ValueError, match="needs this model's state"):
            mpx.full_weights(model, init(other))


def test_full_weights_want_the_state_of_the_model():
    model, sgd = with_bias(), optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"bfloat16\[4,4\].*no master"):
        mpx.full_weights(model, sgd.init(model))
    quantize = jax.jit(mpx.quantization.quantize_weights)
    stored = quantize({"w": jnp.ones((32, 32)), "b": jnp.ones(4)})
    state = mpx.master_weights(sgd).init(stored)
    assert mpx.full_weights(stored, state)["w"].dtype == jnp.float32
    with pytest.raises(ValueError, match="no master"):
        mpx.full_weights(stored, ())
    assert mpx.full_weights({"w": jnp.ones(2)}, ())["w"].dtype == jnp.float32
    # Frozen weights in 8 bits come back in float32.
    model = quantize(lora("float32"))
    tx = FROZEN["partition"](mpx.master_weights(optax.sgd(1e-3)))
    found = mpx.full_weights(model, tx.init(model))["base"]["w"]
    np.testing.assert_allclose(found, 3, rtol=2**-4)
    assert found.dtype == jnp.float32
