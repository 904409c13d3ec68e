"""`mpx.autocast` as a transform and decorator: arguments, results, names, errors."""

import collections
import concurrent.futures
import functools
import gc
import multiprocessing
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx

from ..helpers import unchecked_annotations
from .counting import BF16, F16, F32, count_products, relative_error


def product(w, x):
    """Multiplies."""
    return x @ w


def test_it_is_a_transform_and_a_decorator(inputs):
    decorated = mpx.autocast(dtype=jnp.float16)(product)
    for func, dtypes in (
        (mpx.autocast(product), BF16),
        (mpx.autocast(product, jnp.float16), F16),
        (mpx.autocast(product, "float16"), F16),
        (mpx.autocast()(product), BF16),
        (decorated, F16),
    ):
        assert count_products(func, *inputs) == {dtypes: 1}
        assert func.__name__ == "product" and func.__doc__ == "Multiplies."
        assert func.__wrapped__ is product


def test_weights_of_a_callable_tree_are_seen(getkey):
    model = eqx.nn.MLP(4, 4, 8, 2, key=getkey())
    x = jax.random.normal(getkey(), (4,))
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, parameter="*weight"))
    for func, args in (
        (mpx.autocast(model, rules=rules), (x,)),
        (mpx.autocast(lambda model, x: model(x), rules=rules), (model, x)),
        (mpx.autocast(type(model).__call__, rules=rules), (model, x)),
    ):
        assert relative_error(func(*args), model(x)) < 2e-2
        assert count_products(lambda x, f=func, a=args: f(*a[:-1], x), x) == {F32: 3}


def test_leaves_that_are_no_arrays_go_in_and_come_out(inputs):
    w, x = inputs

    def func(tree, flag, *, name):
        assert flag is True and name == "dense" and tree["n"] == 3
        return {"y": tree["x"] @ tree["w"], "name": name, "f": jnp.tanh, "none": None}

    out = mpx.autocast(func)({"x": x, "w": w, "n": 3}, True, name="dense")
    assert out["name"] == "dense" and out["f"] is jnp.tanh and out["none"] is None
    assert out["y"].dtype == jnp.float32


def test_results_keep_their_dtypes(inputs):
    w, x = inputs

    def func(w, x):
        return x @ w, (x @ w).astype(jnp.float16), (x @ w) > 0, jnp.argmax(x @ w), x

    cast, expected = mpx.autocast(func), jax.eval_shape(func, w, x)
    assert jax.eval_shape(cast, w, x) == expected
    assert [a.dtype for a in cast(w, x)] == [a.dtype for a in expected]


def test_wide_narrow_and_complex_numbers_are_not_touched(inputs):
    w, x = inputs
    with jax.enable_x64(True):

        def func(w, x):
            wide = x.astype(jnp.float64) @ w.astype(jnp.float64)
            turned = jnp.exp(1j * x.astype(jnp.complex64)) @ w.astype(jnp.complex64)
            narrow = x.astype(jnp.float8_e4m3fn).astype(jnp.float32)
            return wide, turned, narrow

        for got, expected in zip(mpx.autocast(func)(w, x), func(w, x), strict=True):
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected)
        assert count_products(mpx.autocast(product), w, x) == {BF16: 1}


def test_keys_and_integers_pass(getkey):
    def func(key, n, x):
        key, other = jax.random.split(key)
        return key, n + 1, x @ x + jax.random.uniform(other, (4, 4))

    key, x = getkey(), jax.random.normal(getkey(), (4, 4))
    got, expected = mpx.autocast(func)(key, 3, x), func(key, 3, x)
    assert np.array_equal(jax.random.key_data(got[0]), jax.random.key_data(expected[0]))
    assert got[1] == 4 and relative_error(got[2], expected[2]) < 1e-2


def test_a_precision_of_the_users_own_is_kept(inputs):
    def half(w, x):
        return (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)

    assert count_products(mpx.autocast(half), *inputs) == {F16: 1}
    exact = lambda w, x: jnp.matmul(x, w, precision="highest")  # noqa: E731
    assert count_products(mpx.autocast(exact), *inputs) == {F32: 1}
    with jax.default_matmul_precision("highest"):  # says nothing of this product
        assert count_products(mpx.autocast(product), *inputs) == {BF16: 1}


def test_it_traces_once_for_each_dtype(inputs):
    traces = []

    def func(w, x):
        traces.append(1)
        return x @ w

    for dtype in (jnp.bfloat16, jnp.float16):
        compiled = jax.jit(mpx.autocast(func, dtype))
        for _ in range(3):
            compiled(*inputs)
    assert len(traces) == 2


