"""Autocast in a training step: gradient functions, loss scaling, the steps around."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx

from ..helpers import unchecked_annotations
from .counting import relative_error

NONE = mpx.NoLossScaling()


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize(
    ("transform", "dtype"),
    [
        (mpx.filter_grad, "float16"),
        (mpx.filter_value_and_grad, "bfloat16"),
        (mpx.grad, "bfloat16"),
        (mpx.value_and_grad, "float16"),
    ],
)
def test_inputs_are_not_cast(inputs, dtype, transform):
    w, x = inputs
    seen = []

    def looking(w, x):
        seen.append((w.dtype.name, x.dtype.name))
        return loss(w, x)

    scaling = mpx.init_scaling(mpx.autocast(looking, dtype), w, x)
    result = transform(mpx.autocast(looking, dtype), scaling)(w, x)
    assert set(seen) == {("float32", "float32")}
    assert result.grads.dtype == jnp.float32 and bool(result.finite)
    tolerance = 5e-3 if dtype == "float16" else 4e-2
    assert relative_error(result.grads, jax.grad(loss)(w, x)) < tolerance


def test_scaled_gradients_of_ones_own(inputs):
    cast = mpx.autocast(loss, "float16")
    scaling = mpx.StaticLossScaling(64.0)
    value, grads = mpx.calculate_scaled_grad(cast, scaling)(*inputs)
    expected = jax.value_and_grad(loss)(*inputs)
    assert relative_error((value / 64.0, grads / 64.0), expected) < 5e-3


@pytest.mark.parametrize(
    "hide",
    [
        jax.jit,
        eqx.filter_jit,
        jax.checkpoint,
        functools.partial,
        lambda f: functools.partial(jax.jit(f)),
    ],
)
def test_it_is_seen_through_jit_and_partial(inputs, hide):
    result = mpx.filter_grad(hide(mpx.autocast(loss)), NONE)(*inputs)
    assert relative_error(result.grads, jax.grad(loss)(*inputs)) < 4e-2


def test_a_hidden_autocast_function_says_so(inputs):
    cast = mpx.autocast(loss)
    hidden = lambda w, x: cast(w, x)  # noqa: E731
    with pytest.raises(ValueError, match=r"`mpx.filter_grad` has cast them to float16"):
        mpx.filter_grad(hidden, NONE)(*inputs)
    result = mpx.filter_grad(hidden, NONE, policy="full")(*inputs)
    assert relative_error(result.grads, jax.grad(cast)(*inputs)) == 0
    assert relative_error(cast(*inputs), loss(*inputs)) < 1e-2  # and it is over


@pytest.mark.parametrize("option", [{"policy": "full"}, {"keep": lambda path, x: True}])
def test_options_about_casting_inputs_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"`{name}` of `mpx.filter_grad`"):
        mpx.filter_grad(mpx.autocast(loss), NONE, **option)


def test_micro_batches_and_retries(inputs):
    w, x = inputs
    cast = mpx.autocast(loss, "float16")
    scaling = mpx.DynamicLossScaling(2.0**15)
    result = mpx.filter_value_and_grad(cast, scaling, accumulate=2, retries=2)(w, x)
    assert relative_error(result.grads, jax.grad(loss)(w, x)) < 1e-2
    assert relative_error(result.value, loss(w, x)) < 1e-2


def test_the_scaling_that_a_function_needs(inputs):
    w, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs)
    half = jax.ShapeDtypeStruct(w.shape, jnp.float16)
    hidden = lambda w, x: mpx.autocast(loss, "float16")(w, x)  # noqa: E731
    half_step = lambda c, _: (jnp.tanh(c.astype("float16")).astype(c.dtype), None)  # noqa: E731
    in_scan = lambda w, x: jax.lax.scan(half_step, x @ w, length=2)[0]  # noqa: E731
    assert type(mpx.init_scaling(mpx.autocast(loss, "bfloat16"), w, x)) is type(NONE)
    for func, args in (
        (mpx.autocast(loss, "float16"), (w, x)),
        (jax.jit(mpx.autocast(loss, "float16")), (w, x)),
        (hidden, (w, x)),
        (in_scan, (w, x)),
        (loss, (w, x)),  # the explicit style
        (loss, (half, half)),
        (loss, inputs),
    ):
        assert type(mpx.init_scaling(func, *args)) is mpx.DynamicLossScaling
    with unchecked_annotations(), pytest.raises(TypeError, match="needs the function"):
        mpx.init_scaling(3)
