"""Float32 copies of half-precision weights in the optimizer (`mpx.master_weights`)."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from ..helpers import HALF, slow_but
from ..step.cases import batch, loss, params, same_bits

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

STEPS = 50
OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.05, weight_decay=0.1, mu_dtype=jnp.bfloat16),
    "clipped lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.05)),
}
in_half = pytest.mark.parametrize("dtype", slow_but(["bfloat16"], HALF))


def rounded(masters, dtype):
    return jax.tree.map(lambda m: m.astype(dtype), masters)


def crossing(seed, dtype):
    """Weights of all sizes, which steps make much smaller and turn around."""
    random = np.random.default_rng(seed)
    sizes = 10.0 ** random.uniform(-6, 1, 64)
    w = jnp.asarray(sizes * random.choice([-1, 1], 64), dtype)
    return {"w": w, "zero": jnp.asarray([0.0, -0.0, 1.0], dtype)}


def noise(random, weights):
    """Gradients of the sizes of the weights: they shrink, grow and change sign."""

    def one(w):
        size = np.maximum(np.abs(np.float32(w)), np.float32(1e-4))
        return np.float32(random.normal(size=w.shape)) * size

    return jax.tree.map(one, weights)


def compiled(optimizer):
    """The optimizer as one program, so that two users of it get the same bits."""
    return optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))


def applied_by(apply):
    def step(tx, weights, state, grads):
        updates, state = tx.update(grads, state, weights)
        return apply(weights, updates), state

    return step


def applied_by_mpx(tx, weights, state, grads):
    return mpx.optimizer_update(weights, tx, state, grads, True)


APPLIED = [
    ("sgd", applied_by(optax.apply_updates), "float16"),
    ("momentum", applied_by(optax.apply_updates), "bfloat16"),
    ("adamw", applied_by_mpx, "bfloat16"),
    ("clipped lamb", applied_by(eqx.apply_updates), "float16"),
]


@pytest.mark.parametrize(("name", "step", "dtype"), APPLIED)
def test_weights_are_the_rounded_float32_weights(name, step, dtype):
    """Step by step, bit for bit, beside float32 weights that are rounded."""
    inner = compiled(OPTIMIZERS[name])
    tx, weights = mpx.master_weights(inner), crossing(0, dtype)
    masters = rounded(weights, jnp.float32)
    state, control = tx.init(weights), inner.init(masters)
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        grads = noise(random, weights)
        weights, state = step(tx, weights, state, grads)
        updates, control = inner.update(grads, control, masters)
        masters = optax.apply_updates(masters, updates)
        assert same_bits(weights, rounded(masters, dtype))
    assert same_bits(state.masters, masters)
    assert same_bits(state.inner_state, control)


def test_no_array_of_updates_reaches_every_weight():
    """Why an update is no array: nothing that is added to 1 gives this bfloat16."""
    one, target = jnp.ones((), jnp.bfloat16), jnp.asarray(1e-5, jnp.bfloat16)
    codes = np.arange(2**16).astype(np.uint16).view(jnp.bfloat16)
    assert not np.any(np.asarray(one + jnp.asarray(codes)) == np.asarray(target))
    wide = jnp.float32(1e-9) - 1  # in float32 it is missed, too
    assert jnp.float32(1) + wide != jnp.float32(1e-9)
    tx = mpx.master_weights(optax.sgd(1.0))
    updates, _ = tx.update(1 - jnp.asarray(1e-9, jnp.bfloat16), tx.init(one), one)
    assert not isinstance(updates, jax.Array)


def train(tx, weights, steps, dtype, state=None):
    """Through mpx's gradients; the loss has its minimum where no weight stands."""
    policy = mpx.Policy(jnp.dtype(dtype), jnp.dtype(dtype), jnp.dtype(jnp.float32))

    @jax.jit
    def step(weights, state, scaling, x, y):
        gradient = mpx.filter_value_and_grad(loss, scaling, policy=policy)
        result = gradient(weights, x, y)
        return *mpx.optimizer_step(weights, tx, state, result), result.value

    state = tx.init(weights) if state is None else state
    scaling = mpx.DynamicLossScaling(2.0**4)
    for _ in range(steps):
        weights, state, scaling, value = step(weights, state, scaling, *batch())
    assert int(scaling.record.skipped) == 0
    return weights, state, float(value)