def test_transforms_outside_and_inside(inputs, checking_leaks):
    w, x = inputs

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    cast = mpx.autocast(loss)

    @jax.jit
    def gradients(w, x):
        batched = jax.vmap(jax.grad(cast), in_axes=(None, 0))(w, x[:, None])
        return jax.grad(loss)(w, x), [
            jax.grad(cast)(w, x),
            mpx.autocast(jax.grad(loss))(w, x),
            jax.grad(jax.checkpoint(cast))(w, x),
            batched.mean(0),
            jax.vjp(cast, w, x)[1](jnp.float32(1))[0],
            eqx.filter_grad(cast)(w, x),
        ]

    @jax.jit
    def tangents(w, x):
        return [jax.jvp(f, (w, x), (w, x)) for f in (cast, loss)]

    expected, found = gradients(w, x)
    for got in (*found, jax.grad(cast)(w, x)):
        assert got.dtype == jnp.float32
        assert relative_error(got, expected) < 2e-2
    assert relative_error(*tangents(w, x)) < 2e-2


def test_collectives_of_a_vmap_pass(inputs):
    w, x = inputs
    mapped = functools.partial(jax.vmap, in_axes=(None, 0), axis_name="batch")

    def func(w, row):
        y = row @ w
        return y - jax.lax.pmean(y, "batch")

    for cast in (mapped(mpx.autocast(func)), mpx.autocast(mapped(func))):
        assert relative_error(cast(w, x), mapped(func)(w, x)) < 2e-2


def test_layers_partials_and_bound_methods_are_functions(inputs):
    w, x = inputs

    class Model:
        def __call__(self, x):
            return x @ w

    class Layer(eqx.Module):
        dtype: Any = eqx.field(static=True, default=jnp.float32)

        def __call__(self, x):
            return x @ x.T

    for func in (functools.partial(product, w), Model(), Model().__call__, Layer()):
        assert count_products(mpx.autocast(func), x) == {BF16: 1}


def test_called_again_it_uses_what_jax_has_compiled(inputs):
    w, x = inputs
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    cast = mpx.autocast(lambda w, x: layer(w, layer(w, x)))
    first = cast(w, x)
    with jax.checking_leaks():
        assert np.array_equal(cast(w, x), first)

    def programs():
        jaxpr = jax.make_jaxpr(cast)(w, x)
        return [id(e.params["jaxpr"]) for e in jaxpr.eqns if e.primitive.name == "jit"]

    assert programs() == programs()


RULES = {
    "custom_vjp": lambda x: _with_rule(x @ x),
    "custom_jvp": lambda x: jax.nn.relu(x @ x),
    "remat": jax.checkpoint(lambda x: _with_rule(x @ x)),
}


@jax.custom_vjp
def _with_rule(x):
    return jnp.sin(x)


_with_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def programs_that_are_kept():
    """Of a function that makes a new jitted one at each call, as many do."""
    kept = collections.defaultdict(list)

    def call(rule, way):
        def loss(x):
            table = np.ones((2, 2), np.float32)  # a program holds what it closes over
            kept[rule, way].append(weakref.ref(table))
            return jnp.sum(jax.jit(lambda x: RULES[rule](x) * table)(x))

        cast = mpx.autocast(loss)
        func = cast if way == "call" else jax.grad(cast)
        for _ in range(3):
            func(jnp.ones((2, 2)))

    for rule in RULES:
        call(rule, "call")
        call(rule, "gradient")
    jax.clear_caches()
    gc.collect()
    assert len(kept) == 6 and all(len(found) >= 3 for found in kept.values())
    return [name for name, found in kept.items() if any(r() for r in found)]


@pytest.mark.slow
def test_a_program_is_kept_no_longer_than_its_function():
    # A process of its own: here the caches of all tests would be cleared, for 20 s.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(programs_that_are_kept).result() == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_give_way_in_promotion_as_they_did(dtype, inputs):
    """A weakly typed result must not widen what half precision it meets later."""

    def results(w, x, rate):
        y = x @ w
        count = jax.lax.fori_loop(0, 3, lambda i, n: n + 1, 0)
        chosen = jnp.where(y[0, 0] > 0, 1.0, 0.0)
        last, _ = jax.lax.scan(lambda c, _: (c * 2.0, None), 1.0, None, length=3)
        return y, 2.0 * rate, jnp.exp(rate), count, chosen, last, jnp.asarray(3)

    def weak(func):
        return [x.weak_type for x in func(*inputs, jnp.asarray(2.0))]

    func = mpx.autocast(results, dtype)
    expected = [False, True, True, True, True, True, True]
    assert weak(results) == expected
    assert weak(func) == expected
    assert weak(jax.jit(func)) == expected
    assert weak(functools.partial(jax.eval_shape, func)) == expected


