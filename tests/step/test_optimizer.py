"""The end of a training step: updates and skips."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx

from .cases import FLOAT16, batch, close, loss, params, same_bits, total

# Optax's Adam and others mix dtypes.
pytestmark = pytest.mark.third_party

RATE = 0.1
TRANSFORMATIONS = {
    "sgd": optax.sgd(RATE),
    "momentum": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optax.adam(RATE),
    "adamw": optax.adamw(RATE, weight_decay=0.1),
    "adam_bfloat16": optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "lamb": optax.lamb(RATE),
    "lion": optax.lion(RATE),
    "rmsprop": optax.rmsprop(RATE, centered=True),
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=2),
    "adagrad": optax.adagrad(RATE),
    "novograd": optax.novograd(RATE),
    "radam": optax.radam(RATE),
    "yogi": optax.yogi(RATE),
    "clip_schedule": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adam(optax.cosine_decay_schedule(RATE, 10)),
    ),
    "multi_steps": optax.MultiSteps(optax.adam(RATE), 2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(RATE)),
    "ema": optax.chain(optax.sgd(RATE), optax.ema(0.9)),
}
every_transformation = pytest.mark.parametrize(
    "optimizer", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS
)


def weights():
    """Weights with signed zeros, which adding zero would change."""
    w = params()
    return {**w, "b1": jnp.array([0.0, -0.0, 1e-38, -1.0])}


def gradients(seed, bad=None):
    random = np.random.default_rng(seed)
    leaves, tree = jax.tree.flatten(weights())
    leaves = [random.normal(size=w.shape).astype(np.float32) for w in leaves]
    if bad is not None:
        leaves[1][0, 0] = bad
    return jax.tree.unflatten(tree, map(jnp.asarray, leaves))


def raw(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


@every_transformation
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_step_changes_no_bit(optimizer, bad):
    """Row 13: weights and every leaf of the state, -0.0 and counts included."""
    """Row 13: weights and every leaf of the state, -0.0 and counts included."""
    model, state = weights(), optimizer.init(weights())
    # Before any good step has moved the -0.0 among the weights.
    first = _update(optimizer, model, state, gradients(0, bad), jnp.asarray(False))
    assert same_bits(raw(first), raw((model, state)))
    for seed in range(3):
        grads = gradients(seed)
        new = _update(optimizer, model, state, grads, mpx.all_finite(grads))
        # A good step is that of plain Optax, up to how XLA fuses the two programs.
        close(raw(new), raw(_plain(optimizer, model, state, grads)), 1e-6)
        grads = gradients(seed, bad)
        kept = _update(optimizer, *new, grads, mpx.all_finite(grads))
        assert same_bits(raw(kept), raw(new))
        model, state = kept
    assert not same_bits(model, weights())


@functools.partial(jax.jit, static_argnums=0)
def _update(optimizer, model, state, grads, finite):
    return mpx.optimizer_update(model, optimizer, state, grads, finite)


@functools.partial(jax.jit, static_argnums=0)
def _plain(optimizer, model, state, grads):
    updates, state = optimizer.update(grads, state, model)
    return optax.apply_updates(model, updates), state


@pytest.mark.parametrize(
    "name", ["momentum", "adam", "adafactor", "clip_schedule", "multi_steps", "noise"]
)
def test_skip_nonfinite_wraps_any_transformation(name):
    optimizer = TRANSFORMATIONS[name]
    wrapped = mpx.skip_nonfinite(optimizer)
    model, state = weights(), wrapped.init(weights())
    plain, plain_state = weights(), optimizer.init(weights())
    for seed, bad in enumerate([None, np.nan, np.inf, None]):
        grads = gradients(seed, bad)
        before = model
        model, state = _plain(wrapped, model, state, grads)
        if bad is None:
            plain, plain_state = _plain(optimizer, plain, plain_state, grads)
        else:
            assert same_bits(model, before)
        close(model, plain, 1e-6)
    record = state.record
    assert (int(record.steps), int(record.skipped)) == (4, 2)
    assert (int(record.skipped_in_a_row), int(record.last_finite)) == (0, 4)
    close(*(jax.tree.map(lambda x: x + 0.0, raw(s)) for s in
            (state.inner_state, plain_state)), 1e-6)  # fmt: skip


def test_skip_nonfinite_never_gives_in():
    """`optax.apply_if_finite` applies the NaN after its limit."""
    wrapped = mpx.skip_nonfinite(optax.sgd(RATE))
    # Optax adds the update, and what XLA adds to a subnormal number makes it zero.
    start = {**weights(), "b1": jnp.array([0.0, -0.0, 1e-37, -1.0])}
    model, state = start, wrapped.init(start)
    for seed in range(20):
        model, state = _plain(wrapped, model, state, gradients(seed, np.nan))
    assert same_bits(model, start)
    with pytest.raises(FloatingPointError, match="more than 10 .*step"):
        mpx.check(state, max_skipped_in_a_row=10)


def line_search_step(optimizer, fun):
    """A step of an optimizer that asks for values, as Optax's documentation has it."""

    @jax.jit
    def step(w, state):
        value, grad = jax.value_and_grad(fun)(w)
        extra = {"value": value, "grad": grad, "value_fn": fun}
        updates, state = optimizer.update(grad, state, w, **extra)
        return optax.apply_updates(w, updates), state

    return step