@in_half
def test_small_updates_are_not_lost(dtype):
    """Updates below half a unit in the last place: half precision stands still."""
    start = rounded(params(), dtype)
    # Weights of 0.1 to 1.5: half a unit is 2^-12 at least in bfloat16, a unit 2^-7 at
    # most. One step is below the one, a hundred are above the other.
    tiny = optax.sign_sgd({"float16": 1.2e-5, "bfloat16": 1e-4}[dtype])
    stalled, _, plain = train(tiny, start, 100, dtype)
    moving, state, better = train(mpx.master_weights(tiny), start, 100, dtype)
    assert same_bits(stalled, start)
    for before, after in zip(*map(jax.tree.leaves, (start, moving)), strict=True):
        assert np.all(before != after)
    assert better < plain
    assert same_bits(moving, rounded(state.masters, dtype))


@in_half
def test_trajectory_of_a_float32_model_that_is_cast_on_the_fly(dtype):
    """The same masters: both compute with rounded weights, with the same gradients."""
    start, tx = rounded(params(), dtype), optax.sgd(0.01, momentum=0.9)
    wide = rounded(start, jnp.float32)
    _, state, _ = train(mpx.master_weights(tx), start, 50, dtype)
    policy = mpx.get_policy(f"params=float32,compute={dtype},output=float32")

    @jax.jit
    def step(weights, state, scaling):
        grads = mpx.filter_grad(loss, scaling, policy=policy)(weights, *batch()).grads
        return mpx.optimizer_update(weights, tx, state, grads, True)

    on_the_fly = tx.init(wide)
    for _ in range(50):
        wide, on_the_fly = step(wide, on_the_fly, mpx.StaticLossScaling(2.0**4))
    # Not the same program, so the last bits of float32 may differ, and then, seldom, a
    # rounded weight.
    for pair in zip(*map(jax.tree.leaves, (state.masters, wide)), strict=True):
        np.testing.assert_allclose(*pair, rtol=2e-3)


def test_float32_leaves_have_no_copy_and_none_stays_none():
    weights = {"half": jnp.ones(3, jnp.bfloat16), "norm": jnp.ones(3), "none": None}
    weights["other half"], inner = jnp.ones(2, jnp.float16), optax.adam(0.1)
    tx = mpx.master_weights(inner)
    state = tx.init(weights)
    assert state.masters["norm"] is None and state.masters["none"] is None
    assert state.masters["half"].dtype == state.masters["other half"].dtype == "float32"
    assert all(m.dtype == "float32" for m in jax.tree.leaves(state.inner_state[0].mu))
    grads = jax.tree.map(jnp.ones_like, weights)
    updates, new = tx.update(grads, state, weights)
    assert updates["norm"].dtype == "float32" and updates["none"] is None
    for apply in (optax.apply_updates, eqx.apply_updates):
        after = apply(weights, updates)
        assert jax.tree.structure(after) == jax.tree.structure(weights)
        pairs = zip(*map(jax.tree.leaves, (after, weights)), strict=True)
        assert all(new_leaf.dtype == leaf.dtype for new_leaf, leaf in pairs)
    wide = mpx.cast_to_float32(weights)
    expected, _ = inner.update(mpx.cast_to_float32(grads), inner.init(wide), wide)
    assert same_bits(updates["norm"], expected["norm"])
    assert same_bits(new.masters["half"], wide["half"] + expected["half"])


