"""Regions inside of transformed functions, ambient settings around calls."""

import functools
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
import mpx.nn

from .counting import BF16, F16, F32, count_products, products, relative_error


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

    cast = mpx.autocast(func)
    assert order(cast, *inputs) == [BF16, F32, F16, F32, F16, BF16]
    w, x = inputs
    assert relative_error(cast(w, x), x @ w @ w @ w @ w @ w @ w) < 2e-2


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


# --- Switched off: float32, everywhere ------------------------------------------------


W, X = jnp.eye(4), jnp.ones((2, 4))
OFF = functools.partial(mpx.autocast, enabled=False)


def loss(w, x):
    return jnp.mean(x @ w)


def dtypes_in(func, *args):
    return set(count_products(func, *(args or (W, X))))


def control_of(func):
    """Its gradient in full precision, as a run beside one in half precision has it."""
    gradient = mpx.filter_grad(func, None, use_mixed_precision=False)
    return lambda *args: gradient(*args).grads


def test_switched_off_the_program_is_the_one_that_was_written():
    plain = str(jax.make_jaxpr(loss)(W, X))
    for func in (OFF(loss), OFF(loss, jnp.float16), OFF(loss, rules=mpx.Rules())):
        assert str(jax.make_jaxpr(func)(W, X)) == plain
    assert OFF(loss).__name__ == "loss"
    module = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    np.testing.assert_array_equal(OFF(module)(X[0]), module(X[0]))
    off, written = mpx.explain(OFF(loss))(W, X), mpx.explain(loss)(W, X)
    assert str(off) == str(written) and off.totals == written.totals


def test_switched_off_values_may_decide_what_runs():
    """Nothing is traced that would not be anyway."""
    func = OFF(lambda w, x: loss(w, x) if x.sum() > 0 else w.sum())
    assert func(W, X) == 1


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("grad", [mpx.filter_grad, mpx.grad])
def test_switched_off_gradient_functions_cast_nothing(grad, half):
    with mpx.half_precision(half):
        func = OFF(loss, jnp.float16)
        step = lambda w, x: grad(func, mpx.NoLossScaling())(w, x).grads  # noqa: E731
        assert dtypes_in(step) == {F32}
        assert type(mpx.init_scaling(func, W, X)) is mpx.NoLossScaling


def test_a_switch_changes_the_precision_and_nothing_else():
    def step(w, x, *, is_mixed):
        func = mpx.autocast(loss, jnp.float16, enabled=is_mixed)
        scaling = mpx.init_scaling(func, w, x)
        return mpx.filter_value_and_grad(func, scaling)(w, x).grads

    assert dtypes_in(functools.partial(step, is_mixed=True)) == {F16}
    assert dtypes_in(functools.partial(step, is_mixed=False)) == {F32}
    func = mpx.autocast(loss, jnp.float16, enabled=True)
    assert dtypes_in(control_of(func)) == {F32}


def test_switched_off_in_a_lambda_it_is_not_cast_in_silence():
    hidden = lambda w, x: OFF(loss)(w, x)  # noqa: E731
    with pytest.raises(ValueError, match='needs uncast inputs.*policy="full"'):
        mpx.filter_grad(hidden, mpx.DynamicLossScaling())(W, X)


@pytest.mark.parametrize(
    "region", [{"enabled": False}, {"recipe": None}, {"dtype": "float16"}]
)
def test_switched_off_regions_inside_have_no_effect(region):
    def func(w, x):
        with mpx.autocast(**region):
            x = x @ w
        return jnp.mean(x @ w)

    assert dtypes_in(OFF(func)) == {F32}
    assert dtypes_in(jax.jit(OFF(func))) == {F32}
    assert dtypes_in(control_of(mpx.autocast(func))) == {F32}
    with mpx.autocast(enabled=False, ambient=True):
        assert dtypes_in(mpx.autocast(func)) == {F32}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_switched_off_a_region_inside_that_says_enabled_wins(wrap):
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
    assert dtypes_in(control_of(OFF(func))) == {F32}


def test_functions_inside_are_switched_off_by_themselves():
    inner, off = mpx.autocast(loss), OFF(loss)
    assert dtypes_in(OFF(lambda w, x: inner(w, x))) == {BF16}
    decorated = mpx.autocast(enabled=False)(lambda w, x: loss(w, x))
    for one in (off, decorated):
        outer = mpx.autocast(lambda w, x, one=one: one(w, x @ w))
        assert count_products(outer, W, X) == {F32: 1, BF16: 1}


def test_recipes_are_switched_off_too():
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
    assert not count_low(lambda *args: control_of(with_layer)(*args).weight)
    # A recipe with a state has none, and needs none.
    delayed = OFF(loss, recipe=mpx.DelayedScaling())
    assert type(mpx.init_scaling(delayed, w, x)) is mpx.NoLossScaling
    assert delayed(w, x) == loss(w, x)


@pytest.mark.slow
def test_switched_off_weights_in_eight_bits():
    model = mpx.quantization.quantize_weights({"w": jnp.eye(64)})
    func = lambda model, x: jnp.mean(x @ model["w"])  # noqa: E731
    x = jnp.ones((2, 64))
    assert OFF(func)(model, x) == 1
    grads = mpx.filter_grad(OFF(func), mpx.NoLossScaling())(model, x).grads
    assert grads["w"].dtype == jnp.float32


@pytest.mark.third_party
def test_switched_off_objects_of_nnx_change_as_ever():
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    OFF(lambda model, x: model(x))(model, X)
    assert model.mean[...].tolist() == pytest.approx([0.01] * 4)

    def func(model, x):
        with mpx.autocast(enabled=True):
            return model(x)

    with pytest.raises(ValueError, match="enabled=False.*NNX objects"):
        OFF(func)(model, X)
