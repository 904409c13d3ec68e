"""Gradients: values, and under transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import unscaled
from . import cases
from .cases import FLOAT16, batch, close, gradient, loss, params, same_bits, total

pytestmark = unscaled


@pytest.mark.parametrize(
    ("policy", "scale", "period", "accumulate"),
    [
        (None, 2.0**8, 1, 1),
        (cases.BFLOAT16, 2.0**-3, 1, 1),
        (FLOAT16, 2.0, 1000, 1),
        (FLOAT16, 2.0**8, 1, 1),
        (FLOAT16, 2.0**6, 1, 4),  # every micro-batch is scaled alike
    ],
)
def test_scaling_changes_no_bit(policy, period, scale, accumulate):
    """Row 1: a power of two leaves loss and gradients as they are."""
    args = params(), *batch()
    dynamic = mpx.DynamicLossScaling(scale, 2.0**-10, period=period)
    plain = gradient(policy, mpx.NoLossScaling(), accumulate=accumulate)(*args)
    scaled = gradient(policy, dynamic, accumulate=accumulate)(*args)
    assert same_bits(plain.grads, scaled.grads)
    assert same_bits(plain.value, scaled.value)
    grown = scale * (2 if period == 1 and policy is not None else 1)
    assert float(scaled.scaling.loss_scale) == grown


@pytest.mark.parametrize("finite", [True, False])
def test_loss_is_unscaled_when_the_scale_changes(finite):
    """Not doubled on a skipped step, not halved when the scale grows (MPX)."""

    def fun(w):
        # On the bad step the gradient overflows float16 and the loss does not.
        return total(w * 3) if finite else total(w) + total((w - 1) * 60000)

    result = gradient(FLOAT16, mpx.DynamicLossScaling(16.0, period=1), fun)(jnp.ones(2))
    assert bool(result.finite) is finite
    assert float(result.value) == (6.0 if finite else 2.0)
    assert float(result.scaling.loss_scale) == (32.0 if finite else 8.0)


@pytest.mark.parametrize("start", [1.0, 2.0**15, mpx.FLOAT16_MAX])
def test_a_large_float16_loss_is_reported_right(start):
    """The scaled loss never is a float16 number; MPX reports a good infinite one."""

    def fun(w):
        assert w.dtype == jnp.float16
        return (w * 2.0**-5)[0] + 30000

    result = gradient(FLOAT16, mpx.DynamicLossScaling(start), fun)(jnp.ones(1))
    assert float(result.value) == 30000.0
    assert result.value.dtype == jnp.float32
    assert bool(result.finite) and result.grads.tolist() == [2.0**-5]


def test_the_largest_start_changes_no_bit():
    """65504, which MPX takes as a scale, changes nearly every float16 gradient."""
    x = cases.uniform(0, 1000, low=0.1, high=0.9).astype(jnp.float16)
    fun = lambda w, x: total(w * x)  # noqa: E731
    scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX)
    result = gradient(FLOAT16, scaling, fun)(jnp.ones(1000), x)
    assert bool(result.finite)
    assert same_bits(result.grads, x.astype(jnp.float32))


@pytest.mark.parametrize(
    "policy", [FLOAT16, pytest.param(cases.BFLOAT16, marks=pytest.mark.slow)]
)
def test_twenty_steps_with_a_growing_scale_change_no_bit(policy):
    """At period 2 each second step grows the scale: in MPX weights are 11% off."""

    @jax.jit
    def step(w, scaling, x, y):
        result = gradient(policy, scaling)(w, x, y)
        w = jax.tree.map(lambda w, g: w - 0.05 * g, w, result.grads)
        return w, result.scaling, result.value

    def train(scaling):
        w, losses = params(), []
        for _ in range(20):
            w, scaling, value = step(w, scaling, x, y)
            losses.append(float(value))
        assert int(scaling.skipped) == 0
        return w, losses, float(scaling.loss_scale)

    x, y = batch()
    # Not 1: there, gradients are subnormal in float16.
    fixed, fixed_losses, _ = train(mpx.StaticLossScaling(2.0**4))
    grown, grown_losses, scale = train(mpx.DynamicLossScaling(2.0**4, period=2))
    assert scale == 2.0**14
    assert same_bits(grown, fixed) and grown_losses == fixed_losses
    full = params()
    for _ in range(20):
        grads = cases.control(loss, full, x, y)[1]
        full = jax.tree.map(lambda w, g: w - 0.05 * g, full, grads)
    close(grown, full, 2e-3 if policy == FLOAT16 else 2e-2)


@pytest.mark.parametrize("where", ["loss", "gradient", "input", "parameter"])
def test_nan_is_a_bad_step(where):
    def fun(w, x):
        value = total(w * x)
        if where == "loss":
            value = value + jax.lax.stop_gradient(jnp.float32(np.nan))
        if where == "gradient":
            # sqrt at zero: the value is zero, the derivative is infinite.
            value = value + total(jnp.sqrt(w - 1))
        return value

    w = jnp.array([1.0, jnp.nan]) if where == "parameter" else jnp.ones(2)
    x = jnp.array([1.0, jnp.nan]) if where == "input" else jnp.ones(2)
    scaling, finite, _ = mpx.filter_grad(fun, mpx.DynamicLossScaling(8.0))(w, x)
    assert not bool(finite)
    # No smaller scale would mend a loss that is NaN.
    scale, bad_losses = (4.0, 0) if where == "gradient" else (8.0, 1)
    assert (int(scaling.skipped), float(scaling.loss_scale)) == (1, scale)
    assert int(scaling.bad_losses) == bad_losses


def test_nan_in_aux_is_no_bad_step():
    """The function jaxamp counts a NaN in aux as an overflow."""
    fun = lambda w: (total(w), jnp.float32(np.nan))  # noqa: E731
    step = mpx.filter_grad(fun, mpx.DynamicLossScaling(8.0), has_aux=True)
    result = step(jnp.ones(2))
    assert bool(result.finite) and np.isnan(result.aux)


def test_duplicate_indices_overflow_is_found():
    """Row 34: float16 sums in a scatter."""
    index = jnp.zeros(64, jnp.int32)
    fun = lambda w: total(w[index] * 1.0) * 2048.0  # noqa: E731
    result = gradient(FLOAT16, mpx.DynamicLossScaling(2.0), fun)(jnp.ones(2))
    assert not bool(result.finite)


def test_two_losses_with_scalings_of_their_own():
    """Row 15, as with a generator and a discriminator: one overflows, one does not."""

    @jax.jit
    def step(w, scalings, x):
        losses = {"a": lambda w, x: total(w * x), "b": lambda w, x: total(w * x * 3e4)}
        results = {
            name: gradient(FLOAT16, scalings[name], fun)(w[name], x)
            for name, fun in losses.items()
        }
        return results, {name: r.scaling for name, r in results.items()}

    scalings = {name: mpx.DynamicLossScaling(8.0, period=2) for name in "ab"}
    w = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for _ in range(2):
        results, scalings = step(w, scalings, jnp.ones(2))
    assert bool(results["a"].finite) and not bool(results["b"].finite)
    assert (float(results["a"].value), results["a"].grads.tolist()) == (2.0, [1.0, 1.0])
    scales = {name: float(s.loss_scale) for name, s in scalings.items()}
    assert scales == {"a": 16.0, "b": 2.0}
    assert [int(scalings[name].skipped) for name in "ab"] == [0, 2]


def test_complex_weights_stay_complex():
    """Their gradients are JAX's own; in jaxamp they become real."""

    def fun(w):
        return total(w["real"] * jnp.abs(w["z"] * (1 + 2j)).astype(w["real"].dtype))

    w = {"real": jnp.ones(2), "z": jnp.array([3 + 4j, 1 - 1j], jnp.complex64)}
    result = gradient(FLOAT16, mpx.DynamicLossScaling(2.0**7), fun)(w)
    _, expected = cases.control(fun, w)
    assert result.grads["z"].dtype == jnp.complex64
    np.testing.assert_allclose(result.grads["z"], expected["z"], rtol=2e-3)
    assert cases.dtypes(result.grads["real"]) == {"float32"}


