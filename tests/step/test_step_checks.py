"""Clipping, several optimizers, and the checks that stop a step or a run."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from .cases import batch, close, loss, same_bits, total
from .test_optimizer import RATE, gradients, weights

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

each_check = pytest.mark.parametrize("check", [False, True])


@functools.partial(jax.jit, static_argnames="finite")
def result_of(grads, scaling, finite=True):
    def fun(w):
        terms = jax.tree.map(lambda w, g: total(w * g), w, grads)
        value = sum(jax.tree.leaves(terms), jnp.zeros(()))
        return value if finite else value * jnp.nan

    return mpx.filter_value_and_grad(fun, scaling, policy="float32")(weights())


def first_step(optimizer, result, **options):
    w = weights()
    return mpx.optimizer_step(w, optimizer, optimizer.init(w), result, **options)


def test_two_optimizers_of_which_one_sees_nan():
    """Row 14: only it skips; the shared scale backs off."""
    scaling, optimizer = mpx.DynamicLossScaling(16.0), optax.adam(RATE)
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    states = {k: optimizer.init(w) for k, w in model.items()}
    grads = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}
    new = {}
    for k, w in model.items():
        finite = mpx.all_finite(grads[k])
        args = w, optimizer, states[k], grads[k], finite
        new[k], states[k] = mpx.optimizer_update(*args)
    scaling = scaling.adjust(mpx.all_finite(grads))
    assert float(scaling.loss_scale) == 8.0
    assert same_bits(new["b"], model["b"]) and not same_bits(new["a"], model["a"])
    assert (int(states["a"][0].count), int(states["b"][0].count)) == (1, 0)


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_equals_the_control(scaled):
    """Rows 17, 18: after unscaling at the norm, before it at norm times scale."""
    scale, norm, args = 2.0**6, 0.05, (weights(), *batch())
    clip = lambda g, n: optax.clip_by_global_norm(n).update(g, optax.EmptyState())[0]  # noqa: E731
    expected = clip(jax.jit(jax.grad(loss))(*args), norm)

    @jax.jit
    def gradient(scaling, *args):
        if scaled:
            return mpx.calculate_scaled_grad(loss, scaling)(*args)[1]
        return mpx.filter_grad(loss, scaling, policy="float32")(*args).grads

    scaling = mpx.StaticLossScaling(scale)
    clipped = clip(gradient(scaling, *args), norm * scale if scaled else norm)
    clipped = scaling.unscale(clipped) if scaled else clipped
    close(clipped, expected, 1e-2 if scaled else 1e-6)


def test_stepping_twice_with_one_result_counts_once():
    """Row 20: the state after the step is in the result, not made by the step."""
    optimizer = optax.adam(RATE)
    result = result_of(gradients(0), mpx.DynamicLossScaling(4.0, period=2))
    model, state, scaling = once = first_step(optimizer, result)
    assert same_bits(once, first_step(optimizer, result))
    _, _, twice = mpx.optimizer_step(model, optimizer, state, result)
    assert same_bits(twice, scaling)
    assert (int(twice.steps), float(twice.loss_scale)) == (1, 4.0)


def test_clipped_gradients_by_replace():
    result = result_of(gradients(0), mpx.NoLossScaling())
    halved = result._replace(grads=jax.tree.map(lambda g: g / 2, result.grads))
    new, _, _ = first_step(optax.sgd(1.0), halved)
    close(jax.tree.map(jnp.subtract, weights(), new), halved.grads, 1e-5)


@pytest.mark.parametrize(
    "scaling",
    [mpx.NoLossScaling(), mpx.StaticLossScaling(4.0), mpx.DynamicLossScaling(4.0)],
    ids=["none", "static", "dynamic"],
)
def test_nan_is_skipped_with_every_scaling(scaling):
    """Rows 28 and 36."""
    optimizer, w = optax.adam(RATE), weights()
    result = result_of(gradients(0), scaling, finite=False)
    new, new_state, after = first_step(optimizer, result)
    assert same_bits((new, new_state), (w, optimizer.init(w)))
    assert (int(after.skipped), int(after.steps), int(after.bad_losses)) == (1, 1, 1)
    assert float(after.loss_scale) == scaling.loss_scale


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_without_a_scale_skips_nan(name):
    """Row 36: bfloat16 needs no scale, and is not left without the check."""
    warned = functools.partial(pytest.warns, UserWarning, match="float16 with")
    optimizer = optax.adam(RATE)
    policy = mpx.get_policy(f"params=float32,compute={name},output=float32")
    carry = (weights(), optimizer.init(weights()), mpx.NoLossScaling())

    @jax.jit
    def step(w, state, scaling, x, y):
        result = mpx.filter_grad(loss, scaling, policy=policy)(w, x, y)
        return mpx.optimizer_step(w, optimizer, state, result)

    x, y = batch()
    with warned() if name == "float16" else contextlib.nullcontext():
        good = step(*carry, x, y)
    bad = step(*good, x.at[0, 0].set(jnp.nan), y)
    assert same_bits(bad[:2], good[:2]) and not same_bits(good[0], carry[0])
    assert (int(bad[2].steps), int(bad[2].skipped)) == (2, 1)
    assert float(bad[2].loss_scale) == 1.0


def test_no_check_of_a_step_runs_on_the_host():
    """Row 35, over the whole step with every check: no callback, and no branch."""
    optimizer = optax.adam(RATE)
    checks = {"check_gradients": True, "check_update": True, "max_skipped_in_a_row": 3}

    def step(w, state, scaling, x, y):
        result = mpx.filter_value_and_grad(loss, scaling)(w, x, y)
        return mpx.optimizer_step(w, optimizer, state, result, **checks)

    args = (weights(), optimizer.init(weights()), mpx.DynamicLossScaling(), *batch())
    text = str(jax.make_jaxpr(step)(*args))
    for word in ("callback", "cond[", "while["):
        assert word not in text, word


@each_check
def test_adam_with_a_zero_gradient(check):
    """Its epsilon, 1e-8, is zero in float16: 0 / 0 for float16 weights."""
    optimizer = optax.adam(RATE)

    def step(w, policy):
        scaling = mpx.DynamicLossScaling()
        result = mpx.filter_grad(lambda w: total(w * 0), scaling, policy=policy)(w)
        # As an optimizer in half precision has it.
        result = result._replace(grads=result.grads.astype(w.dtype))
        return mpx.optimizer_step(
            w, optimizer, optimizer.init(w), result, check_update=check
        )

    w, _, scaling = step(jnp.ones(2), "params=float32,compute=float16,output=float32")
    assert same_bits(w, jnp.ones(2)) and int(scaling.skipped) == 0
    # float16 weights must be asked for, and then `check_update` keeps NaN out.
    w, _, scaling = step(jnp.ones(2, jnp.float16), "float16")
    assert bool(mpx.all_finite(w)) is check and int(scaling.skipped) == int(check)
    assert same_bits(w, jnp.ones(2, jnp.float16)) is check


@each_check
def test_gradients_broken_after_unscaling(check):
    """Row 32."""
    result = result_of(gradients(0), mpx.DynamicLossScaling(16.0, period=1))
    broken = result._replace(grads=gradients(0, np.nan))
    new, _, after = first_step(optax.sgd(RATE), broken, check_gradients=check)
    assert bool(mpx.all_finite(new)) is check
    assert same_bits(new, weights()) is check
    # As if it had never been good: counted once, backed off, not grown.
    assert float(after.loss_scale) == (8.0 if check else 32.0)
    assert (int(after.steps), int(after.skipped)) == (1, int(check))
    if check:
        with pytest.raises(FloatingPointError, match="w1"):
            mpx.check(after, weights(), max_skipped_in_a_row=0)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        (optax.sgd(1e30), 1e20),
        (optax.adam(RATE), 1e20),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)), 3e19),
    ],
    ids=["update", "state", "norm"],
)
@each_check
def test_overflow_in_the_update(optimizer, size, check):
    """Row 38: finite gradients whose update, state or norm overflows."""
    grads = jax.tree.map(lambda w: jnp.full(w.shape, size), weights())
    result = result_of(grads, mpx.DynamicLossScaling(1.0, 2.0**-4))
    assert bool(result.finite)
    new, new_state, after = first_step(optimizer, result, check_update=check)
    assert int(after.skipped) == int(check)
    if check:
        assert same_bits((new, new_state), (weights(), optimizer.init(weights())))
        assert float(after.loss_scale) == 0.5


def test_check_update_lets_good_steps_pass():
    """A state that starts infinite is no overflow."""
    result = result_of(gradients(0), mpx.NoLossScaling())
    extra = {"value": result.value, "grad": result.grads}
    extra["value_fn"] = lambda w: sum(total(x**2) for x in jax.tree.leaves(w))
    step = functools.partial(first_step, optax.lbfgs(), check_update=True, **extra)
    _, _, after = jax.jit(step)(result)
    assert int(after.skipped) == 0


def test_too_many_skips_halt_the_run():
    """Row 29: nothing changes any more, and the host is told."""
    optimizer = optax.adam(RATE)

    def step(run, finite):
        model, state, scaling = run
        result = result_of(gradients(0), scaling, finite)
        return mpx.optimizer_step(
            model, optimizer, state, result, max_skipped_in_a_row=2
        )

    run = weights(), optimizer.init(weights()), mpx.NoLossScaling()
    for finite in (True, False, False):
        run = step(run, finite)
    mpx.check(run[2], run[0])
    halted = run[:2]
    for finite in (False, True, True):
        run = step(run, finite)
        assert bool(run[2].record.halted)
        with pytest.raises(FloatingPointError, match=r"step 4\b.*halted.*a row: 3"):
            mpx.check(run[2], run[0])
    assert same_bits(run[:2], halted)
    # A checkpoint of it would halt after the restart, too.
    with pytest.raises(FloatingPointError, match=r"has halted.*`scaling.resumed\(\)`"):
        mpx.guard(run)
    scaling = mpx.guard(run[2].resumed())
    mpx.check(scaling, run[0])
    assert int(scaling.record.skipped) == 3 and int(scaling.record.steps) == 4
    model, _, scaling = step((*halted, scaling), True)
    assert not same_bits(model, halted[0]) and int(scaling.record.steps) == 5


def test_check_names_step_scale_and_leaves():
    """Row 9: a bad step at the floor."""
    scaling = mpx.DynamicLossScaling(2.0, 1.0)
    optimizer = optax.sgd(RATE)

    def fun(w):
        return total(w["a"]) + total(jnp.sqrt(w["b"] - 1)) + total(w["c"])

    w = {name: jnp.ones(2) for name in "abc"}
    state = optimizer.init(w)
    for _ in range(2):
        mpx.check(scaling, w)
        result = mpx.filter_grad(fun, scaling)(w)
        w, state, scaling = mpx.optimizer_step(w, optimizer, state, result)
    with pytest.raises(FloatingPointError) as error:
        mpx.check(scaling, w)
    text = str(error.value)
    assert "step 2, loss scale 1: " in text and "floor" in text and "['b']" in text
    assert "['a']" not in text and "`the loss`" not in text
    assert "last finite step: none" in text
    with pytest.raises(FloatingPointError, match="gradient leaf 1 .*pass `model`"):
        mpx.check(scaling)


MIXED = {
    "a": np.ones(2, np.float32),
    "b": jnp.ones(2),
    "c": 1.0,
    "d": None,
    "e": jnp.tanh,
    "f": jnp.arange(3),
    "g": jnp.ones((2, 2)),
    "h": "text",
}


@pytest.mark.parametrize("culprit", ["b", "g"])
@pytest.mark.parametrize("jit", [False, True])
def test_check_names_the_leaf_in_a_model_of_all_kinds(culprit, jit):
    """Numpy's arrays have a gradient under jit, where they are traced, and not else."""

    def fun(model):
        value = total(model["b"]) + total(model["g"]) + total(jnp.asarray(model["a"]))
        return value + total(jnp.sqrt(model[culprit] - 1))

    step = lambda s, m: mpx.filter_grad(fun, s)(m)  # noqa: E731
    step = eqx.filter_jit(step) if jit else step
    result = step(mpx.DynamicLossScaling(1.0), MIXED)
    for model in (MIXED, result.grads, jax.device_get(result.grads)):
        match = rf"last skipped step: `\['{culprit}'\]`"
        with pytest.raises(FloatingPointError, match=match):
            mpx.check(result.scaling, model)
    with pytest.raises(FloatingPointError, match="is not the differentiated tree"):
        mpx.check(result.scaling, {"b": jnp.ones(2)})


