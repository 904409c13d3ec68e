"""The four gradient functions: values, results, options."""

import pickle
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from .cases import (
    BFLOAT16,
    FLOAT16,
    PRECISIONS,
    batch,
    close,
    control,
    dtypes,
    loss,
    params,
    same_bits,
    total,
    unchecked,
    uniform,
)

FUNCTIONS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "grad": mpx.grad,
    "value_and_grad": mpx.value_and_grad,
}


def gradient(policy, scaling, fun=loss, **options):
    policy = mpx.get_policy(policy) if isinstance(policy, str) else policy
    return mpx.filter_value_and_grad(
        fun, scaling, use_mixed_precision=policy is not None, policy=policy, **options
    )


# --- Values -----------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "dtype"), PRECISIONS)
@pytest.mark.parametrize("period", [1, 1000], ids=["grows", "stays"])
@pytest.mark.parametrize("scale", [2.0**-3, 2.0, 2.0**8])
def test_scaling_changes_no_bit(policy, dtype, period, scale):
    """Row 1: a power of two leaves loss and gradients as they are."""
    w, (x, y) = params(), batch()
    dynamic = mpx.DynamicLossScaling(scale, 2.0**-10, period=period)
    plain = gradient(policy, mpx.NoLossScaling())(w, x, y)
    scaled = gradient(policy, dynamic)(w, x, y)
    assert same_bits(plain.grads, scaled.grads)
    assert same_bits(plain.value, scaled.value)
    grown = scale * (2 if period == 1 and policy is not None else 1)
    assert float(scaled.scaling.loss_scale) == grown


@pytest.mark.parametrize(
    ("policy", "tolerance"), [(None, 1e-6), (BFLOAT16, 2e-2), (FLOAT16, 3e-3)]
)
def test_equals_the_full_precision_control(policy, tolerance):
    w, (x, y) = params(), batch()
    scaling = mpx.DynamicLossScaling(2.0**8)
    value, scaling, finite, grads = gradient(policy, scaling)(w, x, y)
    expected_value, expected = control(loss, w, x, y)
    assert bool(finite)
    close(grads, expected, tolerance)
    close(value, expected_value, tolerance)
    assert dtypes((grads, value)) == {"float32"}


def test_the_function_computes_in_the_compute_dtype():
    seen = []

    def fun(w, x):
        seen.append((w.dtype, x.dtype))
        return total(w * x)

    for policy, _ in PRECISIONS:
        gradient(policy, mpx.NoLossScaling(), fun)(jnp.ones(2), jnp.ones(2))
    assert seen == [(dtype, dtype) for _, dtype in PRECISIONS]


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


def test_a_large_float16_loss_is_reported_right():
    def fun(w):
        assert w.dtype == jnp.float16
        return (w * 60000)[0]

    result = gradient(FLOAT16, mpx.DynamicLossScaling(1.0), fun)(jnp.ones(1))
    assert float(result.value) == 60000.0
    assert result.value.dtype == jnp.float32
    assert bool(result.finite)


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
    assert (int(scaling.skipped), float(scaling.loss_scale)) == (1, 4.0)


def test_nan_in_aux_is_no_bad_step():
    """The function jaxamp counts a NaN in aux as an overflow."""
    fun = lambda w: (total(w), jnp.float32(np.nan))  # noqa: E731
    result = mpx.filter_grad(fun, mpx.DynamicLossScaling(8.0), has_aux=True)(
        jnp.ones(2)
    )
    assert bool(result.finite)
    assert np.isnan(result.aux)


def test_duplicate_indices_overflow_is_found():
    """Row 34: float16 sums in a scatter."""
    index = jnp.zeros(64, jnp.int32)
    fun = lambda w: total(w[index] * 1.0) * 2048.0  # noqa: E731
    result = gradient(FLOAT16, mpx.DynamicLossScaling(2.0), fun)(jnp.ones(2))
    assert not bool(result.finite)


def test_gradient_penalty_equals_control():
    """Row 19: the gradient of a gradient, inside of the loss."""

    def fun(w, x, y):
        inner = jax.grad(lambda x: total(jnp.tanh(x @ w["w1"])))(x)
        return loss(w, x, y) + total(inner.astype(jnp.float32) ** 2)

    w, (x, y) = params(), batch()
    scaled = gradient(FLOAT16, mpx.DynamicLossScaling(2.0**7), fun)(w, x, y)
    plain = gradient(FLOAT16, mpx.NoLossScaling(), fun)(w, x, y)
    close(scaled.grads, control(fun, w, x, y)[1], 5e-3)
    close(scaled.grads, plain.grads, 1e-3)
    exact = gradient(None, None, fun)(w, x, y)
    close(exact.grads, control(fun, w, x, y)[1], 1e-6)