@pytest.mark.parametrize(
    ("form", "accumulate", "grad_dtype"),
    [
        (mpx.value_and_grad, 2, "float32"),
        (mpx.filter_value_and_grad, 1, "bfloat16"),
        (mpx.filter_value_and_grad, 2, "bfloat16"),
    ],
)
def test_a_complex_gradient_keeps_its_imaginary_part(form, accumulate, grad_dtype):
    """Whatever dtype the policy says for gradients, which real ones have."""
    policy = f"params=float32,compute=float32,output=float32,grad={grad_dtype}"
    z, x = jnp.array([1 + 2j, 3j], jnp.complex64), jnp.ones((2, 2))
    loss = lambda z, x: jnp.mean(jnp.abs(x.astype(z.dtype) @ z) ** 2)  # noqa: E731
    scaling = mpx.DynamicLossScaling(2.0**7)
    value_and_grad = form(loss, scaling, policy=policy, accumulate=accumulate)
    result = value_and_grad(z, x)
    assert result.grads.dtype == jnp.complex64
    np.testing.assert_allclose(result.grads, jax.grad(loss)(z, x), rtol=1e-6)
    for bad in (jnp.nan, jnp.inf * 1j):
        assert not value_and_grad(z.at[0].set(bad), x).finite


def test_a_python_complex_number_is_differentiated_as_by_jax():
    loss = lambda z: jnp.abs(z) ** 2  # noqa: E731
    result = mpx.grad(loss, mpx.NoLossScaling())(1 + 2j)
    assert result.grads == jax.grad(loss)(1 + 2j)


