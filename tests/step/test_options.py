"""The options of the gradient functions, and what is refused."""

import concurrent.futures
import dataclasses
import inspect
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._step import Options

from ..helpers import HALF, unchecked_annotations, unscaled
from . import cases
from .cases import BFLOAT16, FLOAT16, FUNCTIONS, gradient, same_bits, total

pytestmark = unscaled
NONE = mpx.NoLossScaling()


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
    call = mpx.filter_grad(fun, NONE, policy=mpx.get_policy(BFLOAT16), keep=keep)
    call(jnp.ones(2), data, time=jnp.ones(()))
    dtypes = dict.fromkeys("wx", jnp.bfloat16) | dict.fromkeys(("mask", "t"), "float32")
    assert seen == dtypes
    assert {"args[0]", "args[1]['x']", "kwargs['time']"} <= set(paths)


def test_model_state_is_not_cast():
    def fun(model, state, variables):
        mean = state.get(model.index)
        assert mean.dtype == jnp.float32 and model.weight.dtype == jnp.float16
        assert variables["batch_stats"]["norm"]["mean"].dtype == jnp.float32
        assert variables["bn/~/mean_ema"]["average"].dtype == jnp.float32
        assert variables["params"].dtype == jnp.float16
        return total(model.weight), state.set(model.index, mean + 1)

    variables = {
        "batch_stats": {"norm": {"mean": jnp.ones(2)}},
        "bn/~/mean_ema": {"average": jnp.ones(2)},
        "params": jnp.ones(2),
    }
    model, state = eqx.nn.make_with_state(cases.Counter)(jnp.ones(2))
    call = gradient(FLOAT16, NONE, fun, has_aux=True)
    assert float(call(model, state, variables).aux.get(model.index)) == 1.0


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

    @eqx.filter_jit
    def both(scaling, *args):
        half = gradient(BFLOAT16, scaling, fun, has_aux=True)
        return half(*args), gradient(None, None, fun, has_aux=True)(*args)

    half, full = both(NONE, model, state, cases.uniform(0, 8, 3))
    assert cases.dtypes(eqx.filter(half.aux, eqx.is_inexact_array)) <= {"float32"}
    for a, b in zip(jax.tree.leaves(half.aux), jax.tree.leaves(full.aux), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_policy_as_text_and_as_object():
    args = cases.params(), *cases.batch()
    with unchecked_annotations():
        text = mpx.filter_grad(cases.loss, NONE, policy=BFLOAT16)(*args)
    policy = gradient(mpx.get_policy(BFLOAT16), NONE)(*args)
    assert same_bits(text.grads, policy.grads)
    with unchecked_annotations(), pytest.raises(ValueError, match="float15"):
        mpx.filter_grad(cases.loss, NONE, policy="compute=float15")


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


is_settable = jax.__version_info__ >= (0, 10, 1)


@pytest.mark.skipif(not is_settable, reason="needs jax 0.10.1")
def test_the_setter_reaches_functions_that_were_built_and_compiled_before():
    """In MPX it changes nothing."""
    fun = lambda w: (total(w), w)  # noqa: E731
    call = mpx.filter_grad(fun, mpx.NoLossScaling(skip=False), has_aux=True)
    step = jax.jit(lambda w: call(w).aux)
    assert step(jnp.ones(2)).dtype == call(jnp.ones(2)).aux.dtype == jnp.float16
    mpx.set_half_precision_datatype("bfloat16")
    try:
        assert step(jnp.ones(2)).dtype == call(jnp.ones(2)).aux.dtype == jnp.bfloat16
    finally:
        mpx.set_half_precision_datatype("float16")
    assert step(jnp.ones(2)).dtype == call(jnp.ones(2)).aux.dtype == jnp.float16


@pytest.mark.skipif(is_settable, reason="needs jax 0.10.0")
def test_the_setter_says_that_this_jax_has_none():
    with pytest.raises(RuntimeError, match="needs jax 0.10.1 or later"):
        mpx.set_half_precision_datatype("bfloat16")


def test_two_threads_have_their_own_dtype():
    def work(name):
        with mpx.half_precision(name):
            barrier.wait()
            fun = lambda w: (total(w), w)  # noqa: E731
            return str(mpx.filter_grad(fun, NONE, has_aux=True)(W).aux.dtype)

    barrier = threading.Barrier(2, timeout=60)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, HALF)) == list(HALF)


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 2), (2, 0)])
def test_argnums(argnums):
    def fun(a, b, c, *, factor):
        return total(a["x"] * b) * factor + total(c**2)

    args = ({"x": jnp.array([1.0, 2.0])}, jnp.array([3.0, 4.0]), jnp.array([5.0, 6.0]))
    form = mpx.value_and_grad(fun, mpx.DynamicLossScaling(4.0), argnums)
    result = form(*args, factor=2.0)
    value, grads = jax.value_and_grad(fun, argnums)(*args, factor=2.0)
    assert same_bits(result.grads, grads) and float(result.value) == float(value)