# --- Results ----------------------------------------------------------------------


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("jit", [False, True])
def test_unpacks_in_the_papers_order(name, has_aux, jit):
    fun = lambda w: (total(w**2), {"n": w}) if has_aux else total(w**2)  # noqa: E731

    def call(w, scaling):
        return FUNCTIONS[name](
            fun, scaling, has_aux=has_aux, policy=mpx.get_policy(FLOAT16)
        )(w)

    call = jax.jit(call) if jit else call
    result = call(jnp.array([1.0, 2.0]), mpx.DynamicLossScaling(16.0))
    assert isinstance(result, mpx.GradientResult)
    items = list(result)
    if "value" in name:
        first = items.pop(0)
        value = first[0] if has_aux else first
        assert float(value) == 5.0 and result.value is value
        aux = first[1] if has_aux else None
    else:
        aux = items.pop() if has_aux else None
        with pytest.raises(AttributeError, match="filter_value_and_grad"):
            _ = result.value
    scaling, finite, grads = items
    assert scaling is result.scaling and finite is result.finite
    assert grads is result.grads
    assert isinstance(scaling, mpx.DynamicLossScaling) and bool(finite)
    assert same_bits(grads, jnp.array([2.0, 4.0]))
    if has_aux:
        assert aux is result.aux and aux["n"].dtype == jnp.float16
    else:
        with pytest.raises(AttributeError, match="has_aux=True"):
            _ = result.aux
    with pytest.raises(AttributeError, match="no attribute 'gradients'"):
        _ = result.gradients


def test_result_is_a_pytree_and_pickles():
    fun = lambda w: (total(w), w)  # noqa: E731
    result = mpx.filter_value_and_grad(fun, mpx.DynamicLossScaling(), has_aux=True)(
        jnp.ones(2)
    )
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(result)]
    assert {".value", ".finite", ".grads", ".aux"} <= set(paths)
    for copy in (
        pickle.loads(pickle.dumps(result)),
        jax.tree.map(lambda x: x, result),
        jax.jit(lambda r: r)(result),
    ):
        assert type(copy) is mpx.GradientResult
        assert same_bits(jax.tree.leaves(copy), jax.tree.leaves(result))
        assert same_bits(copy.aux, result.aux)
    assert "value=" in repr(result) and "_flags" not in repr(result)


def test_replace_knows_its_fields():
    result = mpx.filter_grad(total, mpx.DynamicLossScaling())(jnp.ones(2))
    changed = result._replace(grads=jnp.zeros(2))
    assert same_bits(changed.grads, jnp.zeros(2))
    assert same_bits(result.grads, jnp.ones(2))
    with pytest.raises(ValueError, match="gradients"):
        result._replace(gradients=0)


@pytest.mark.parametrize("scaling", [None, mpx.DynamicLossScaling(16.0, period=1)])
def test_without_mixed_precision(scaling):
    w, (x, y) = params(), batch()
    result = gradient(None, scaling)(w, x, y)
    value, expected = control(loss, w, x, y)
    assert same_bits(result.grads, expected) and same_bits(result.value, value)
    if scaling is None:
        assert result.scaling is None
    else:
        assert float(result.scaling.loss_scale) == 16.0
        assert int(result.scaling.steps) == 1


def test_aux_comes_back_as_it_was_returned():
    def fun(w, x):
        aux = {"half": w * 2, "name": "dense", "n": 3, "none": None, "act": jax.nn.relu}
        return total(w * x), {**aux, "int": jnp.arange(3)}

    call = mpx.filter_grad(
        fun, mpx.DynamicLossScaling(), has_aux=True, policy=mpx.get_policy(FLOAT16)
    )
    aux = call(jnp.ones(2), jnp.ones(2)).aux
    assert aux["half"].dtype == jnp.float16
    assert aux["name"] == "dense" and aux["n"] == 3 and aux["none"] is None
    assert aux["act"] is jax.nn.relu and aux["int"].dtype == jnp.int32


# --- Options ----------------------------------------------------------------------