def test_weakly_typed_results_are_differentiated_like_others(inputs):
    w, x = inputs
    rate = jnp.asarray(2.0)
    func = mpx.autocast(lambda rate, w, x: 2.0 * rate)
    assert jax.grad(func)(rate, w, x) == 2.0
    assert jax.jvp(lambda r: func(r, w, x), (rate,), (rate,))[1] == 4.0


# --- Errors ---------------------------------------------------------------------------

cast = mpx.autocast
WRONG = {
    TypeError: [
        (lambda: cast(jnp.float16), "keywords only.*dtype=jnp.floa"),
        (lambda: cast("bfloat16"), "got the dtype bfloat16"),
        (lambda: cast(3), "needs a function; got int 3"),
        (lambda: cast(product, jnp.int8), "got int8"),
        (
            lambda: cast(product, mpx.DelayedScaling()),
            r"needs a dtype here.*func, recipe=mpx.DelayedScaling\(\)\)`",
        ),
        (
            lambda: cast(product, mpx.DelayedScaling(margin=1)),
            r"recipe=mpx.DelayedScaling\(\.\.\.\)",
        ),
        (lambda: cast(product, mpx.MXFP8BlockScaling), "recipe=mpx.MX"),
        (lambda: cast(mpx.DelayedScaling()), "needs a function here"),
        (
            lambda: cast(product, recipe=mpx.DelayedScaling),
            r"not its class.*Call it: `recipe=mpx.DelayedScaling\(\)`",
        ),
        (lambda: cast(recipe=mpx.DelayedScaling), "not its class"),
        (lambda: cast(product, enabled="no"), "`enabled`.*str 'no'"),
        (lambda: cast(product, enabled=0), "True or False; got int 0"),
        (lambda: cast(product, strict="yes"), "`strict`.*True or Fa"),
        (lambda: cast(ambient="yes"), "`ambient`.*True or False"),
        (lambda: cast(jnp.dot, ambient=True), "got a function"),
    ],
    ValueError: [
        (lambda: cast(product, "float8_e4m3fn"), "float8_e4m3fn"),
        (lambda: cast(product, "half precision"), "needs a dtype; got"),
        (
            lambda: cast(product, residuals="tiny"),
            '`residuals` .* "loops" or "fast"; got',
        ),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "match"),
    [(error, *case) for error, cases in WRONG.items() for case in cases],
)
def test_wrong_arguments_are_errors(error, call, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        call()


def decides(model, images, *, scale=1.0):
    if jnp.sum(images @ model["w"]) > 0:
        return jnp.sum(images) * scale
    return jnp.sum(images)


@pytest.mark.parametrize(
    "made",
    [
        cast(decides),
        jax.jit(cast(decides)),
        jax.grad(cast(decides)),
        cast(functools.partial(decides, scale=2.0)),
        mpx.filter_grad(cast(decides), mpx.NoLossScaling()),
        mpx.explain(cast(decides)),
        mpx.explain(decides),
    ],
)
def test_an_error_of_tracing_names_the_function_of_the_user(made, inputs):
    """An `if` on a value: JAX says in which function, and on which arguments."""
    error = jax.errors.TracerBoolConversionError
    match = r"function decides at .*test_transform.py.* arguments model_w and images\."
    with pytest.raises(error, match=match):
        made({"w": inputs[0]}, inputs[1])


def test_an_error_of_tracing_names_the_method_of_a_layer(inputs):
    class Layer(eqx.Module):
        weight: jax.Array

        def __call__(self, images):
            return images if jnp.sum(images @ self.weight) > 0 else -images

    class Module(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(w)

        def __call__(self, images):
            return images if jnp.sum(images @ self.weight[...]) > 0 else -images

    def apply(model, images):
        return model(images)

    w, x = inputs
    for func, args, match in (
        (Layer(w), (x,), r"__call__ at .*transform.py.* weight and images\."),
        (apply, (Module(), x), "apply at .* model_weight and images"),
        (Module(), (x,), "function __call__ at .*test_transform"),
    ):
        with pytest.raises(jax.errors.TracerBoolConversionError, match=match):
            cast(func)(*args)
