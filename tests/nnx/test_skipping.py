"""A skipped step leaves every array of model and optimizer as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
import mpx.nnx

from ..helpers import slow_but, unscaled
from .cases import (
    BFLOAT16,
    FLOAT16,
    assert_equal,
    batch,
    compiled,
    full_step,
    loss_fn,
    make,
    mean,
    mpx_step,
    plain_step,
)

pytestmark = [pytest.mark.third_party, unscaled]


def copied(tree):
    """The state as values of its own, which later changes in place do not reach."""
    return jax.tree.map(jnp.copy, nnx.state(tree))


def half_step(policy):
    return lambda *args: mpx_step(*args, policy=policy)


def scale(value):
    return mpx.DynamicLossScaling(value, max_loss_scaling=2.0**120)


CASES = ("scale too high", "bfloat16", "float32")
# Each model and each case; the first three in `make test`.
BAD_STEPS = [
    ("scanned", CASES[0], True),
    ("normed", CASES[1], True),
    ("convolutional", CASES[2], True),
    ("normed", CASES[0], False),
    ("tied", CASES[2], True),
    ("convolutional", CASES[0], True),
    ("scanned", CASES[1], True),
]


@pytest.mark.parametrize(("name", "case", "jit"), slow_but(BAD_STEPS[:3], BAD_STEPS))
def test_a_bad_step_leaves_everything_as_it_was(name, case, jit):
    step, kept, scaling = {
        "scale too high": (half_step(FLOAT16), scale(2.0**4), scale(2.0**120)),
        "bfloat16": (half_step(BFLOAT16), mpx.NoLossScaling(), mpx.NoLossScaling()),
        "float32": (full_step, mpx.NoLossScaling(), mpx.NoLossScaling()),
    }[case]
    step = nnx.jit(step) if jit else step
    model, optimizer = make(name)
    _, _, _, good = step(model, optimizer, kept, *batch(0))
    assert int(optimizer.step[...]) == 1 and bool(good.finite)
    before = copied((model, optimizer))
    x, y = batch(1)
    if case != "scale too high":
        x = x.at[3, 1].set(jnp.inf)
    value, _, _, scaling = step(model, optimizer, scaling, x, y)
    assert not bool(scaling.finite) and int(scaling.skipped) == 1
    assert bool(jnp.isfinite(value)) == (case == "scale too high")
    assert_equal(nnx.state((model, optimizer)), before)
    # The next step is the one that would have come without the bad batch.
    other = make(name)
    for seed in (0, 2):
        step(*other, kept, *batch(seed))
    step(model, optimizer, kept, *batch(2))
    assert_equal(nnx.state((model, optimizer)), nnx.state(other), 1e-6)


@pytest.mark.slow
def test_without_skipping_everything_is_kept():
    """As NNX does: the statistics of a bad batch stay."""
    (a, optimizer_a), (b, optimizer_b) = make("normed"), make("normed")
    x, y = batch(1)
    x = x.at[3, 1].set(jnp.inf)
    plain_step(a, optimizer_a, None, x, y)
    full_step(b, optimizer_b, mpx.NoLossScaling(skip=False), x, y)
    assert_equal(nnx.state((b, optimizer_b)), nnx.state((a, optimizer_a)))
    assert not np.isfinite(b.norm.mean[...]).all()
    assert int(optimizer_b.step[...]) == 1


def test_what_held_no_array_before_stays_changed():
    class Changing(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(3))
            self.mode = "train"
            self.empty = nnx.Variable(None)
            self.number = nnx.Variable(3)

    def loss(model, x):
        model.mode = "changed"
        model.hidden = nnx.Intermediate(x)
        model.empty.set_value(x)
        model.number.set_value(4)
        model.weight[...] = model.weight[...] + 1
        return jnp.sum(model.weight[...] * x)

    model = Changing()
    result = mpx.nnx.grad(loss, mpx.NoLossScaling())(model, jnp.array([1, jnp.inf, 1]))
    assert not bool(result.finite)
    assert model.mode == "changed" and model.number.get_value() == 4
    assert model.hidden[...].shape == model.empty[...].shape == (3,)
    np.testing.assert_array_equal(model.weight[...], jnp.ones(3))
    result = mpx.nnx.grad(loss, mpx.NoLossScaling())(model, jnp.ones(3))
    np.testing.assert_array_equal(model.weight[...], jnp.full(3, 2.0))


def test_negative_zero_and_buffers_that_are_donated():
    model, optimizer = make("normed", optax.sgd(0.0))
    model.head.bias[...] = jnp.full((1,), -0.0)
    step = nnx.jit(full_step, donate_argnums=(0, 1, 2))
    scaling = mpx.NoLossScaling()
    for seed, factor in ((0, jnp.inf), (1, 1.0), (2, jnp.inf)):
        x, y = batch(seed)
        *_, scaling = step(model, optimizer, scaling, x * factor, y)
        if seed == 0:
            assert np.signbit(model.head.bias[...]).all()
    assert int(scaling.skipped) == 2 and int(optimizer.step[...]) == 1
    assert int(model.calls[...]) == 1


@pytest.mark.parametrize("finite", [True, False, np.bool_(True), "array"])
def test_update_takes_any_boolean(finite):
    model, optimizer = make("tied", optax.sgd(0.5))
    before = copied((model, optimizer))
    grads = nnx.jit(nnx.grad(lambda m, x, y: loss_fn(m, x, y)[0]))(model, *batch(0))
    given = jnp.array(False) if finite == "array" else finite
    assert mpx.nnx.update(optimizer, model, grads, given) is None
    if finite == "array" or not finite:
        assert_equal(nnx.state((model, optimizer)), before)
    else:
        expected = before[0]["head"]["bias"][...] - 0.5 * grads["head"]["bias"][...]
        np.testing.assert_array_equal(model.head.bias[...], expected)
        assert int(optimizer.step[...]) == 1


def test_update_calls_the_optimizers_own_update():
    class Clamped(nnx.Optimizer):
        def update(self, model, grads, /, **kwargs):
            super().update(model, grads, **kwargs)
            weights = nnx.state(model, self.wrt)
            nnx.update(model, jax.tree.map(lambda w: jnp.clip(w, -0.1, 0.1), weights))
            self.calls[...] += 1

    def train(step):
        model, _ = make("tied")
        optimizer = Clamped(model, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        nnx.jit(step)(model, optimizer, mpx.NoLossScaling(), *batch(0))
        return nnx.state((model, optimizer))

    expected = train(plain_step)
    assert_equal(train(full_step), expected)
    assert int(expected[1]["calls"][...]) == 1


def test_update_passes_arguments_on():
    plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5, cooldown=0)
    model, optimizer = make("tied", optax.chain(optax.sgd(0.1), plateau))
    options = {"has_aux": True, "use_mixed_precision": False}
    gradient = compiled(mpx.nnx.value_and_grad, loss_fn, mpx.NoLossScaling(), **options)
    result = gradient(model, *batch(0))

    @nnx.jit
    def update(optimizer, model, result, finite):
        mpx.nnx.update(optimizer, model, result.grads, finite, value=result.value)

    for finite in (True, True, False, True):
        update(optimizer, model, result, finite)
    state = nnx.state(optimizer)["opt_state"][1]
    assert int(optimizer.step[...]) == 3
    assert float(state["scale"][...]) < 1


@pytest.mark.filterwarnings("ignore:.*ModelAndOptimizer.*:DeprecationWarning")
def test_a_model_that_the_optimizer_holds():
    model, _ = make("normed")
    both = nnx.ModelAndOptimizer(model, optax.adam(1e-2))

    @nnx.jit
    def good_and_bad_step(both, model, x, y):
        _, _, grads, _ = full_step(model, both, mpx.NoLossScaling(), x, y)
        mpx.nnx.update(both, model, grads, False)

    good_and_bad_step(both, model, *batch(0))
    other, optimizer = make("normed")
    nnx.jit(plain_step)(other, optimizer, None, *batch(0))
    assert_equal(nnx.state(model), nnx.state(other))
    assert both.model is model and int(both.step[...]) == 1


def test_two_modules_with_an_optimizer_each():
    """One decision for both: a gradient that overflows in one skips both."""
    (encoder, first), (decoder, second) = make("tied"), make("normed", seed=1)

    def loss(encoder, decoder, x):
        return mean(encoder(x)) + mean(decoder(x))

    @nnx.jit
    def step(encoder, decoder, first, second, scaling, x):
        options = {"argnums": (0, 1), "use_mixed_precision": False}
        gradient = mpx.nnx.value_and_grad(loss, scaling, **options)
        result = gradient(encoder, decoder, x)
        mpx.nnx.update(first, encoder, result.grads[0], result.finite)
        mpx.nnx.update(second, decoder, result.grads[1], result.finite)
        return result.scaling

    nodes = (encoder, decoder, first, second)
    scaling = step(*nodes, mpx.NoLossScaling(), batch(0)[0])
    before = copied(nodes)
    decoder.head.bias[...] = jnp.full((1,), jnp.inf)
    scaling = step(*nodes, scaling, batch(1)[0])
    decoder.head.bias[...] = before[1]["head"]["bias"][...]
    assert int(scaling.skipped) == 1 and int(first.step[...]) == 1
    assert_equal(nnx.state(nodes), before)