def test_keep_names_leaves_that_are_not_cast():
    seen = {}

    def fun(w, data, *, time):
        seen.update(w=w.dtype, mask=data["mask"].dtype, x=data["x"].dtype, t=time.dtype)
        return total(w) + total(data["x"])

    def keep(path, leaf):
        paths.append(path)
        return path == "args[1]['mask']" or path.startswith("kwargs")

    paths = []
    data = {"x": jnp.ones(2), "mask": jnp.ones(2)}
    call = mpx.filter_grad(
        fun, mpx.NoLossScaling(), policy=mpx.get_policy(BFLOAT16), keep=keep
    )
    call(jnp.ones(2), data, time=jnp.ones(()))
    assert seen == {
        "w": jnp.bfloat16,
        "x": jnp.bfloat16,
        "mask": jnp.float32,
        "t": jnp.float32,
    }
    assert {"args[0]", "args[1]['x']", "kwargs['time']"} <= set(paths)


def test_model_state_is_not_cast():
    class Model(eqx.Module):
        weight: jax.Array
        count: eqx.nn.StateIndex

        def __init__(self):
            self.weight = jnp.ones(2)
            self.count = eqx.nn.StateIndex(jnp.zeros(()))

    def fun(model, state, variables):
        mean = state.get(model.count)
        assert mean.dtype == jnp.float32 and model.weight.dtype == jnp.float16
        assert variables["batch_stats"]["norm"]["mean"].dtype == jnp.float32
        assert variables["bn/~/mean_ema"]["average"].dtype == jnp.float32
        assert variables["params"].dtype == jnp.float16
        return total(model.weight), state.set(model.count, mean + 1)

    variables = {
        "batch_stats": {"norm": {"mean": jnp.ones(2)}},
        "bn/~/mean_ema": {"average": jnp.ones(2)},
        "params": jnp.ones(2),
    }
    model, state = eqx.nn.make_with_state(Model)()
    call = mpx.filter_grad(
        fun, mpx.NoLossScaling(), has_aux=True, policy=mpx.get_policy(FLOAT16)
    )
    result = call(model, state, variables)
    assert float(result.aux.get(model.count)) == 1.0


@pytest.mark.third_party
def test_batch_norm_statistics_are_those_of_full_precision():
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.linear = eqx.nn.Linear(3, 4, key=key)
            self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")

        def __call__(self, x, state):
            x = self.linear(x)
            # Its statistics are float32, and `lax.select` wants one dtype.
            y, state = self.norm(x.astype(jnp.float32), state)
            return y.astype(x.dtype), state

    def fun(model, state, x):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = call(x, state)
        return total(out.astype(jnp.float32) ** 2), state

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    x = uniform(0, 8, 3)
    half = mpx.filter_grad(
        fun, mpx.NoLossScaling(), has_aux=True, policy=mpx.get_policy(BFLOAT16)
    )(model, state, x)
    full = mpx.filter_grad(fun, None, has_aux=True, use_mixed_precision=False)(
        model, state, x
    )
    assert dtypes(eqx.filter(half.aux, eqx.is_inexact_array)) <= {"float32"}
    for a, b in zip(jax.tree.leaves(half.aux), jax.tree.leaves(full.aux), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_policy_as_text_and_as_object():
    w, (x, y) = params(), batch()
    with unchecked():
        text = mpx.filter_grad(loss, mpx.NoLossScaling(), policy=BFLOAT16)(w, x, y)
    policy = gradient(mpx.get_policy(BFLOAT16), mpx.NoLossScaling())(w, x, y)
    assert same_bits(text.grads, policy.grads)
    with unchecked(), pytest.raises(ValueError, match="float15"):
        mpx.filter_grad(loss, mpx.NoLossScaling(), policy="compute=float15")


def test_context_selects_the_dtype_and_traces_again():
    seen = []

    def fun(w):
        seen.append(w.dtype)
        return total(w)

    step = jax.jit(lambda w, scaling: mpx.filter_grad(fun, scaling)(w))
    for name in ("float16", "bfloat16", "float16", "bfloat16"):
        with mpx.half_precision(name):
            step(jnp.ones(2), mpx.DynamicLossScaling())
    assert seen == [jnp.float16, jnp.bfloat16]


def test_two_threads_have_their_own_dtype():
    seen = {}

    def work(name):
        with mpx.half_precision(name):
            barrier.wait()
            fun = lambda w: (total(w), w)  # noqa: E731
            result = mpx.filter_grad(fun, mpx.NoLossScaling(), has_aux=True)(
                jnp.ones(2)
            )
            seen[name] = str(result.aux.dtype)

    barrier = threading.Barrier(2, timeout=60)
    threads = [
        threading.Thread(target=work, args=(n,)) for n in ("float16", "bfloat16")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"float16": "float16", "bfloat16": "bfloat16"}


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 2), (2, 0)])
def test_argnums(argnums):
    def fun(a, b, c, *, factor):
        return total(a["x"] * b) * factor + total(c**2)

    args = ({"x": jnp.array([1.0, 2.0])}, jnp.array([3.0, 4.0]), jnp.array([5.0, 6.0]))
    result = mpx.value_and_grad(fun, mpx.DynamicLossScaling(4.0), argnums)(
        *args, factor=2.0
    )
    value, grads = jax.value_and_grad(fun, argnums)(*args, factor=2.0)
    assert same_bits(result.grads, grads) and float(result.value) == float(value)