@pytest.mark.slow
def test_skip_nonfinite_in_a_chain_with_extra_arguments():
    wrapped = optax.chain(optax.scale(2.0), mpx.skip_nonfinite(optax.sgd(RATE)))
    state = wrapped.init(jnp.ones(2))
    updates, _ = wrapped.update(jnp.ones(2), state, jnp.ones(2))
    close(updates, jnp.full(2, -0.2), 1e-6)
    lbfgs = mpx.skip_nonfinite(optax.lbfgs())
    fun = lambda w: total((w - 3) ** 2)  # noqa: E731

    step = line_search_step(lbfgs, fun)
    w, state = jnp.ones(2), lbfgs.init(jnp.ones(2))
    for _ in range(3):
        w, state = step(w, state)
    close(w, jnp.full(2, 3.0), 1e-4)


@pytest.mark.slow
def test_lbfgs():
    """Row 37: extra arguments are passed on, and a skip keeps the whole memory."""
    optimizer = optax.lbfgs(memory_size=3)

    def fun(w):
        return total((w - jnp.array([1.0, 2.0])) ** 4)

    @jax.jit
    def step(w, state, scaling, poison):
        value, grad = jax.value_and_grad(fun)(w)
        poisoned = lambda w: fun(w) + total(w * poison)  # noqa: E731
        result = mpx.value_and_grad(poisoned, scaling, policy="float32")(w)
        extra = {"value": value, "grad": grad, "value_fn": fun}
        return mpx.optimizer_step(w, optimizer, state, result, **extra)

    plain_step = line_search_step(optimizer, fun)
    w, state = jnp.zeros(2), optimizer.init(jnp.zeros(2))
    scaling = mpx.NoLossScaling()
    plain, plain_state = w, state
    for _ in range(4):
        w, state, scaling = step(w, state, scaling, 0.0)
        plain, plain_state = plain_step(plain, plain_state)
    close(w, plain, 1e-3)
    kept, kept_state, scaling = step(w, state, scaling, jnp.nan)
    assert same_bits(kept, w) and same_bits(kept_state, state)
    assert int(scaling.skipped) == 1


def test_step_is_gradient_update_and_scaling_in_one():
    @jax.jit
    def step(w, state, scaling, x, y):
        result = mpx.filter_value_and_grad(loss, scaling, policy=FLOAT16)(w, x, y)
        parts = mpx.optimizer_update(w, optimizer, state, result.grads, result.finite)
        return mpx.optimizer_step(w, optimizer, state, result), (*parts, result.scaling)

    optimizer = optax.adam(RATE)
    w, (x, y) = weights(), batch()
    carry = (w, optimizer.init(w), mpx.DynamicLossScaling(2.0**7, period=2))
    for bad in (False, True, False, False):
        carry, parts = step(*carry, jnp.where(bad, jnp.nan, x), y)
        assert same_bits(carry, parts)
    assert int(carry[2].steps) == 4 and int(carry[2].skipped) == 1
    # The second good step is the third in all: a bad batch does not count.
    assert float(carry[2].loss_scale) == 2.0**8


