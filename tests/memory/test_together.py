"""A state in few bits in whole steps, with frameworks and transformations."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optax import contrib

import mpx

from ..step.cases import same_bits

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

RECIPES = {"bfloat16": None, "delayed": mpx.DelayedScaling(amax_history_len=4)}


def in_few_bits(optimizer, bits=16, **options):
    return mpx.master_weights(mpx.compress_state(optimizer, **options), bits=bits)


def weights(dtype="float32"):
    return {"w": (0.1 * jax.random.normal(jax.random.key(0), (64, 128))).astype(dtype)}


def step(tx, model, state, seed=0):
    key = jax.random.key(seed + 1)
    grads = jax.tree.map(lambda w: jax.random.normal(key, w.shape), model)
    update = jax.jit(lambda m, s, g: mpx.optimizer_update(m, tx, s, g, True))
    return update(model, state, grads)


@functools.cache
def trained(recipe, bits):
    """The losses of an Equinox model whose weights are bfloat16, and its last state."""
    model = mpx.cast_to_bfloat16(eqx.nn.MLP(64, 8, 256, 1, key=jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (32, 64))
    y, optimizer = x[:, :8], optax.adam(3e-3)
    error = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)  # noqa: E731
    loss = mpx.autocast(error, recipe=RECIPES[recipe])
    tx = in_few_bits(optimizer, bits) if bits < 32 else mpx.master_weights(optimizer)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    run, losses = (model, state, mpx.init_scaling(loss, model, x, y)), []

    @eqx.filter_jit
    def step(model, state, scaling, x):
        result = mpx.filter_value_and_grad(loss, scaling)(model, x, y)
        return mpx.optimizer_step(model, tx, state, result), result.value

    for _ in range(7):
        run, value = step(*run, x)
        losses.append(float(value))
    return losses, run, lambda x: step(*run, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_follows_float32_masters(recipe):
    expected, *found = (trained(recipe, bits)[0] for bits in (32, 16, 8, 0))
    for losses in found:
        assert losses[-1] < 0.6 * losses[0]
        np.testing.assert_allclose(losses, expected, rtol=0.03)


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_but_the_record():
    _, (model, state, scaling), again = trained("bfloat16", 8)
    x = jnp.full((32, 64), jnp.inf)
    (after, state_after, scaling_after), _ = again(x)
    assert same_bits((after, state_after), (model, state))
    assert not scaling_after.finite and scaling.finite
    mpx.guard((after, state_after))


@pytest.mark.slow
def test_linen():
    module, x = nn.Dense(512), jnp.ones((4, 64))
    params = module.init(jax.random.key(0), x)
    tx = mpx.compress_state(optax.lamb(1e-2))
    state = tx.init(params)
    loss = lambda params: jnp.mean((module.apply(params, x) - 1) ** 2)  # noqa: E731

    @jax.jit
    def update(params, state):
        return mpx.optimizer_update(params, tx, state, jax.grad(loss)(params), True)

    before = loss(params)
    for _ in range(5):
        params, state = update(params, state)
    assert loss(params) < before
    parts = {name: kind for name, kind, _ in mpx.state_bytes(params, state).parts}
    assert parts["nu"] == "8 bits, not negative"


ADAM, compress = optax.adam(1e-3), mpx.compress_state
PARTS = {"a": compress(ADAM), "b": optax.sgd(1e-3)}
TOGETHER = {
    "hyperparameters outside": lambda: optax.inject_hyperparams(
        lambda learning_rate: compress(optax.adam(learning_rate))
    )(learning_rate=1e-3),
    "MultiSteps outside": lambda: optax.MultiSteps(compress(ADAM), 2),
    "MultiSteps inside": lambda: compress(optax.MultiSteps(ADAM, 2)),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), compress(optax.adamw(1e-3))
    ),
    "masked": lambda: optax.masked(compress(ADAM), {"w": True}),
    "partitioned": lambda: optax.multi_transform(PARTS, {"w": "a"}),
    "schedule": lambda: compress(optax.adamw(optax.linear_schedule(1e-3, 0, 10))),
}


def assert_compressed(model, state):
    parts = {name: kind for name, kind, _ in mpx.state_bytes(model, state).parts}
    assert parts["mu"] == "8 bits, signed" and parts["nu"] == "8 bits, not negative"


@pytest.mark.parametrize("make", TOGETHER.values(), ids=TOGETHER)
def test_transformations_of_optax_around_and_inside(make):
    tx, model = make(), weights()
    state = tx.init(model)
    update = jax.jit(lambda m, s: step(tx, m, s))
    for _ in range(4):
        model, state = update(model, state)
    assert np.isfinite(model["w"]).all()
    assert not np.array_equal(model["w"], weights()["w"])
    assert_compressed(model, state)


@pytest.mark.parametrize("make", [lambda w: {"w": w}, lambda w: w])
def test_gradients_like_a_part_of_the_weights(make):
    """Those of `optax.lookahead` are of its fast weights."""
    plain = optax.lookahead(optax.adam(1e-2), sync_period=2, slow_step_size=0.5)
    runs = {}
    for name, tx in (("float32", plain), ("8 bits", mpx.compress_state(plain))):
        params = optax.LookaheadParams.init_synced(make(weights()["w"]))
        state = jax.jit(tx.init)(params)
        for _ in range(4):
            grads = jax.tree.map(jnp.sin, params.fast)
            updates, state = jax.jit(tx.update)(grads, state, params)
            params = optax.apply_updates(params, updates)
        runs[name] = params, state
    moved = jax.tree.leaves(runs["float32"][0])[0] - weights()["w"]
    found, wanted = (jax.tree.leaves(run[0]) for run in runs.values())
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05 * np.abs(moved).max())
    assert_compressed(*runs["8 bits"])


def test_gradients_of_each_example_and_values_that_an_update_needs():
    """As `optax.contrib.dpsgd` takes gradients."""
    private = contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))
    tx = mpx.compress_state(optax.chain(private, optax.adam(1e-3)))
    model = weights()
    grads = jax.tree.map(lambda w: jnp.stack([w, -w, w]), model)
    updates, state = jax.jit(tx.update)(grads, tx.init(model), model)
    assert updates["w"].shape == model["w"].shape
    assert_compressed(model, state)
    chain = optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau())
    tx = mpx.compress_state(chain, extra_args={"value": 0.0})
    grads, value = jax.tree.map(jnp.ones_like, model), jnp.float32(1)
    _, state = tx.update(grads, tx.init(model), model, value=value)
    assert state.inner_state[1].best_value == 1


def test_a_scan_of_steps_is_the_steps():
    tx, model = compress(optax.adagrad(1e-2)), weights()
    start = model, tx.init(model)
    one = lambda carry, _: (step(tx, *carry), None)  # noqa: E731
    scanned, _ = jax.jit(lambda c: jax.lax.scan(one, c, jnp.arange(3)))(start)
    looped = start
    for _ in range(3):
        looped = jax.jit(lambda c: step(tx, *c))(looped)
    # XLA may round a sum of the two programs otherwise, and so one code in thousands.
    np.testing.assert_allclose(scanned[0]["w"], looped[0]["w"], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_vmap_over_models():
    tx, model = mpx.compress_state(optax.adam(1e-3)), weights()
    both = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), model)
    states = jax.vmap(tx.init)(both)
    new, _ = jax.vmap(lambda m, s: step(tx, m, s))(both, states)
    alone, _ = step(tx, model, tx.init(model))
    np.testing.assert_allclose(new["w"][0], alone["w"], rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_float64_stays_beside_float32():
    with jax.enable_x64(True):
        ones = functools.partial(jnp.ones, (64, 128))
        model, tx = {"wide": ones("f8"), "w": ones("f4")}, compress(optax.adam(1e-3))
        model, state = step(tx, model, tx.init(model))
        moments = state.inner_state[0].mu
        assert moments["wide"].dtype == jnp.float64
        assert moments["w"].codes.dtype == jnp.int8
        assert model["wide"].dtype == jnp.float64 and model["w"].dtype == jnp.float32


def test_float16_weights_have_moments_in_few_bits():
    tx, model = mpx.compress_state(optax.adam(1e-3)), weights("float16")
    model, state = step(tx, model, tx.init(model))
    assert model["w"].dtype == jnp.float16
    assert state.inner_state[0].mu["w"].codes.dtype == jnp.int8
    with pytest.raises(ValueError, match="bfloat16"):
        mpx.master_weights(optax.sgd(0.1), bits=16).init(model)


@pytest.mark.slow
def test_orbax_resumes_bit_for_bit(tmp_path):
    tx, model = in_few_bits(optax.adagrad(1e-2), 8), weights("bfloat16")
    state = step(tx, model, tx.init(model))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", state)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: state)
        restored = checkpointer.restore(tmp_path / "step", shapes)
    assert same_bits(restored, state)
    assert same_bits(step(tx, *restored, 1), step(tx, *state, 1))
