"""jaxamp's loss scaling beside the real package, its README, and its mended defects."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx.compat.jaxamp as ours

from ..helpers import assert_same_bits
from .test_jaxamp_amp import needs_jaxamp, theirs


def loss(w, x):
    """Infinite where x is, so that a test says which steps are bad."""
    return jnp.sum(w * w * x)


@needs_jaxamp
def test_fields_of_the_state_agree():
    assert ours.DynamicScalerState._fields == theirs.DynamicScalerState._fields
    for here, there in zip(
        ours.DynamicScalerState(), theirs.DynamicScalerState(), strict=True
    ):
        assert (here.dtype, here.shape, here) == (there.dtype, there.shape, there)


@needs_jaxamp
@pytest.mark.third_party
@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize("redo", [0, 2])
def test_every_step_is_jaxamps(patience, redo):
    """Growth one step late, falls, resets, redone steps: 40 steps beside the real."""
    pattern = np.random.default_rng(0).random(40) < 0.8
    both, w = (ours, theirs), jnp.array([1.0, 2.0])
    fields = {"patience": jnp.int32(patience), "scaler": jnp.float32(16.0)}
    states = [m.DynamicScalerState(**fields) for m in both]
    steps = [
        jax.jit(m.dynamic_scale_value_and_grad(loss, redo_on_nan=redo)) for m in both
    ]
    for good in pattern:
        x = jnp.float32(1.0 if good else np.inf)
        calls = zip(steps, states, strict=True)
        outcomes = [step(w, x, dynamic_scaler_state=state) for step, state in calls]
        states = [state for state, _ in outcomes]
        assert_same_bits(*map(jax.tree.leaves, outcomes))
    assert int(states[0].total_resets) > 0


@pytest.mark.parametrize("filter", [True, False])
@pytest.mark.parametrize("has_aux", [True, False])
def test_results_have_the_form_of_the_transform(filter, has_aux):
    def fun(w):
        value = jnp.sum(w.astype(jnp.float16))
        return (value, w) if has_aux else value

    w = jnp.array([4.0, 6.0])
    state = {"dynamic_scaler_state": ours.DynamicScalerState()}
    options = dict(has_aux=has_aux, filter=filter)
    new, (value, grads) = ours.dynamic_scale_value_and_grad(fun, **options)(w, **state)
    value, aux = value if has_aux else (value, w)
    # 10 times 2**15 is past float16: the product is in float32.
    assert (value.dtype, float(value)) == (jnp.float32, 10.0)
    assert int(new.count) == 1 and int(new.total_resets) == 0
    np.testing.assert_array_equal(grads, [1.0, 1.0])
    np.testing.assert_array_equal(aux, w)
    _, grads = ours.dynamic_scale_grad(fun, **options)(w, **state)
    grads, aux = grads if has_aux else (grads, w)
    np.testing.assert_array_equal(grads, [1.0, 1.0])
    np.testing.assert_array_equal(aux, w)


def grad_of(fun, w, state=None, **options):
    state = ours.DynamicScalerState() if state is None else state
    return ours.dynamic_scale_grad(fun, **options)(w, dynamic_scaler_state=state)


def test_nan_in_aux_is_no_overflow():
    fun = lambda w: (jnp.sum(w), jnp.nan)  # noqa: E731
    state, _ = grad_of(fun, jnp.ones(2), has_aux=True)
    assert int(state.total_resets) == 0


def test_the_scale_stays_positive_and_finite():
    state = ours.DynamicScalerState(patience=jnp.int32(0))
    step = jax.jit(ours.dynamic_scale_grad(loss))

    def scan(state, x):
        def body(state, _):
            return step(jnp.ones(1), x, dynamic_scaler_state=state)[0], None

        return jax.lax.scan(body, state, length=400)[0]

    assert float(scan(state, jnp.float32(np.inf)).scaler) == 2.0**-126
    assert float(scan(state, jnp.float32(1e-30)).scaler) == 2.0**126


def test_complex_gradients_stay_complex():
    w = jnp.array([1 + 2j], jnp.complex64)
    fun = lambda w: jnp.sum(jnp.abs(w) ** 2)  # noqa: E731
    _, grads = grad_of(fun, w)
    np.testing.assert_allclose(grads, jax.grad(fun)(w), rtol=1e-6)
    assert grads.dtype == jnp.complex64


def test_a_default_state_can_be_donated():
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    first = step(ours.DynamicScalerState())
    assert int(first.patience) == 2001
    assert int(step(ours.DynamicScalerState()).patience) == 2001


def test_plain_numbers_and_results_that_are_no_arrays():
    state = ours.DynamicScalerState(10, 2.0, 4.0, 0, 0)
    fun = lambda w: (jnp.sum(w) / 0, "text")  # noqa: E731
    options = {"has_aux": True, "redo_on_nan": 3}
    state, (_, aux) = grad_of(fun, jnp.ones(1), state, **options)
    assert aux == "text"
    assert (float(state.scaler), int(state.total_resets)) == (0.25, 4)
    assert pickle.loads(pickle.dumps(state)) == state


def test_any_transform_can_be_scaled():
    hessian = ours.dynamic_scale_tx(jax.hessian)(lambda w: jnp.sum(w**3))
    state = ours.DynamicScalerState()
    state, result = hessian(jnp.array([2.0]), dynamic_scaler_state=state)
    np.testing.assert_array_equal(result, [[12.0]])
    assert int(state.count) == 1


def test_the_readme_trains():
    """Its training loop; `model_state` is what it passes, the state is mended in."""
    x = jax.random.normal(jax.random.key(0), (64, 3))
    y = x @ jnp.array([1.0, -2.0, 3.0])
    optimizer = optax.sgd(0.1)

    def loss_fn(model_state, minibatch):
        x, y = minibatch
        error = x @ model_state - y
        return jnp.mean(error**2), jnp.max(jnp.abs(error))

    def train_step(model_state, opt_state, minibatch, dynamic_scaler_state, optimizer):
        amp_loss_fn = ours.amp(loss_fn)

        value_and_grad_fn = ours.dynamic_scale_value_and_grad(amp_loss_fn, has_aux=True)

        dynamic_scaler_state, ((loss, accuracy), grads) = value_and_grad_fn(
            model_state, minibatch, dynamic_scaler_state=dynamic_scaler_state
        )

        updates, opt_state = optimizer.update(grads, opt_state, model_state)
        model_state = optax.apply_updates(model_state, updates)
        return model_state, opt_state, dynamic_scaler_state, loss, accuracy

    model_state = jnp.zeros(3)
    opt_state = optimizer.init(model_state)
    train_step_jit = jax.jit(train_step, static_argnums=4)
    dynamic_scaler_state = ours.DynamicScalerState()
    for _ in range(60):
        model_state, opt_state, dynamic_scaler_state, loss, accuracy = train_step_jit(
            model_state, opt_state, (x, y), dynamic_scaler_state, optimizer
        )
    assert float(loss) < 1e-3 and float(accuracy) < 0.1
    assert int(dynamic_scaler_state.count) == 60


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("scaler", 0.0, "`scaler` .* must be positive and finite; got 0.0"),
        ("scaler", np.inf, "`scaler` .* must be positive and finite"),
        ("adjust_factor", 1.0, "`adjust_factor` .* larger than 1"),
        ("count", -1, "`count` .* at least 0"),
        ("patience", True, "`patience` .* at least 0; got True"),
    ],
)
def test_a_field_that_cannot_be_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        ours.DynamicScalerState(**{field: value})


def test_bad_input_is_refused():
    grad = ours.dynamic_scale_grad(loss)
    w, state = jnp.ones(1), ours.DynamicScalerState()
    with pytest.raises(TypeError, match="must be a `mpx.compat.jaxamp.Dynamic"):
        grad(w, 1.0, dynamic_scaler_state=2.0)
    with pytest.raises(ValueError, match="would be a constant"):
        jax.jit(lambda w: grad(w, 1.0, dynamic_scaler_state=state))(w)
    with pytest.raises(TypeError, match="`redo_on_nan` .* whole number"):
        grad_of(loss, w, redo_on_nan=True)
    with pytest.raises(TypeError, match=r"a value or a pair `\(value, aux\)`"):
        grad_of(lambda w: {"loss": w}, w, state)
