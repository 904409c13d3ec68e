"""`mpx.autocast(..., enabled=config.mixed)`: off means float32, everywhere."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
import mpx.nn

from .counting import count_products

W, X = jnp.eye(4), jnp.ones((2, 4))
OFF = functools.partial(mpx.autocast, enabled=False)


def loss(w, x):
    return jnp.mean(x @ w)


def products(func, *args):
    return set(count_products(func, *(args or (W, X))))


F32, BF16, F16 = (("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2)


def test_the_program_is_the_one_that_was_written():
    plain = str(jax.make_jaxpr(loss)(W, X))
    for func in (OFF(loss), OFF(loss, jnp.float16), OFF(loss, rules=mpx.Rules())):
        assert str(jax.make_jaxpr(func)(W, X)) == plain
    assert OFF(loss).__name__ == "loss"


def test_values_may_decide_what_runs():
    """Nothing is traced that would not be anyway."""
    func = OFF(lambda w, x: loss(w, x) if x.sum() > 0 else w.sum())
    assert func(W, X) == 1


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("grad", [mpx.filter_grad, mpx.grad])
def test_gradient_functions_cast_nothing(grad, half):
    with mpx.half_precision(half):
        func = OFF(loss, jnp.float16)
        step = lambda w, x: grad(func, mpx.NoLossScaling())(w, x).grads  # noqa: E731
        assert products(step) == {F32}
        assert type(mpx.init_scaling(func, W, X)) is mpx.NoLossScaling


def test_a_switch_changes_the_precision_and_nothing_else():
    def step(w, x, *, is_mixed):
        func = mpx.autocast(loss, jnp.float16, enabled=is_mixed)
        scaling = mpx.init_scaling(func, w, x)
        return mpx.filter_value_and_grad(func, scaling)(w, x).grads

    assert products(functools.partial(step, is_mixed=True)) == {F16}
    assert products(functools.partial(step, is_mixed=False)) == {F32}


def test_hidden_in_a_lambda_it_is_not_cast_in_silence():
    hidden = lambda w, x: OFF(loss)(w, x)  # noqa: E731
    with pytest.raises(ValueError, match='needs uncast inputs.*policy="full"'):
        mpx.filter_grad(hidden, mpx.DynamicLossScaling())(W, X)


@pytest.mark.parametrize(
    "region", [{"enabled": False}, {"recipe": None}, {"dtype": "float16"}]
)
def test_regions_inside_have_no_effect(region):
    def func(w, x):
        with mpx.autocast(**region):
            x = x @ w
        return jnp.mean(x @ w)

    assert products(OFF(func)) == {F32}
    assert products(jax.jit(OFF(func))) == {F32}
    control = mpx.filter_grad(mpx.autocast(func), None, use_mixed_precision=False)
    assert products(lambda w, x: control(w, x).grads) == {F32}
    with mpx.autocast(enabled=False, ambient=True):
        assert products(mpx.autocast(func)) == {F32}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_region_inside_that_says_enabled_wins(wrap):
    """As PyTorch has it: the innermost one decides."""

    def func(w, x):
        x = x @ w
        with mpx.autocast(enabled=True, dtype=jnp.float16):
            y = x @ w
        return jnp.mean(y.astype(jnp.float32) @ w)

    # In front of the region nothing is known of it yet, and products may stand there
    # twice, once without use.
    assert count_products(OFF(wrap(func)), W, X)[F16] == 1
    assert count_products(OFF(wrap(func)), W, X)[F32] in (2, 3)
    assert OFF(wrap(func))(W, X) == 1
    with mpx.autocast(enabled=False, ambient=True):
        assert count_products(mpx.autocast(wrap(func)), W, X)[F16] == 1
    assert type(mpx.init_scaling(OFF(func), W, X)) is mpx.DynamicLossScaling
    control = mpx.filter_grad(OFF(func), None, use_mixed_precision=False)
    assert products(lambda w, x: control(w, x).grads) == {F32}


def test_functions_inside_have_their_own_switch():
    inner = mpx.autocast(loss)
    assert products(OFF(lambda w, x: inner(w, x))) == {BF16}
    off = OFF(loss)
    outer = mpx.autocast(lambda w, x: off(w, x @ w))
    assert count_products(outer, W, X) == {F32: 1, BF16: 1}

    @mpx.autocast(enabled=False)
    def decorated(w, x):
        return loss(w, x)

    assert count_products(mpx.autocast(lambda w, x: decorated(w, x @ w)), W, X) == {
        F32: 1,
        BF16: 1,
    }


def test_the_control_is_full_precision_whatever_was_said():
    func = mpx.autocast(loss, jnp.float16, enabled=True)
    control = mpx.filter_grad(func, None, use_mixed_precision=False)
    assert products(lambda w, x: control(w, x).grads) == {F32}


def test_recipes_are_off_too():
    recipe = mpx.Float8CurrentScaling()
    w, x = jnp.eye(16), jnp.ones((16, 16))
    assert OFF(loss, recipe=recipe)(w, x) == loss(w, x)
    layer = mpx.nn.Linear(16, 16, key=jax.random.key(0))

    def with_layer(layer, x):
        with mpx.autocast(recipe=recipe, ambient=True):
            return layer(x).sum()

    def count_low(func):
        return str(jax.make_jaxpr(func)(layer, x)).count("f8_e4m3")

    assert count_low(with_layer) and not count_low(OFF(with_layer))
    control = mpx.filter_grad(with_layer, None, use_mixed_precision=False)
    assert not count_low(lambda layer, x: control(layer, x).grads.weight)
    # A recipe with a state has none, and needs none.
    delayed = OFF(loss, recipe=mpx.DelayedScaling())
    assert type(mpx.init_scaling(delayed, w, x)) is mpx.NoLossScaling
    assert delayed(w, x) == loss(w, x)


@pytest.mark.slow
def test_weights_in_eight_bits():
    model = mpx.quantization.quantize_weights({"w": jnp.eye(64)})
    func = lambda model, x: jnp.mean(x @ model["w"])  # noqa: E731
    x = jnp.ones((2, 64))
    assert OFF(func)(model, x) == 1
    grads = mpx.filter_grad(OFF(func), mpx.NoLossScaling())(model, x).grads
    assert grads["w"].dtype == jnp.float32


def test_modules():
    module = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    off = mpx.autocast(module, enabled=False)
    np.testing.assert_array_equal(off(X[0]), module(X[0]))


@pytest.mark.third_party
def test_objects_of_nnx_change_as_ever():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    OFF(lambda model, x: model(x))(model, X)
    assert model.mean[...].tolist() == pytest.approx([0.01] * 4)

    def func(model, x):
        with mpx.autocast(enabled=True):
            return model(x)

    with pytest.raises(ValueError, match="enabled=False.*NNX objects"):
        OFF(func)(model, X)


def test_a_report_of_it_is_that_of_the_function():
    off, written = mpx.explain(OFF(loss))(W, X), mpx.explain(loss)(W, X)
    assert str(off) == str(written) and off.totals == written.totals