def test_filter_grad_leaves_out_what_is_no_float():
    model = {"w": jnp.ones(2), "n": jnp.arange(2), "name": "m", "f": jnp.tanh, "x": 1.0}
    fun = lambda m: total(m["f"](m["w"])) + 0 * m["x"]  # noqa: E731
    grads = mpx.filter_grad(fun, NONE)(model).grads
    assert {k for k, v in grads.items() if v is not None} == {"w"}


@pytest.mark.parametrize(("retries", "good"), [(0, False), (2, False), (3, True)])
@pytest.mark.parametrize(("jit", "accumulate"), [(False, 1), (True, 1), (False, 2)])
def test_retries(retries, good, jit, accumulate):
    """A gradient of 15 overflows float16 at 2**15, 2**14 and 2**13, not at 2**12."""

    def call(w, scaling):
        fun = lambda w, x: total(w * 15.0) + 0 * total(x)  # noqa: E731
        options = {"retries": retries, "accumulate": accumulate}
        return gradient(FLOAT16, scaling, fun, **options)(w, jnp.ones(4))

    call = jax.jit(call) if jit else call
    result = call(W, mpx.DynamicLossScaling(2.0**15))
    assert bool(result.finite) is good
    assert float(result.value) == 30.0
    assert int(result.scaling.steps) == 1
    assert int(result.scaling.skipped) == (not good)
    tried_last = 2.0 ** (15 - retries)
    assert float(result.scaling.loss_scale) == (tried_last if good else tried_last / 2)
    if good:
        assert same_bits(result.grads, jnp.full(2, 15.0))


W, STATIC = jnp.ones(2), mpx.StaticLossScaling(4.0)


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
        # No scale can fall.
        (total, {"scaling": NONE, "retries": 1}, ValueError, "retries"),
        (total, {"scaling": STATIC, "retries": 1}, ValueError, "retries"),
    ],
)
def test_bad_losses_and_options(fun, options, error, match):
    options = {"scaling": mpx.DynamicLossScaling(), **options}
    with unchecked_annotations(), pytest.raises(error, match=match):
        mpx.filter_grad(fun, **options)(W)


@pytest.mark.parametrize("scaling", [1.0, 8, "dynamic", jnp.ones(()), None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_scaling_that_is_none(name, scaling):
    with unchecked_annotations():
        with pytest.raises(TypeError, match=f"`mpx.{name}`.*must be a loss scaling"):
            FUNCTIONS[name](total, scaling)


@pytest.mark.parametrize("model", [{}, jnp.arange(3), "model"])
def test_nothing_to_differentiate(model):
    with pytest.raises(ValueError, match="no floating"):
        mpx.filter_grad(lambda m: 0.0, NONE)(model)


def test_float16_weights_are_refused_unless_asked_for():
    """Row 21."""
    w = {"layer": jnp.ones(2, jnp.float16)}
    fun = lambda w: total(w["layer"])  # noqa: E731
    with pytest.raises(ValueError, match=r"float16\[2\] at `.*\['layer'\]`"):
        mpx.filter_grad(fun, NONE)(w)
    half = mpx.filter_grad(fun, NONE, policy=mpx.get_policy("float16"))
    assert bool(half(w).finite)


def test_a_frozen_scaling_is_refused():
    with pytest.raises(ValueError, match="Pass `scaling` to that function"):
        jax.jit(mpx.filter_grad(total, mpx.DynamicLossScaling()))(W)


@pytest.mark.parametrize("argnums", [True, "w", (0, 0), (), 0.5])
def test_bad_argnums(argnums):
    with unchecked_annotations(), pytest.raises(TypeError, match="argnums"):
        mpx.grad(total, NONE, argnums)


def test_argnums_out_of_range_and_int_leaves():
    with pytest.raises(TypeError, match="by position"):
        mpx.grad(total, NONE, 3)(W)
    with pytest.raises(TypeError, match="int32"):
        mpx.grad(total, NONE)(jnp.arange(3))


NNX = mpx.nnx.grad, mpx.nnx.value_and_grad, mpx.nnx.blame


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), mpx.blame, *NNX])
def test_each_option_of_a_signature_is_one_that_is_read(function):
    """`Options.of` takes them from the arguments by name."""
    known = {field.name for field in dataclasses.fields(Options)}
    own = {"func", "fun", "scaling", "argnums", "above"}
    named = inspect.signature(function).parameters.keys() - own
    assert named - known == set()
    assert {"has_aux", "policy", "keep", "accumulate", "accumulate_dtype"} <= named
