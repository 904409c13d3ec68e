"""Functions of one array: values, gradients, dtypes, edges."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx.nn

from ..helpers import HALF, WIDE, assert_same_bits, slow_but
from ..registries import TRANSFORMS
from .cases import FUNCTIONS, WHERE, relative_error

# The rounding of one number: half a unit in the last place.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

by_name = pytest.mark.parametrize("name", FUNCTIONS)
in_half = pytest.mark.parametrize("dtype", HALF)
# Each function in one of both, which have one rule.
IN_HALF = list(zip(FUNCTIONS, itertools.cycle(HALF)))
by_name_in_half = pytest.mark.parametrize(("name", "dtype"), IN_HALF)


def numbers(getkey, dtype, shape=(4, 8), scale=3.0):
    return (scale * jax.random.normal(getkey(), shape)).astype(dtype)


def options_of(case):
    """Axes, and a mask where the function has one."""
    masked = {"axis": 1, "where": jnp.broadcast_to(WHERE, (4, 8))}
    return [{"axis": -1}, {"axis": 0}, *[masked] * case.with_where]


def results(funcs, *args):
    """Of several functions, compiled as one."""
    return jax.jit(lambda *args: [f(*args) for f in funcs])(*args)


def assert_near(found, expected, **tolerances):
    """Of numbers in half precision, which NumPy does not compare."""
    wide = (x.astype(jnp.float32) for x in (found, expected))
    np.testing.assert_allclose(*wide, **tolerances)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FUNCTIONS), *IN_HALF]
)
def test_values_are_those_of_jax_in_float32_rounded_once(name, dtype, getkey):
    case, x = FUNCTIONS[name], numbers(getkey, dtype)
    pairs = [case.pair(**options) for options in options_of(case)]
    mine, other = zip(*pairs, strict=True)
    if dtype == "float32":
        assert_same_bits(mine[0](x), other[0](x))  # eagerly
        assert_same_bits(results(mine, x), results(other, x))
    rounded = [mpx.force_full_precision(f, dtype) for f in other]
    assert_same_bits(results(mine, x), results(rounded, x))


@pytest.mark.parametrize(
    "name", slow_but(["log_softmax", "variance", "layer_norm"], FUNCTIONS)
)
def test_float32_has_jax_gradients(name, getkey):
    case, x = FUNCTIONS[name], numbers(getkey, jnp.float32)
    pulled = []
    for options in options_of(case):
        mine, other = case.pair(**options)
        g = numbers(getkey, jnp.float32, jax.eval_shape(mine, x).shape)
        if "where" in options and name == "log_softmax":
            g = jnp.where(options["where"], g, 0)
        pulled += [lambda x, f=f, g=g: jax.vjp(f, x)[1](g)[0] for f in (mine, other)]
    found = results(pulled, x)
    for mine, other in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-6, atol=2e-6)


@functools.cache
def exact_pullback_of(name):
    _, other = FUNCTIONS[name].pair(axis=-1)
    return jax.jit(lambda x, g: jax.vjp(other, x)[1](g)[0])


@pytest.mark.parametrize(
    ("name", "dtype"), slow_but(IN_HALF, itertools.product(FUNCTIONS, HALF))
)
def test_gradients_lose_at_most_one_rounding(name, dtype, getkey):
    """Against float64, no worse than casting, but for one half-precision rounding."""
    mine, other = FUNCTIONS[name].pair(axis=-1)
    cast = mpx.force_full_precision(other, dtype)
    pullbacks = jax.jit(lambda x, g: [jax.vjp(f, x)[1](g)[0] for f in (mine, cast)])
    for scale, shift in ((0.1, 0), (30, 0), (1, 2e4)):
        x = numbers(getkey, dtype, (4, 64), scale) + jnp.asarray(shift, dtype)
        g = numbers(getkey, dtype, jax.eval_shape(mine, x).shape)
        found, by_cast = pullbacks(x, g)
        with jax.enable_x64(True):
            wide, wide_g = (np.asarray(a, np.float64) for a in (x, g))
            exact = exact_pullback_of(name)(wide, wide_g)
            assert exact.dtype == jnp.float64
        assert found.dtype == dtype
        check_rounding(name, found, by_cast, exact, wide, wide_g)


def check_rounding(name, found, by_cast, exact, wide, wide_g):
    error, allowed = relative_error(found, exact), relative_error(by_cast, exact)
    size = 1.0
    if name == "softmax":  # what cancels in p (g - sum of p g) was rounded in p
        p = np.exp(wide - wide.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        cancelled = p * np.sum(p * np.abs(wide_g), -1, keepdims=True)
        size += cancelled.max() / np.abs(exact).max()
    assert error <= allowed + ROUNDING[found.dtype.name] * size


@by_name
def test_the_result_has_the_dtype_of_the_input(name):
    def traced(x):
        out, pullback = jax.vjp(FUNCTIONS[name].mine, x)
        return out, pullback(out)[0]

    with jax.enable_x64(True):
        for dtype in (*WIDE, "float64"):
            x = jax.ShapeDtypeStruct((4, 8), dtype)
            assert {y.dtype for y in jax.eval_shape(traced, x)} == {x.dtype}


def test_float64_is_computed_in_float64(getkey):
    with jax.enable_x64(True):
        x = jax.random.normal(getkey(), (4, 8), jnp.float64)
        pairs = [case.pair(axis=-1) for case in FUNCTIONS.values()]
        mine, other = zip(*pairs, strict=True)
        for found, exact in zip(results(mine, x), results(other, x), strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-13)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip((n for n, c in FUNCTIONS.items() if c.with_where), itertools.cycle(HALF))],
)
def test_a_result_in_another_dtype(name, dtype, getkey):
    case, x = FUNCTIONS[name], numbers(getkey, dtype)
    out, pullback = jax.vjp(lambda x: case.mine(x, axis=-1, dtype="float32"), x)
    assert_same_bits(out, case.jax(x.astype(jnp.float32), axis=-1))
    assert pullback(out)[0].dtype == dtype
    with pytest.raises(ValueError, match=f"`mpx.nn.{name}"):
        case.mine(x, dtype="no dtype")


# One of each kind of rule: of the result, of rows, of parameters too.
@pytest.mark.parametrize(
    ("name", "transform"),
    [*zip(itertools.cycle(["softmax", "variance", "layer_norm"]), TRANSFORMS)],
)
def test_transforms_give_the_same(name, transform, getkey):
    mine, _ = FUNCTIONS[name].pair(axis=-1)

    x = numbers(getkey, "bfloat16")
    g = numbers(getkey, "bfloat16", jax.eval_shape(mine, x).shape)

    def gradient(x):
        return jax.vjp(mine, x)[1](g)[0]

    expected, transformed = jax.jit(gradient)(x), TRANSFORMS[transform](gradient)
    found = (transformed if transform == "eager" else jax.jit(transformed))(x)
    assert found.dtype == expected.dtype == jnp.bfloat16
    # Compilers may add in another order before the one rounding at the end.
    assert_near(found, expected, rtol=2**-7, atol=1e-5)


@by_name_in_half
def test_forward_mode_is_the_transpose_of_reverse_mode(name, dtype, getkey):
    mine, _ = FUNCTIONS[name].pair(axis=-1)
    x, dot = numbers(getkey, dtype), numbers(getkey, dtype)
    g = numbers(getkey, dtype, jax.eval_shape(mine, x).shape)
    forward = lambda x, dot, g: jax.jvp(mine, (x,), (dot,))[1]  # noqa: E731
    reverse = lambda x, dot, g: jax.vjp(mine, x)[1](g)[0]  # noqa: E731
    out_dot, x_bar = results([forward, reverse], x, dot, g)
    wide = [np.asarray(a, np.float64) for a in (g, out_dot, x_bar, dot)]
    assert out_dot.dtype == dtype
    left, right = wide[0] * wide[1], wide[2] * wide[3]
    size = np.abs(left).sum() + np.abs(right).sum()
    assert abs(left.sum() - right.sum()) <= 2 * ROUNDING[dtype] * size


@pytest.mark.parametrize("name", slow_but([], FUNCTIONS))
def test_second_derivatives(name, getkey):
    """Through the rule for half precision, which float32 alone may not take."""
    mine, other = FUNCTIONS[name].pair(axis=-1)
    x = numbers(getkey, jnp.bfloat16, (1, 5), 1.0)

    def second(f, x):
        return jax.jacfwd(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))(x)

    expected = second(other, x.astype(jnp.float32))
    assert_near(second(mine, x), expected, rtol=0.1, atol=0.05)


@by_name_in_half
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])  # no rows, and empty rows
def test_empty_axes_are_as_in_jax(name, dtype, shape):
    mine, other = FUNCTIONS[name].pair(axis=-1)
    if name == "layer_norm":  # Equinox's cannot be empty
        other = lambda x: jax.nn.standardize(x, axis=-1)  # noqa: E731
    funcs = mine, mpx.force_full_precision(other, dtype)
    found, expected = results(funcs, jnp.ones(shape, dtype))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    # As float32: the sign bit of a NaN may differ, and numpy knows no bfloat16 NaN.
    assert_near(found, expected, rtol=0)


@in_half
def test_softmax_of_rows_that_are_masked_whole(dtype):
    lowest = jnp.full(8, jnp.finfo(dtype).min, dtype)
    assert_same_bits(mpx.nn.softmax(lowest), jnp.full(8, 1 / 8, dtype))
    assert jnp.isnan(mpx.nn.softmax(jnp.full(8, -jnp.inf, dtype))).all()  # as JAX
    nothing = mpx.nn.softmax(lowest, where=jnp.zeros(8, bool))
    assert_same_bits(nothing, jnp.zeros(8, dtype))
    assert mpx.nn.logsumexp(lowest, where=jnp.zeros(8, bool)) == -jnp.inf
    x = jnp.where(jnp.arange(8) < 3, 1, -jnp.inf).astype(dtype)
    gradient = jax.grad(lambda x: jnp.sum(mpx.nn.softmax(x)[:1]))(x)
    assert jnp.isfinite(gradient).all() and (gradient[3:] == 0).all()


@in_half
def test_large_scores(dtype):
    x = jnp.array([1e4, 1e4, 0.0], dtype)
    np.testing.assert_array_equal(mpx.nn.softmax(x), jnp.array([0.5, 0.5, 0], dtype))
    assert mpx.nn.logsumexp(x, dtype="float32") == x[0].astype("float32") + np.log(2)
    logs = mpx.nn.log_softmax(x)
    assert logs[2] == -x[0] and abs(float(logs[0]) + np.log(2)) < 2e-3


@pytest.mark.parametrize(
    ("dtype", "value"), [("bfloat16", 0.0), ("bfloat16", 1.0), ("float16", 6e4)]
)
def test_constant_rows(dtype, value):
    x = jnp.full((2, 8), value, dtype)
    assert_same_bits(mpx.nn.layer_norm(x), jnp.zeros((2, 8), dtype))
    assert (mpx.nn.variance(x) == 0).all()
    assert_near(mpx.nn.rms_norm(x), jnp.float32(value != 0), rtol=1e-2)
    for norm in (mpx.nn.layer_norm, mpx.nn.rms_norm, mpx.nn.variance):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(norm(x))))(x)  # noqa: B023
        assert np.isfinite(np.float32(gradient)).all()


def test_sums_that_float16_does_not_hold():
    x = jnp.full(4096, 6e4, jnp.float16)
    assert mpx.nn.mean(x) == 6e4
    spread = jnp.array([6e4, -6e4], jnp.float16)
    assert mpx.nn.variance(spread, dtype="float32") == float(spread[0]) ** 2
    np.testing.assert_array_equal(mpx.nn.layer_norm(spread), [1, -1])


def test_options_of_reductions(getkey):
    x = numbers(getkey, jnp.float16)
    for name in ("mean", "variance", "logsumexp"):
        f = FUNCTIONS[name].mine
        assert f(x).shape == () and f(x, (0, 1), keepdims=True).shape == (1, 1)
    f = lambda x: mpx.nn.variance(x, axis=1, correction=1)  # noqa: E731
    other = lambda x: jnp.var(x, axis=1, correction=1)  # noqa: E731
    corrected, expected = f(x), mpx.force_full_precision(other, x.dtype)
    assert_same_bits(corrected, expected(x))
    g = jnp.ones_like(corrected)
    found, by_cast = (jax.vjp(f, x)[1](g)[0] for f in (f, expected))
    np.testing.assert_allclose(found, by_cast, rtol=2e-3)


def test_integers_become_float32():
    assert mpx.nn.softmax(jnp.arange(3)).dtype == jnp.float32
    assert mpx.nn.mean(jnp.arange(3)) == 1.0


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "bfloat16")],
)
def test_norms_have_the_dtype_of_the_input(dtype, parameters, getkey):
    x = numbers(getkey, dtype)
    w, b = (numbers(getkey, parameters, (8,)) for _ in range(2))
    out, pullback = jax.vjp(jax.jit(mpx.nn.layer_norm), x, w, b)
    assert out.dtype == dtype
    assert [g.dtype for g in pullback(out)] == [x.dtype, w.dtype, b.dtype]
    wide = [a.astype("float32") for a in (x, w, b)]
    expected = mpx.nn.layer_norm(wide[0]) * wide[1][None] + wide[2][None]
    assert_same_bits(out, expected.astype(dtype))


def test_gradients_of_norm_parameters_are_summed_in_float32():
    x = jnp.tile(jnp.array([1.0, -1.0], jnp.bfloat16), (4096, 1))
    out, pullback = jax.vjp(mpx.nn.rms_norm, x, jnp.ones(2), jnp.zeros(2))
    _, w_bar, b_bar = pullback(jnp.ones_like(out))
    np.testing.assert_allclose(w_bar, [4096, -4096], rtol=1e-4)
    np.testing.assert_array_equal(b_bar, [4096, 4096])


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    ("argument", "shape"), [("weight", (7,)), ("bias", (2, 4, 8)), ("bias", (3, 8))]
)
def test_wrong_shapes_of_norm_parameters(name, argument, shape):
    with pytest.raises(ValueError, match=f"`{argument}` of `mpx.nn.{name}"):
        getattr(mpx.nn, name)(jnp.ones((4, 8)), **{argument: jnp.ones(shape)})