def test_model_with_functions_and_integers():
    """What is no weight is filtered out, as for any optimizer."""
    model = {"net": eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)), "n": jnp.arange(2)}
    model = mpx.cast_to_bfloat16(model)
    tx = mpx.master_weights(optax.adam(0.1))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    first = lambda tree: tree["net"].layers[0].weight  # noqa: E731

    def squared(model, x):
        return jnp.sum(jax.vmap(model["net"])(x).astype(jnp.float32) ** 2)

    @eqx.filter_jit
    def step(model, state, x):
        with mpx.half_precision("bfloat16"):
            gradient = mpx.filter_value_and_grad(squared, mpx.NoLossScaling())
            result = gradient(model, x)
        assert first(result.grads).dtype == jnp.float32
        return mpx.optimizer_step(model, tx, state, result)

    new, state, _ = step(model, state, jnp.ones((3, 2)))
    assert same_bits(new["n"], model["n"])
    assert first(new).dtype == jnp.bfloat16
    assert same_bits(first(new), rounded(first(state.masters), jnp.bfloat16))


def test_integers_and_extra_arguments_go_to_the_inner_optimizer():
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(extra_args)
        return updates, state

    tx = mpx.master_weights(optax.GradientTransformationExtraArgs(dict, update))
    tx.update({}, tx.init({}), {}, value=3)
    assert seen == [{"value": 3}]
    weights = {"w": jnp.ones(2, jnp.float16), "n": jnp.arange(2)}
    tx = mpx.master_weights(optax.identity())
    state = tx.init(weights)
    assert state.masters["n"] is None
    updates, _ = tx.update(weights, state, weights)
    assert updates["n"] is weights["n"]


@pytest.mark.slow
def test_line_search_computes_with_the_masters():
    def objective(w):
        return jnp.sum((w.astype(jnp.float32) - 0.3) ** 2)

    w, tx = jnp.ones(3, jnp.bfloat16), mpx.master_weights(optax.lbfgs())
    state = tx.init(w)

    @jax.jit
    def step(w, state):
        value, grad = jax.value_and_grad(objective)(w.astype(jnp.float32))
        more = {"value": value, "grad": grad, "value_fn": objective}
        updates, state = tx.update(grad, state, w, **more)
        return optax.apply_updates(w, updates), state

    for _ in range(3):
        w, state = step(w, state)
    np.testing.assert_allclose(state.masters, 0.3, atol=1e-3)


CLIP, MASTERS = optax.clip(0.25), mpx.master_weights
RATE = {"learning_rate": 0.1}
LABELS = {"half": "half", "norm": "rest"}
COMPOSED = {
    "last in a chain": lambda tx: optax.chain(CLIP, MASTERS(tx)),
    "around a chain": lambda tx: MASTERS(optax.chain(CLIP, tx)),
    "one of many": lambda tx: optax.multi_transform(
        {"half": MASTERS(optax.chain(CLIP, tx)), "rest": tx}, LABELS
    ),
    "around accumulation": lambda tx: MASTERS(
        optax.MultiSteps(optax.chain(CLIP, tx), 1)
    ),
    "around hyperparameters": lambda tx: MASTERS(
        optax.chain(CLIP, optax.inject_hyperparams(optax.sgd)(**RATE))
    ),
}


@pytest.mark.parametrize("compose", COMPOSED.values(), ids=COMPOSED)
def test_composition(compose):
    """Four steps of 1/40, which bfloat16 alone would round each time."""
    tx, masters = compose(optax.sgd(0.1)), jnp.ones(2)
    weights = {"half": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2)}
    state, grads = tx.init(weights), jax.tree.map(jnp.ones_like, weights)
    for _ in range(4):
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
        masters = masters - jnp.float32(0.25) * jnp.float32(0.1)
    assert same_bits(weights["half"], masters.astype(jnp.bfloat16))


# --- The choice of masters, from which TPUs compute weights ---------------------------

ODD = [0.0, -0.0, 1.0, -1e-40, 6e-8, 6e4, np.inf, -np.inf, np.nan, -np.nan]
CHANGED = {"own": slice(0, 0), "all": slice(None), "some": slice(None, None, 2)}


def on_tpus(updates, apply):
    """The weights that a program compiled for TPUs computes."""
    is_new = lambda u: hasattr(u, "_by_master")  # noqa: E731
    return jax.tree.map(
        lambda u: u._by_master(jnp.asarray(apply)), updates, is_leaf=is_new
    )


