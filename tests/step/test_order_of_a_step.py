"""In which order a step computes, and the check of a try.

The check comes before the gradients, and looks at what they will be.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

import mpx
from mpx._step._attempt import finite_flags
from tests.autocast.counting import equations
from tests.helpers import unscaled

W, X = jnp.eye(4), jnp.arange(8.0).reshape(2, 4) / 8


def loss(w, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


def gradient(w, x, func=loss):
    call = mpx.filter_value_and_grad(func, mpx.NoLossScaling(), policy="float32")
    return call(w, x)


def named(jaxpr, *names):
    return [e for e, _ in equations(jaxpr) if e.primitive.name in names]


def test_the_loss_is_computed_before_the_backward_pass():
    jaxpr = jax.make_jaxpr(lambda w, x: gradient(w, x)[:2])(W, X)
    barriers = named(jaxpr, "optimization_barrier")
    # The cotangent waits for the loss, which is the first result.
    assert any(jaxpr.jaxpr.outvars[0] in barrier.invars for barrier in barriers)


def test_a_step_holds_no_slice_of_its_flags():
    optimizer = optax.sgd(1e-3)

    def step(w, state, x):
        return mpx.optimizer_step(w, optimizer, state, gradient(w, x))

    jaxpr = jax.make_jaxpr(step)(W, optimizer.init(W), X)
    moved = named(jaxpr, "slice", "dynamic_slice", "gather")
    assert not any(e.outvars[0].aval.dtype == np.bool_ for e in moved)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_the_record_knows_which_of_them_was_not_finite(bad):
    def func(w, x):
        infinite = jnp.where(w > 0, jnp.inf, w)
        value = jnp.sum(w) + jnp.sum(jnp.sqrt(w - w))  # sqrt's slope at 0 is infinite
        return value + (jnp.sum(infinite) if bad == "loss" else 0.0)

    optimizer, w = optax.sgd(0.1), jnp.ones(3)
    result = gradient(w, X, func)
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


@unscaled
@pytest.mark.parametrize(
    ("scaling", "waits"),
    [
        (mpx.DynamicLossScaling(8.0), True),
        (mpx.StaticLossScaling(8.0), True),
        (mpx.NoLossScaling(), True),
        (mpx.NoLossScaling(skip=False), False),
    ],
    ids=str,
)
def test_gradients_wait_for_the_check(scaling, waits):
    """The optimizer stays out of the backward pass, whose memory it would prolong."""

    def grads(w, scaling):
        return mpx.filter_grad(lambda w: jnp.sum(w**2), scaling)(w).grads

    w = jnp.array([3.0, -0.0])
    assert depends_on_check(jax.make_jaxpr(grads)(w, scaling).jaxpr) == waits
    np.testing.assert_array_equal(jax.jit(grads)(w, scaling), [6.0, -0.0])
    assert np.signbit(jax.jit(grads)(w, scaling)[1])


def depends_on_check(jaxpr):
    """Whether the first result is computed from a reduction of booleans."""
    makers = {out: e for e in jaxpr.eqns for out in e.outvars}
    seen, todo = set(), [jaxpr.outvars[0]]
    while todo:
        equation = makers.get(todo.pop())
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            todo += [v for v in equation.invars if isinstance(v, core.Var)]
    return "reduce_and" in {e.primitive.name for e in makers.values() if id(e) in seen}


@pytest.mark.parametrize("scale", [2.0**-20, 0.3, 1.0, 2.0**10])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_flags_are_those_of_the_unscaled_gradients(scale, dtype):
    """Dividing by a scale below 1 can overflow though the scaled gradient is finite."""
    scaling = mpx.StaticLossScaling(scale)
    largest = np.finfo(np.float32).max
    for size in [0.0, 1.0, largest / 4, largest * 0.99, np.inf, np.nan]:
        with np.errstate(over="ignore", invalid="ignore"):
            # As the gradient arrives: times the scale, in float32.
            scaled = (np.float32(size) * np.float32(scale)).astype(dtype)
        grads = {"a": jnp.array([0, scaled], dtype)}
        flags = finite_flags(scaling, jnp.ones(()), grads)
        assert flags.all() == mpx.all_finite(scaling.unscale(grads)), size
    # Finite times the scale, and not finite without.
    if scale < 1:
        grads = [jnp.full((2, 2), largest, dtype), jnp.zeros((), dtype)]
        flags = finite_flags(scaling, jnp.ones(()), grads)
        np.testing.assert_array_equal(flags, [True, False, True, True])
        assert not mpx.all_finite(scaling.unscale(grads))


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-112, 2.0**-111, 0.3, 2.0**15])
@pytest.mark.parametrize("value", [0.0, 65504.0, np.inf, np.nan])
def test_flags_of_float16_gradients(scale, value):
    """They are checked before they are widened, and unscaled afterwards."""
    scaling = mpx.StaticLossScaling(scale)
    grad = jnp.array([0, value], jnp.float16)
    flags = finite_flags(scaling, jnp.ones(()), [grad])
    unscaled = scaling.unscale([grad.astype(jnp.float32)])
    assert flags.all() == (scale >= 2.0**-111 and mpx.all_finite(unscaled))