def test_tied_weights_get_a_gradient_for_each_place():
    shared = jnp.array([2.0, 3.0])
    fun = lambda w: total(w["in"] * w["out"] ** 2)  # noqa: E731
    w = {"in": shared, "out": shared}
    result = gradient(FLOAT16, mpx.DynamicLossScaling(2.0**4), fun)(w)
    assert same_bits(result.grads, cases.control(fun, w)[1])


@pytest.mark.parametrize(("accumulate", "bad"), [(1, True), (2, True), (2, False)])
def test_leaves_in_8_bits_are_state(bad, accumulate):
    """Row 33: not cast, not differentiated, not unscaled; dropped on a bad step."""

    def fun(w, x):
        assert w["f8"].dtype == jnp.float8_e4m3fn and w["w"].dtype == jnp.float16
        new = (w["f8"].astype(jnp.float32) * 2).astype(w["f8"].dtype)
        return total(w["w"] * x.sum(0) * w["f8"].astype(x.dtype)), new

    w = {"w": jnp.ones(2), "f8": jnp.full(2, 1.5, jnp.float8_e4m3fn)}
    x = jnp.ones((2, 2)).at[1, 0].set(jnp.inf if bad else 1.0)
    scaling = mpx.DynamicLossScaling(2.0**6)
    result = gradient(FLOAT16, scaling, fun, has_aux=True, accumulate=accumulate)(w, x)
    assert bool(result.finite) is not bad
    assert result.grads["f8"] is None
    if not bad:
        assert result.grads["w"].tolist() == [1.5 * 2 / accumulate] * 2
    new = result.aux if accumulate == 1 else result.aux[-1]
    assert same_bits(new, jnp.full(2, 3.0, jnp.float8_e4m3fn))
    kept = mpx.select_tree(result.finite, new, w["f8"])
    assert same_bits(kept, w["f8"] if bad else new)


def test_gradient_penalty_equals_control():
    """Row 19: the gradient of a gradient, inside of the loss."""

    def fun(w, x, y):
        inner = jax.grad(lambda x: total(jnp.tanh(x @ w["w1"])))(x)
        return loss(w, x, y) + total(inner.astype(jnp.float32) ** 2)

    args = params(), *batch()
    step = jax.jit(lambda scaling, *args: gradient(FLOAT16, scaling, fun)(*args).grads)
    scaled = step(mpx.DynamicLossScaling(2.0**7), *args)
    plain = step(mpx.NoLossScaling(), *args)
    _, expected = jax.jit(cases.control, static_argnums=0)(fun, *args)
    close(scaled, expected, 5e-3)
    close(scaled, plain, 1e-3)
    exact = jax.jit(gradient(None, None, fun))(*args)
    close(exact.grads, expected, 1e-6)


