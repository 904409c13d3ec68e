"""Training under a recipe sees an overflow, and a bad step leaves no trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from .. import helpers
from ..autocast.counting import relative_error
from ..registries import RECIPES

WIDTH, BATCH = 128, 64
# And what the options of some change of how amaxes travel.
EACH = {
    **RECIPES,
    "warm": mpx.DelayedScaling(amax_history_len=4, warm_start=True),
    "dequantized": mpx.MXFP8BlockScaling(backward_override="dequantized"),
}
# The final projection, too, whose gradient is the first to overflow.
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))
QUICK = ("current", "delayed", "mxfp8")
# All others are slow.
each_recipe = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in EACH],
)


def loss(params, x, y):
    """Three layers: the products of the middle one are all seen by a gradient."""
    hidden = jax.nn.relu(x @ params["first"])
    hidden = jax.nn.relu(hidden @ params["second"])
    return jnp.mean(jnp.sum((hidden @ params["third"] - y) ** 2, -1))


@functools.cache
def batch_and_weights():
    keys = jax.random.split(jax.random.key(0), 5)
    w = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[:3]]
    x, y = (jax.random.normal(key, (BATCH, WIDTH)) for key in keys[3:])
    return dict(zip(("first", "second", "third"), w, strict=True)), x, y


@pytest.fixture
def inputs():
    return batch_and_weights()


@functools.cache
def step_of(name: str):
    func = mpx.autocast(loss, jnp.float16, recipe=EACH[name], rules=EVERY)

    @jax.jit
    def step(scaling, params, x, y):
        return mpx.filter_value_and_grad(func, scaling)(params, x, y)

    return func, step


def scaling_of(name: str, scale: float = 1.0):
    """A scaling that has seen a few good steps, at a scale."""
    return at_scale(good_scaling(name), scale)


@functools.cache
def good_scaling(name: str):
    (func, step), inputs = step_of(name), batch_and_weights()
    scaling = mpx.init_scaling(func, *inputs)
    for factor in (1.0, 2.0):
        params, x, y = inputs
        result = step(at_scale(scaling, 1.0), params, factor * x, y)
        assert bool(result.finite)
        scaling = result.scaling
    return scaling


def at_scale(scaling, scale: float):
    loss = mpx.DynamicLossScaling(scale, max_loss_scaling=2.0**30)
    return scaling.with_loss(loss)


def assert_skipped(before, result) -> None:
    assert not bool(result.finite)
    # A loss that is not finite is not the scale's fault.
    is_bad_loss = not bool(jnp.isfinite(result.value))
    counts = int(before.skipped) + 1, int(before.bad_losses) + is_bad_loss
    assert (int(result.scaling.skipped), int(result.scaling.bad_losses)) == counts
    fall = 1.0 if is_bad_loss else 0.5
    assert float(result.scaling.loss_scale) == float(before.loss_scale) * fall
    if isinstance(before, mpx.quantization.RecipeScaling):
        helpers.assert_same_bits(result.scaling.scales, before.scales)
        helpers.assert_same_bits(result.scaling.amaxes, before.amaxes)


@pytest.mark.parametrize("name", helpers.slow_but(["delayed", "mxfp8"], EACH))
def test_a_gradient_that_overflows_in_float16_is_seen(name: str, inputs):
    _, step = step_of(name)
    before = scaling_of(name)
    good = step(at_scale(before, 2.0**8), *inputs)
    assert bool(good.finite)
    for exponent in range(9, 27):
        scaled = at_scale(before, 2.0**exponent)
        result = step(scaled, *inputs)
        assert result.value == good.value  # the forward pass knows nothing of it
        if exponent < 20 and bool(result.finite):
            # Scales of delayed scaling are those of another loss scale.
            if not isinstance(scaled, mpx.quantization.RecipeScaling):
                assert relative_error(result.grads, good.grads) < 0.2
        else:
            assert_skipped(scaled, result)


@pytest.mark.parametrize(
    ("name", "size", "scale"),
    [
        ("current", 2.0**31, 1.0),
        ("warm", 1.0, 2.0**-24),
        ("nvfp4", 2.0**31, 1.0),
        ("current", 1.0, 2.0**-24),
    ],
)
def test_finite_gradients_are_good_however_large_and_at_any_scale(name, size, scale):
    """Their operands' largest magnitudes have a product of 2^62, and of 2^-24."""
    params, x, _ = batch_and_weights()
    w, x = params["first"], size * jnp.sign(x)

    @functools.partial(mpx.autocast, recipe=EACH[name], rules=EVERY)
    def loss(w, x):
        return jnp.sum(x @ w) * size

        return mpx.filter_value_and_grad(loss, scaling)(w, x)

    scaling = mpx.StaticLossScaling(scale)
    made = mpx.init_scaling(loss, w, x)
    if isinstance(made, mpx.quantization.RecipeScaling):
        scaling = made.with_loss(scaling)
    gradient = jax.jit(lambda s, *args: mpx.filter_value_and_grad(loss, s)(*args))
    result = gradient(scaling, w, x)
    assert bool(result.finite) and np.isfinite(result.grads).all()
    assert np.abs(result.grads).max() > size**2


@each_recipe
def test_what_is_not_finite_in_a_batch_or_a_weight_is_seen(name, inputs):
    _, step = step_of(name)
    params, x, y = inputs
    before = scaling_of(name, 8.0)
    for value in (np.inf, -np.inf, np.nan):
        assert_skipped(before, step(before, params, x.at[3, 5].set(value), y))
        for where in params:
            broken = {**params, where: params[where].at[3, 5].set(value)}
            assert_skipped(before, step(before, broken, x, y))


@each_recipe
def test_a_run_goes_on_as_if_the_bad_step_had_not_been(name: str, inputs):
    _, step = step_of(name)
    params, x, y = inputs
    before = scaling_of(name, 8.0)
    bad = step(before, params, jnp.full_like(x, jnp.inf), y).scaling
    again = at_scale(bad, 8.0)
    one, other = step(before, params, x, y), step(again, params, x, y)
    helpers.assert_same_bits(one.grads, other.grads)
    if isinstance(before, mpx.quantization.RecipeScaling):
        helpers.assert_same_bits(one.scaling.scales, other.scaling.scales)


@pytest.mark.slow
def test_attention_in_fp8_and_stored_weights(inputs):
    """The other ways into a product of low precision."""
    params, x, y = inputs
    recipe = mpx.Float8CurrentScaling(fp8_dpa=True)

    @functools.partial(mpx.autocast, dtype=jnp.float16, recipe=recipe)
    def attention(params, x, y):
        query, key, value = (x @ params[name] for name in ("first", "second", "third"))
        p = jax.nn.softmax((query @ key.T).astype(jnp.float32) / 8)
        return jnp.mean((p.astype(x.dtype) @ value - y) ** 2)

    step = jax.jit(lambda s, *args: mpx.filter_value_and_grad(attention, s)(*args, y))
    before = mpx.DynamicLossScaling(8.0)
    assert bool(step(before, params, x).finite)
    assert_skipped(before, step(before, params, x.at[3, 5].set(jnp.inf)))
    broken = {**params, "third": params["third"].at[3, 5].set(jnp.inf)}
    for weights in (broken, mpx.quantization.quantize_weights(broken)):
        assert_skipped(before, step(before, weights, x))
