"""What goes wrong in mixed precision, each as a program that would show it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.autocast.counting import count_products, primitives, relative_error

HALF = [jnp.float16, jnp.bfloat16]
half_dtypes = pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])


@half_dtypes
@pytest.mark.parametrize("fill", [float(jnp.finfo(jnp.float32).min), -1e9])
def test_a_fully_masked_softmax_is_uniform(getkey, dtype, fill):
    q = jax.random.normal(getkey(), (4, 8))

    def attend(q):
        scores = jnp.where(jnp.zeros((4, 4), bool), q @ q.T, fill)
        return jax.nn.softmax(scores) @ q

    got = mpx.autocast(attend, dtype)(q)
    assert relative_error(got, attend(q)) < 1e-2


@half_dtypes
@pytest.mark.parametrize("small", [1e-8, 1e-6])
def test_a_small_constant_is_not_lost(getkey, dtype, small):
    x = jax.random.normal(getkey(), (4, 8)) * 1e-6
    divide = lambda x: 1.0 / (jnp.abs(x @ jnp.zeros((8, 4))) + small)  # noqa: E731
    got = mpx.autocast(divide, dtype)(x)
    assert relative_error(got, divide(x)) < 1e-6


@half_dtypes
def test_no_product_mixes_dtypes_on_the_way_back(getkey, dtype):
    w = jax.random.normal(getkey(), (8, 8))
    x = jax.random.normal(getkey(), (4, 8))

    def loss(w, x):
        logits = jnp.matmul(x @ w, w, preferred_element_type=jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits))

    counts = count_products(jax.grad(mpx.autocast(loss, dtype)), w, x)
    name = jnp.dtype(dtype).name
    assert counts == {(name, name): 6 - 1}  # the input's gradient is not asked for


@pytest.mark.slow
def test_a_computed_value_used_many_times_sums_its_gradients_in_groups():
    def count(w):
        wide = jnp.exp(w)  # computed in float32, then cast for each product
        return sum(jnp.sum(jnp.ones((1, 8)) @ wide) for _ in range(512))

    got = jax.jit(jax.grad(mpx.autocast(count)))(jnp.zeros((8, 1)))
    assert relative_error(got, np.full((8, 1), 512.0)) < 2e-4


@half_dtypes
def test_a_functional_update_stays_in_float32(getkey, dtype):
    p = jax.random.normal(getkey(), (8, 8))
    x = jax.random.normal(getkey(), (4, 8))

    def update(p, x):
        g = (x.T @ (x @ p)) * 1e-3
        return p - 1e-3 * g

    got = mpx.autocast(update, dtype)(p, x)
    assert relative_error(got, update(p, x)) < 1e-7


@pytest.mark.parametrize(
    ("update", "dtype"),
    [*zip(["set", "add", "multiply", "min", "max"], itertools.cycle(HALF))],
)
def test_scatters_work_in_half_precision(getkey, dtype, update):
    w = jax.random.normal(getkey(), (8, 8))
    x = jax.random.normal(getkey(), (4, 8))
    rows = jnp.array([0, 2, 4, 6])

    def scatter(w, x):
        y = x.astype(dtype) @ w.astype(dtype)  # so that the scatter itself is in half
        into = jnp.ones((8, 8), dtype)
        return getattr(into.at[rows], update)(y, unique_indices=True)

    gradient = jax.grad(lambda w, x: scatter(w, x).sum().astype("float32"))

    @jax.jit
    def results(w, x):
        funcs = scatter, gradient
        return [(mpx.autocast(f, dtype)(w, x), f(w, x)) for f in funcs]

    for got, expected in results(w, x):
        assert got.dtype == expected.dtype
        assert relative_error(got, expected) < 2e-2


def test_products_that_give_float32_compile_whatever_their_layout():
    # A product of this shape and layout with a float32 result does not compile on CPUs.
    a, b = jnp.ones((8, 4)), jnp.ones((1, 8, 8))

    def product(a, b):
        y = jax.lax.dot_general(a, b, (((0,), (2,)), ((), ())))
        return jnp.exp(y), jnp.exp(y.transpose(2, 0, 1))

    got = jax.jit(mpx.autocast(product))(a, b)
    assert relative_error(got, product(a, b)) < 1e-5


def test_the_cube_of_gelu_does_not_overflow_in_float16():
    x = jnp.array([[50.0, -50.0, 1.0, 0.5]])
    gelu = lambda x: jax.nn.gelu(x @ jnp.eye(4))  # noqa: E731
    got = mpx.autocast(gelu, jnp.float16)(x)
    assert relative_error(got, gelu(x)) < 1e-3


@half_dtypes
@pytest.mark.parametrize("is_bias", [True, False])
def test_what_is_added_to_a_product_keeps_its_digits(dtype, is_bias):
    """In half precision 2048.25 is 2048."""

    def layer(p, x):
        added = p["b"] if is_bias else x / 4
        return p["w"] @ x + added - 2048.0

    p, x = {"w": jnp.eye(8) * 2048, "b": jnp.full(8, 0.25)}, jnp.ones(8)
    np.testing.assert_array_equal(mpx.autocast(layer, dtype)(p, x), p["b"])


def test_a_numpy_scalar_is_like_a_python_number(getkey):
    x = jax.random.normal(getkey(), (4, 4))
    found = []
    for number in (2.0, np.float32(2)):
        func = mpx.autocast(lambda x, n=number: jnp.tanh((x @ x) * n) @ x)
        assert count_products(func, x) == {("bfloat16", "bfloat16"): 2}
        found.append(func(x))
    np.testing.assert_array_equal(*found)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    def loss(p, x):
        h = x @ p["w"]
        return jnp.sum(jnp.tanh(h + p["b"][None]) @ p["w"])

    p = {"w": jnp.zeros((1, 1)).at[0, 0].set(1.0), "b": jnp.zeros(1)}
    x = jnp.zeros((4096, 1))
    with jax.numpy_rank_promotion("allow"):
        grads = jax.grad(mpx.autocast(loss, jnp.float16))(p, x)
        names = primitives(jax.grad(mpx.autocast(loss, jnp.float16)), p, x)
    assert float(grads["b"][0]) == 4096.0
    assert "reduce_sum" in names