def test_vmap_gives_gradients_per_example():
    w, (x, y) = params(), batch()

    def one(x, y):
        return gradient(FLOAT16, mpx.NoLossScaling())(w, x[None], y[None]).grads

    per_example = jax.jit(jax.vmap(one))(x, y)
    mean = jax.tree.map(lambda g: g.mean(0), per_example)
    close(mean, cases.control(loss, w, x, y)[1], 3e-3)


def test_one_trace_serves_all_steps():
    traces = []

    def fun(w, x, y):
        traces.append(1)
        return loss(w, x, y)

    @jax.jit
    def step(w, scaling, x, y):
        result = gradient(FLOAT16, scaling, fun)(w, x, y)
        return result.grads, result.scaling

    w, (x, y) = params(), batch()
    scaling, scales = mpx.DynamicLossScaling(2.0**7, period=3), []
    for i in range(8):
        _, scaling = step(w, scaling, jnp.where(i == 4, jnp.inf, x), y)
        scales.append(float(scaling.loss_scale) / 2**7)
    assert scales == [1, 1, 2, 2, 1, 1, 1, 2]
    assert len(traces) == 1


def test_no_callback_and_no_branch():
    """Row 35: nothing runs on the host, and a skip is a select."""
    step = lambda s, *args: gradient(FLOAT16, s, accumulate=2)(*args)  # noqa: E731
    text = str(jax.make_jaxpr(step)(mpx.DynamicLossScaling(), params(), *batch()))
    assert "callback" not in text and "cond[" not in text and "while[" not in text


def test_scan_over_steps_equals_a_loop(checking_leaks):
    def step(carry, x):
        w, scaling = carry
        result = gradient(FLOAT16, scaling, lambda w, x: total((w - x) ** 2))(w, x)
        w = mpx.select_tree(result.finite, w - 0.1 * result.grads, w)
        return (w, result.scaling), result.finite

    xs = cases.uniform(3, 6, 2).at[2].set(jnp.nan)
    carry = start = (jnp.ones(2), mpx.DynamicLossScaling(2.0**4, period=2))
    one, (found, finite) = jax.jit(step), jax.lax.scan(step, start, xs)
    for x in xs:
        carry, _ = one(carry, x)
    assert finite.tolist() == [True, True, False, True, True, True]
    close(found[0], carry[0], 1e-6)
    assert same_bits(found[1], carry[1])


def test_accumulating_by_hand():
    w, (x, y) = params(), batch()
    scaling = mpx.StaticLossScaling(2.0**5)

    @jax.jit  # as the other: XLA rounds a chain of float16 operations once, or each
    def micro_batch(scaling, *args):
        return mpx.calculate_scaled_grad(loss, scaling)(*args)

    with mpx.half_precision("float16"):
        both = [micro_batch(scaling, w, x[i::2], y[i::2]) for i in range(2)]
        expected = mpx.filter_grad(loss, scaling, accumulate=2)(w, x, y)
    assert cases.dtypes(both) == {"float32"}
    sums = jax.tree.map(jnp.add, both[0][1], both[1][1])
    mean = jax.tree.map(lambda g: g / 2, scaling.unscale(sums))
    close(mean, expected.grads, 1e-6)
    # It scales both value and gradient.
    fun = lambda w: (total(w * 3), "aux")  # noqa: E731
    scaling = mpx.StaticLossScaling(8.0)
    step = mpx.calculate_scaled_grad(fun, scaling, has_aux=True)
    (value, aux), grads = step(jnp.ones(2))
    assert (float(value), aux) == (48.0, "aux")
    assert same_bits(grads, jnp.full(2, 24.0))


def test_float64_weights_have_float64_gradients():
    with jax.enable_x64(True):
        w = jnp.ones(2, jnp.float64)
        result = gradient(FLOAT16, mpx.DynamicLossScaling(4.0), total)(w)
        assert result.grads.dtype == jnp.float64
