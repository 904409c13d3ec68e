"""In which order a step asks the compiler to compute, and what it leaves to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from tests.autocast.counting import equations


def loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


W, X = jnp.eye(4), jnp.arange(8.0).reshape(2, 4) / 8


def gradient_of(func, *args):
    call = mpx.filter_value_and_grad(func, mpx.NoLossScaling(), policy="float32")
    return call(*args)


def gradient(w, x):
    return gradient_of(loss, w, x)


def test_the_loss_is_computed_before_the_backward_pass():
    jaxpr = jax.make_jaxpr(lambda w, x: gradient(w, x)[:2])(W, X)
    barriers = [
        equation.invars
        for equation, _ in equations(jaxpr)
        if equation.primitive.name == "optimization_barrier"
    ]
    # The cotangent waits for the loss, which is the first result.
    assert any(jaxpr.jaxpr.outvars[0] in operands for operands in barriers)


def test_a_step_holds_no_slice_of_its_flags():
    optimizer = optax.sgd(1e-3)

    def step(w, state, x):
        return mpx.optimizer_step(w, optimizer, state, gradient(w, x))

    jaxpr = jax.make_jaxpr(step)(W, optimizer.init(W), X)
    sliced = [
        equation
        for equation, _ in equations(jaxpr)
        if equation.primitive.name in ("slice", "dynamic_slice", "gather")
        and equation.outvars[0].aval.dtype == np.bool_
    ]
    assert not sliced


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_the_record_knows_which_of_them_was_not_finite(bad):
    def func(w):
        infinite = jnp.where(w > 0, jnp.inf, w)
        value = jnp.sum(w) + jnp.sum(jnp.sqrt(w - w))  # sqrt's slope at 0 is infinite
        return value + (jnp.sum(infinite) if bad == "loss" else 0.0)

    optimizer, w = optax.sgd(0.1), jnp.ones(3)
    result = gradient_of(func, w)
    _, _, scaling = mpx.optimizer_step(w, optimizer, optimizer.init(w), result)
    assert int(scaling.record.skipped) == 1
    assert int(scaling.record.bad_losses) == (bad == "loss")


@pytest.mark.slow
def test_gradients_of_steps_have_derivatives_of_their_own():
    def slope(w):
        return gradient(w, X).grads

    _, forward = jax.jvp(slope, (W,), (W,))
    exact = jax.jvp(jax.grad(lambda w: loss(w, X)), (W,), (W,))[1]
    np.testing.assert_allclose(forward, exact, rtol=1e-5, atol=1e-6)
    reverse = jax.grad(lambda w: jnp.sum(slope(w) * W))(W)
    np.testing.assert_allclose(reverse, exact, rtol=1e-5, atol=1e-6)
    several = jax.vmap(slope)(jnp.stack([W, 2 * W]))
    np.testing.assert_allclose(several[1], slope(2 * W), rtol=1e-6)