def test_check_names_numbers_that_were_differentiated():
    fun = lambda w: total(w["a"] * w["b"]) + total(jnp.sqrt(w["c"] - 1))  # noqa: E731
    w = {"a": np.float32(1.0), "b": 2.0, "c": 1.0}
    result = mpx.grad(fun, mpx.DynamicLossScaling(1.0))(w)
    with pytest.raises(FloatingPointError, match=r"last skipped step: `\['c'\]`"):
        mpx.check(result.scaling, w)


def test_check_names_weights_in_eight_bits():
    ones = jnp.ones((2, 2))
    model = mpx.quantization.quantize_weights({"a": ones, "b": ones})
    model |= {"c": jnp.ones(2)}

    def fun(model):
        return total(model["a"]) + total(model["c"]) + total(jnp.sqrt(model["b"] - 1))

    step = eqx.filter_jit(lambda s, model: mpx.filter_grad(fun, s)(model))
    result = step(mpx.DynamicLossScaling(1.0), model)
    with pytest.raises(FloatingPointError, match=r"last skipped step: `\['b'\]`"):
        mpx.check(result.scaling, model)


def test_check_names_what_the_update_broke():
    result = result_of(gradients(0), mpx.DynamicLossScaling(1.0))
    # Of one number that float32 does not hold NumPy may warn: JAX casts either by it or
    # by itself, by what has run before.
    optimizer = optax.chain(optax.sgd(1e30), optax.scale(1e30))
    *_, scaling = first_step(optimizer, result, check_update=True)
    match = "the optimizer's state, the new weights"
    with pytest.raises(FloatingPointError, match=match):
        mpx.check(scaling, weights())


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
@pytest.mark.parametrize("make", [mpx.DynamicLossScaling, mpx.StaticLossScaling])
def test_check_finds_a_scale_with_which_no_step_can_be_good(make, value):
    scaling = eqx.tree_at(lambda s: s.loss_scaling, make(8.0), jnp.float32(value))
    with pytest.raises(FloatingPointError, match="must be a positive|min_loss_scaling"):
        mpx.check(scaling)


