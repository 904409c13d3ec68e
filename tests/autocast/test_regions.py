"""Regions inside of transformed functions, ambient settings around calls."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.autocast.counting import count_products, products, relative_error

F16, BF16, F32 = (("float16",) * 2, ("bfloat16",) * 2, ("float32",) * 2)


@pytest.fixture
def inputs(getkey):
    return jax.random.normal(getkey(), (4, 4)), jax.random.normal(getkey(), (4, 4))


def order(func, *args):
    return [dtypes for dtypes, _ in products(func, *args)]


def test_regions_follow_and_nest(inputs):
    def func(w, x):
        x = x @ w
        with mpx.autocast(enabled=False):
            x = x @ w
            with mpx.autocast(enabled=True, dtype=jnp.float16):
                x = x @ w
            x = x @ w
        with mpx.autocast(dtype=jnp.float16):
            x = x @ w
        return x @ w

    expected = [BF16, F32, F16, F32, F16, BF16]
    cast = mpx.autocast(func)
    assert order(cast, *inputs) == expected
    assert relative_error(cast(*inputs), func_without_regions(6)(*inputs)) < 2e-2


def func_without_regions(count):
    def func(w, x):
        for _ in range(count):
            x = x @ w
        return x

    return func


def off(w, x):
    with mpx.autocast(enabled=False):
        return x @ w


PROGRAMS = {
    "jit": lambda w, x: jax.jit(off)(w, x),
    "around a jit": lambda w, x: off_around(jax.jit(jnp.dot), w, x),
    "scan": lambda w, x: jax.lax.scan(lambda c, _: (off(w, c), 0), x, length=1)[0],
    "around a scan": lambda w, x: off_around(
        lambda w, x: jax.lax.scan(lambda c, _: (c @ w, 0), x, length=1)[0], w, x
    ),
    "while": lambda w, x: jax.lax.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, off(w, c[1])), (0, x)
    )[1],
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, off, lambda w, x: x, w, x),
    "remat": lambda w, x: jax.checkpoint(off)(w, x),
    "vmap": lambda w, x: jax.vmap(off, in_axes=(None, 0))(w, x),
    "gradient": lambda w, x: jax.grad(lambda w: off(w, x).sum())(w),
}


def off_around(func, w, x):
    with mpx.autocast(enabled=False):
        return func(w, x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_region_holds_everywhere(inputs, name):
    assert set(count_products(mpx.autocast(PROGRAMS[name]), *inputs)) == {F32}


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"while", "gradient"}))
def test_a_region_holds_in_gradients(inputs, name):
    loss = lambda w, x: PROGRAMS[name](w, x).sum()  # noqa: E731
    for func in (jax.grad(mpx.autocast(loss)), mpx.autocast(jax.grad(loss))):
        assert set(count_products(func, *inputs)) == {F32}


def test_a_region_in_a_derivative_rule(inputs):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(saved, g):
        with mpx.autocast(enabled=False):
            return g @ saved[1].T, saved[0].T @ g

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    loss = mpx.autocast(lambda w, x: product(x, w).sum())
    assert count_products(jax.grad(loss, (0, 1)), *inputs) == {BF16: 1, F32: 2}


def test_a_region_is_a_decorator_of_what_is_called_inside(inputs):
    inner = mpx.autocast(dtype=jnp.float16)(lambda w, x: x @ w)
    outer = mpx.autocast(lambda w, x: inner(w, x) @ w)
    assert order(outer, *inputs) == [F16, BF16]


def test_the_inner_transform_wins(inputs):
    def func(w, x):
        return jnp.tanh(jax.nn.softmax(x @ w) @ w + x) @ w

    once = mpx.autocast(func, jnp.float16)
    twice = mpx.autocast(once)
    assert order(twice, *inputs) == [F16] * 3
    assert np.array_equal(once(*inputs), twice(*inputs))


def test_where_nothing_is_transformed_a_region_raises(inputs):
    with pytest.raises(ValueError, match="here none is.*ambient=True"):
        off(*inputs)
    with pytest.raises(ValueError, match="here none is"):
        jax.jit(off)(*inputs)


def test_a_function_jitted_inside_is_not_used_outside(inputs):
    compiled = jax.jit(off)
    mpx.autocast(compiled)(*inputs)
    with pytest.raises(ValueError, match="here none is"):
        compiled(*inputs)


def test_rules_cannot_be_said_in_a_region(inputs):
    def func(w, x):
        with mpx.autocast(rules=mpx.Rules()):
            return x @ w

    with pytest.raises(TypeError, match="`rules` of `mpx.autocast` cannot be set"):
        mpx.autocast(func)(*inputs)


def test_ambient_settings_hold_for_functions_that_were_not_told(inputs):
    func = mpx.autocast(lambda w, x: x @ w)
    told = mpx.autocast(lambda w, x: x @ w, jnp.bfloat16)
    with mpx.autocast(dtype=jnp.float16, ambient=True):
        assert order(func, *inputs) == [F16] and order(told, *inputs) == [BF16]
        with mpx.autocast(enabled=False, ambient=True):
            assert order(func, *inputs) == [F32]
        assert order(func, *inputs) == [F16]
        assert type(mpx.init_scaling(func, *inputs)) is mpx.DynamicLossScaling
    assert order(func, *inputs) == [BF16]


def test_ambient_settings_are_part_of_the_cache_key(inputs):
    traces = []

    def func(w, x):
        traces.append(1)
        return (x @ w).astype(jnp.float32)

    w, x = inputs
    compiled = jax.jit(mpx.autocast(func))
    outside = compiled(w, x)
    for _ in range(2):
        with mpx.autocast(enabled=False, ambient=True):
            assert np.array_equal(compiled(w, x), x @ w)
        assert np.array_equal(compiled(w, x), outside)
    assert len(traces) == 2 and not np.array_equal(outside, x @ w)


def test_ambient_settings_are_of_one_thread(inputs):
    func = mpx.autocast(lambda w, x: x @ w)
    found = []
    with mpx.autocast(dtype=jnp.float16, ambient=True):
        thread = threading.Thread(target=lambda: found.append(order(func, *inputs)))
        thread.start()
        thread.join()
    assert found == [[BF16]]


def test_ambient_is_not_for_a_function():
    with pytest.raises(TypeError, match="got a function"):
        mpx.autocast(jnp.dot, ambient=True)


# --- The text of a scope of the user's says nothing to mpx --------------------------

NAMES = [
    "transpose",
    "jvp",
    "mpx.autocast(enabled=False)",
    "mpx:dot_general!half!declared!as the user says!!",
    "mpx-island:1:2:3",
]


@pytest.mark.parametrize(
    "recipe", [None, pytest.param(mpx.Float8CurrentScaling(), marks=pytest.mark.slow)]
)
def test_a_scope_changes_nothing_whatever_its_name(inputs, recipe):
    x, w = inputs

    def told(name):
        def loss(w, x):
            def layer(x):
                with jax.named_scope(name):
                    return jax.nn.softmax(jax.nn.gelu(x @ w))

            return jnp.sum((layer(layer(x)) @ w) ** 2)

        gradient = jax.grad(mpx.autocast(loss, recipe=recipe))
        report = mpx.explain(gradient)(w, x)
        operations = [
            (o.primitive, o.precision, o.rule, o.reason, o.phase)
            for o in report.operations
        ]
        islands = [
            (i.primitives, i.bytes_before, i.bytes_after) for i in report.islands
        ]
        return str(jax.make_jaxpr(gradient)(w, x)), operations, islands

    expected = told("layer")
    for name in NAMES:
        for found, other in zip(told(name), expected, strict=True):
            assert found == other, name