def test_filter_grad_leaves_out_what_is_no_float():
    model = {"w": jnp.ones(2), "n": jnp.arange(2), "name": "m", "f": jnp.tanh, "x": 1.0}
    fun = lambda m: total(m["f"](m["w"])) + 0 * m["x"]  # noqa: E731
    grads = mpx.filter_grad(fun, mpx.NoLossScaling())(model).grads
    assert {k for k, v in grads.items() if v is not None} == {"w"}


@pytest.mark.parametrize(("retries", "good"), [(0, False), (2, False), (3, True)])
@pytest.mark.parametrize("jit", [False, True])
def test_retries(retries, good, jit):
    """A gradient of 15 overflows float16 at 2**15, 2**14 and 2**13, not at 2**12."""

    def call(w, scaling):
        fun = lambda w: total(w * 15.0)  # noqa: E731
        return gradient(FLOAT16, scaling, fun, retries=retries)(w)

    call = jax.jit(call) if jit else call
    result = call(jnp.ones(2), mpx.DynamicLossScaling(2.0**15))
    assert bool(result.finite) is good
    assert float(result.value) == 30.0
    assert int(result.scaling.steps) == 1
    assert int(result.scaling.skipped) == (not good)
    tried_last = 2.0 ** (15 - retries)
    assert float(result.scaling.loss_scale) == (tried_last if good else tried_last / 2)
    if good:
        assert same_bits(result.grads, jnp.full(2, 15.0))


# --- Transforms -------------------------------------------------------------------


def test_vmap_gives_gradients_per_example():
    w, (x, y) = params(), batch()

    def one(x, y):
        return gradient(FLOAT16, mpx.NoLossScaling())(w, x[None], y[None]).grads

    per_example = jax.vmap(one)(x, y)
    mean = jax.tree.map(lambda g: g.mean(0), per_example)
    close(mean, control(loss, w, x, y)[1], 3e-3)


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_callback_and_no_branch(accumulate):
    """Row 35: nothing runs on the host, and a skip is a select."""

    def step(w, scaling, x, y):
        return gradient(FLOAT16, scaling, accumulate=accumulate)(w, x, y)

    text = str(jax.make_jaxpr(step)(params(), mpx.DynamicLossScaling(), *batch()))
    assert "callback" not in text and "cond[" not in text and "while[" not in text


def test_scan_over_steps_equals_a_loop(checking_leaks):
    def step(carry, x):
        w, scaling = carry
        result = gradient(FLOAT16, scaling, lambda w, x: total((w - x) ** 2))(w, x)
        w = mpx.select_tree(result.finite, w - 0.1 * result.grads, w)
        return (w, result.scaling), result.finite

    xs = uniform(3, 6, 2).at[2].set(jnp.nan)
    start = (jnp.ones(2), mpx.DynamicLossScaling(2.0**4, period=2))
    carry, finite = jax.lax.scan(step, start, xs)
    expected = start
    for x in xs:
        expected, _ = step(expected, x)
    assert finite.tolist() == [True, True, False, True, True, True]
    close(carry[0], expected[0], 1e-6)
    assert same_bits(carry[1], expected[1])


def test_accumulating_by_hand():
    w, (x, y) = params(), batch()
    scaling = mpx.StaticLossScaling(2.0**5)
    sums = None
    with mpx.half_precision("float16"):
        for i in range(2):
            value, grads = mpx.calculate_scaled_grad(loss, scaling)(w, x[i::2], y[i::2])
            sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
        expected = mpx.filter_grad(loss, scaling, accumulate=2)(w, x, y)
    assert dtypes((sums, value)) == {"float32"}
    mean = jax.tree.map(lambda g: g / 2, scaling.unscale(sums))
    close(mean, expected.grads, 1e-6)