def test_check_takes_no_scaling_and_one_without_memory():
    mpx.check(None)
    mpx.check(mpx.NoLossScaling())


def test_model_state_of_a_skipped_step():
    """Row 39: batch statistics are kept from before, keys and data advance."""

    @jax.jit
    def step(w, stats, key, scaling, x):
        def fun(w, stats, key, x):
            key, use = jax.random.split(key)
            noise = jax.random.uniform(use, x.shape).astype(x.dtype)
            mean = 0.9 * stats + 0.1 * x.astype(jnp.float32).mean()
            return total(w * (x + noise)), (mean, key)

        result = mpx.filter_grad(fun, scaling, has_aux=True, keep=lambda path, _: path
                                 == "args[1]")(w, stats, key, x)  # fmt: skip
        new_stats, key = result.aux
        stats = mpx.select_tree(result.finite, new_stats, stats)
        return stats, key, result.scaling

    stats, key, scaling = jnp.float32(1), jax.random.key(0), mpx.DynamicLossScaling(4.0)
    good, key_1, scaling = step(jnp.ones(2), stats, key, scaling, jnp.ones(2))
    x = jnp.array([1.0, jnp.inf])
    bad, key_2, scaling = step(jnp.ones(2), good, key_1, scaling, x)
    assert float(good) == 1.0 and same_bits(bad, good) and int(scaling.skipped) == 1
    keys = {tuple(jax.random.key_data(k).tolist()) for k in (key, key_1, key_2)}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("kind", "checks"), [("float16", {"check_gradients": True}), ("delayed", {})]
)
def test_a_step_that_the_user_skips_is_counted_and_teaches_nothing(kind, checks):
    """Weights stayed, and growth, histories and counters went on."""
    options = {"dtype": "float16"} if kind == "float16" else {}
    if kind == "delayed":
        options["recipe"] = mpx.DelayedScaling(amax_history_len=4)

    @functools.partial(mpx.autocast, **options)
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w[0]) @ w[1])

    optimizer = optax.adam(RATE)
    w, x = [jnp.full((16, 16), 0.1), jnp.ones((16, 4))], jnp.ones((8, 16))
    scaling = mpx.init_scaling(loss, w, x)
    if kind == "float16":
        scaling = mpx.DynamicLossScaling(8.0, period=2)

    @jax.jit
    def step(w, state, scaling, x, keep):
        result = mpx.filter_grad(loss, scaling)(w, x)
        result = result._replace(finite=keep)
        return mpx.optimizer_step(w, optimizer, state, result, **checks)

    first = step(w, optimizer.init(w), scaling, x, True)
    after = step(*first, 2 * x, False)
    assert same_bits(first[:2], after[:2])
    record = after[2].record
    assert (int(record.steps), int(record.skipped), int(record.last_bad)) == (2, 1, 0)
    assert after[2].loss_scale == first[2].loss_scale
    if kind == "delayed":
        assert same_bits(after[2].scales, first[2].scales)
    mpx.guard(after[2])
    # Nothing but the counters has changed, so the next step is as the second was.
    for a, b in zip(step(*after, x, True)[:2], step(*first, x, True)[:2], strict=True):
        assert same_bits(a, b)
    # And a bad step is bad, whatever is said.
    _, _, bad = step(*after, x * jnp.inf, True)
    assert int(bad.record.skipped) == 2 and int(bad.record.last_bad) == 3