def test_donated_buffers():
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(w, state, scaling, x, y):
        result = mpx.filter_grad(loss, scaling, policy=FLOAT16)(w, x, y)
        return mpx.optimizer_step(w, optimizer, state, result)

    optimizer = optax.adam(RATE)
    w, (x, y) = weights(), batch()
    scaling = mpx.DynamicLossScaling(2.0**7)
    carry = (w, optimizer.init(w), scaling)
    for _ in range(3):
        carry = step(*carry, x, y)
    assert int(carry[2].steps) == 3 and scaling.record.steps.is_deleted()
    # A new state is not made of buffers that are gone.
    assert float(mpx.DynamicLossScaling(2.0**7).loss_scale) == 2.0**7


def test_only_trained_leaves_change():
    model = {"w": jnp.ones(2), "n": jnp.arange(2), "f": jnp.tanh, "frozen": jnp.ones(2)}
    grads = {"w": jnp.ones(2), "n": None, "f": None, "frozen": None}
    optimizer = optax.sgd(0.5)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    new, _ = mpx.optimizer_update(model, optimizer, state, grads, True)
    assert new["w"].tolist() == [0.5, 0.5]
    assert new["f"] is jnp.tanh and new["frozen"].tolist() == [1, 1]


@pytest.mark.parametrize("wrap", [lambda tx: tx, mpx.skip_nonfinite])
def test_moments_of_half_precision_weights_keep_their_dtype(wrap):
    """Gradients are float32; the moments began like the weights."""
    model = {"w": jnp.ones(4, jnp.bfloat16)}
    optimizer = wrap(optax.adam(RATE))
    state = optimizer.init(model)
    for _ in range(2):
        grads, before = {"w": jnp.ones(4)}, state
        model, state = mpx.optimizer_update(model, optimizer, state, grads, True)
        for old, new in zip(*map(jax.tree.leaves, (before, state)), strict=True):
            assert jnp.asarray(new).dtype == jnp.asarray(old).dtype
    assert model["w"].dtype == jnp.bfloat16
    assert abs(float(model["w"][0]) - (1 - 2 * RATE)) < 0.01


HALF = jnp.float32(0.5)
NUMBERS = {
    "float": (1.0, HALF, "the weight float 1.0"),
    "int": (1, HALF, "the weight int 1"),
    "bool": (True, HALF, "the weight bool True"),
    "text": ("x", HALF, "the weight str 'x'"),
    "integers": (jnp.array(3), HALF, r"the weight int32\[\]"),
    "a number for a gradient": (jnp.ones(()), 0.5, "the gradient float 0.5"),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)])
def test_what_no_optimizer_can_update_is_named(name, optimizer):
    """Python's numbers, and integers, on which an update would have no effect."""
    weight, grad, what = NUMBERS[name]
    model, arrays = {"w": jnp.ones(2), "a": weight}, {"w": jnp.ones(2)}
    state = optimizer.init({**arrays, "a": jnp.ones(())})
    match = rf"floating-point arrays; got {what} at `\['a'\]`.*jnp.asarray"
    with pytest.raises(ValueError, match=match):
        mpx.optimizer_update(model, optimizer, state, {**arrays, "a": grad}, True)
    # Without a gradient they stay as they are.
    arrays["a"] = None
    state = optimizer.init(arrays)
    new, _ = mpx.optimizer_update(model, optimizer, state, arrays, True)
    assert type(new["a"]) is type(weight) and new["a"] == weight


def test_numbers_that_were_differentiated_are_named():
    """`mpx.grad` makes arrays of them; the model still holds the numbers."""
    model, optimizer = {"w": jnp.ones(2), "a": 1.0}, optax.sgd(0.1)
    grad = mpx.grad(lambda m: jnp.sum(m["w"]) * m["a"], mpx.DynamicLossScaling())
    result = grad(model)
    with pytest.raises(ValueError, match="`mpx.optimizer_step`.*weight float 1.0"):
        mpx.optimizer_step(model, optimizer, optimizer.init(model), result)