@pytest.mark.parametrize("changed", CHANGED)
@in_half
def test_the_choice_of_masters_keeps_a_skipped_weight(dtype, changed):
    tx = mpx.master_weights(optax.chain(optax.clip(1.0), optax.adam(0.1)))
    odd = jnp.asarray(ODD * 2, dtype)
    begun = {"w": odd, "scalar": jnp.asarray(-0.0, dtype)}
    state = tx.init(begun, jax.tree.map(lambda w: w.astype(jnp.float32) + 1e-9, begun))
    weights = {**begun, "w": odd.at[CHANGED[changed]].set(odd[::-1][CHANGED[changed]])}
    grads = jax.tree.map(lambda w: jnp.ones(w.shape), weights)

    @jax.jit
    def both(grads, apply, weights, state):
        updates, _ = tx.update(grads, state, weights)
        by_mpx, _ = mpx.optimizer_update(weights, tx, state, grads, apply)
        return by_mpx, on_tpus(updates, apply), optax.apply_updates(weights, updates)

    for bad in (1.0, np.nan):
        by_mpx, by_master, _ = both(
            jax.tree.map(lambda g, bad=bad: g * bad, grads), False, weights, state
        )
        assert same_bits(by_mpx, weights) and same_bits(by_master, weights)
    by_mpx, by_master, applied = both(grads, True, weights, state)
    assert same_bits(by_mpx, applied) and same_bits(by_master, applied)


def test_a_nan_from_outside_keeps_its_bits_but_on_tpus():
    tx, own = mpx.master_weights(optax.sgd(0.1)), jnp.ones(3, jnp.bfloat16)
    bits = jnp.asarray([0x7FC1, 0xFF81, 0x7FFF], jnp.uint16)
    weights, state = jax.lax.bitcast_convert_type(bits, own.dtype), tx.init(own)
    skip = jax.jit(lambda w: mpx.optimizer_update(w, tx, state, jnp.ones(3), False)[0])
    assert same_bits(skip(weights), weights)
    updates, _ = tx.update(jnp.ones(3), state, weights)
    assert np.isnan(on_tpus(updates, False).astype(jnp.float32)).all()


INSIDE = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), mpx.master_weights(tx)),
    "every second": lambda tx: mpx.master_weights(optax.MultiSteps(tx, 2)),
    "skipped inside": lambda tx: mpx.master_weights(mpx.skip_nonfinite(tx)),
}


@pytest.mark.parametrize("compose", INSIDE.values(), ids=INSIDE)
def test_a_program_for_tpus_chooses_masters(compose):
    """Without a choice between weights, for which it would run the optimizer twice."""
    tx = compose(optax.adam(0.1))
    weights = {"w": jnp.ones(77, jnp.bfloat16), "norm": jnp.ones(2)}
    grads, state = jax.tree.map(jnp.ones_like, weights), tx.init(weights)

    @jax.jit
    def step(weights, state, grads, apply):
        return mpx.optimizer_update(weights, tx, state, grads, apply)

    traced = step.trace(weights, state, grads, True)
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu")}
    for platform, text in texts.items():
        found = [n for n in text.splitlines() if re.search(r"select.*<77xbf16>$", n)]
        assert len(found) == (platform == "cpu"), (platform, found)


def test_members_of_a_vmap_choose_separately():
    tx = mpx.master_weights(optax.adam(0.1))
    weights = jnp.ones((2, 3), jnp.bfloat16)
    state, apply = jax.vmap(tx.init)(weights), jnp.array([True, False])

    def one(weights, state, apply):
        updates, _ = tx.update(jnp.ones(3), state, weights)
        by_mpx, _ = mpx.optimizer_update(weights, tx, state, jnp.ones(3), apply)
        return by_mpx, updates._by_master(apply)

    for found in jax.jit(jax.vmap(one))(weights, state, apply):
        assert np.any(found[0] != 1) and same_bits(found[1], weights[1])