def test_calculate_scaled_grad_scales_value_and_gradient():
    fun = lambda w: (total(w * 3), "aux")  # noqa: E731
    scaling = mpx.StaticLossScaling(8.0)
    (value, aux), grads = mpx.calculate_scaled_grad(fun, scaling, has_aux=True)(
        jnp.ones(2)
    )
    assert (float(value), aux) == (48.0, "aux")
    assert same_bits(grads, jnp.full(2, 24.0))


def test_float64_weights_have_float64_gradients():
    with jax.enable_x64(True):
        w = jnp.ones(2, jnp.float64)
        result = gradient(FLOAT16, mpx.DynamicLossScaling(4.0), total)(w)
        assert result.grads.dtype == jnp.float64


# --- Errors -----------------------------------------------------------------------

W = jnp.ones(2)


@pytest.mark.parametrize(
    ("fun", "options", "error", "match"),
    [
        (lambda w: w, {}, ValueError, "scalar"),
        (lambda w: None, {}, TypeError, "return` missing"),
        (lambda w: jnp.int32(1), {}, TypeError, "floating"),
        (lambda w: jax.lax.complex(total(w), total(w)), {}, TypeError, "real part"),
        (lambda w: (total(w), 1), {}, TypeError, "has_aux=True"),
        (total, {"has_aux": True}, TypeError, "loss, aux"),
        (total, {"accumulate": 0}, ValueError, "at least 1"),
        (total, {"accumulate": True}, TypeError, "whole number"),
        (total, {"retries": -1}, ValueError, "retries"),
        (total, {"keep": "mask"}, TypeError, "keep"),
        (total, {"accumulate_dtype": "int8"}, (TypeError, ValueError), "accumulate"),
    ],
)
def test_bad_losses_and_options(fun, options, error, match):
    with unchecked(), pytest.raises(error, match=match):
        mpx.filter_grad(fun, mpx.DynamicLossScaling(), **options)(W)


@pytest.mark.parametrize("scaling", [1.0, 8, "dynamic", jnp.ones(()), None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_scaling_that_is_none(name, scaling):
    with (
        unchecked(),
        pytest.raises(TypeError, match=f"`mpx.{name}`.*must be a loss scaling"),
    ):
        FUNCTIONS[name](total, scaling)


@pytest.mark.parametrize(
    ("model", "match"),
    [({}, "no floating"), (jnp.arange(3), "no floating"), ("model", "no floating")],
)
def test_nothing_to_differentiate(model, match):
    with pytest.raises(ValueError, match=match):
        mpx.filter_grad(lambda m: 0.0, mpx.NoLossScaling())(model)


def test_float16_weights_are_refused_unless_asked_for():
    """Row 21."""
    w = {"layer": jnp.ones(2, jnp.float16)}
    fun = lambda w: total(w["layer"])  # noqa: E731
    with pytest.raises(ValueError, match=r"float16\[2\] at `.*\['layer'\]`"):
        mpx.filter_grad(fun, mpx.NoLossScaling())(w)
    result = mpx.filter_grad(
        fun, mpx.NoLossScaling(), policy=mpx.get_policy("float16")
    )(w)
    assert bool(result.finite)


def test_a_frozen_scaling_is_refused():
    scaling = mpx.DynamicLossScaling()
    with pytest.raises(ValueError, match="Pass `scaling` to that function"):
        jax.jit(mpx.filter_grad(total, scaling))(W)


@pytest.mark.parametrize("argnums", [True, "w", (0, 0), (), 0.5])
def test_bad_argnums(argnums):
    with unchecked(), pytest.raises(TypeError, match="argnums"):
        mpx.grad(total, mpx.NoLossScaling(), argnums)


def test_argnums_out_of_range_and_int_leaves():
    with pytest.raises(TypeError, match="by position"):
        mpx.grad(total, mpx.NoLossScaling(), 3)(W)
    with pytest.raises(TypeError, match="int32"):
        mpx.grad(total, mpx.NoLossScaling())(jnp.arange(3))


@pytest.mark.parametrize(
    "scaling", [mpx.NoLossScaling(), mpx.StaticLossScaling(4.0)], ids=["none", "static"]
)
def test_retries_need_a_scale_that_can_fall(scaling):
    with pytest.raises(ValueError, match="retries"):
        mpx.filter_grad(total, scaling, retries=1)(W)
