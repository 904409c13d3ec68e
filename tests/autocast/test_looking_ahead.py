"""What the users of a value read of it, and what is stored for them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.autocast.counting import count_casts, equations, relative_error


def dtypes_of(primitive, func, *args):
    """The dtypes of what every equation of a primitive gives."""
    return [
        str(equation.outvars[0].aval.dtype)
        for equation, _ in equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == primitive
    ]


def kept(func, *args):
    """The dtypes of the arrays of more than a number that autodiff keeps."""
    pulled = jax.tree.leaves(jax.vjp(func, *args)[1])
    return {str(x.dtype) for x in pulled if x.ndim and jnp.any(x)}


@pytest.fixture
def qk(getkey):
    return tuple(jax.random.normal(getkey(), (2, 4, 8, 16)) for _ in range(2))


def by_einsum(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k)


def by_matmul(q, k):
    return (q @ k.swapaxes(-1, -2)).reshape(2, 4, 8, 8)


@pytest.mark.parametrize(
    ("product", "name", "scale"),
    [
        (by_einsum, "div", lambda x: x / 3.7),
        (by_matmul, "mul", lambda x: x * 0.3),
        (by_einsum, "mul", lambda x: 0.3 * x),
    ],
)
def test_scores_are_stored_in_half_and_scaled_in_float32(qk, product, name, scale):
    def attended(q, k):
        return jax.nn.softmax(scale(product(q, k))) @ k

    cast = mpx.autocast(attended, residuals="small")
    assert set(dtypes_of("dot_general", cast, *qk)) == {"bfloat16"}
    assert dtypes_of(name, cast, *qk)[0] == "float32"
    assert dtypes_of("exp", cast, *qk) == ["float32"]
    assert kept(cast, *qk) == {"bfloat16"}
    np.testing.assert_allclose(cast(*qk), attended(*qk), atol=2e-2)


def test_a_part_of_a_product_is_stored_in_half():
    """As by a layer that splits one projection into data and rates."""

    def loss(w, x):
        data, rate = jnp.split(x @ w, 2, -1)
        return jnp.sum((jnp.exp(jnp.cumsum(rate, 0)) * data) @ w)

    cast = mpx.autocast(loss, residuals="small")
    args = jnp.ones((16, 32)), jnp.ones((8, 16))
    pulled = jax.eval_shape(lambda *args: jax.vjp(cast, *args)[1], *args)
    # The exponential, which is computed in float32, and nothing else.
    assert [str(x.dtype) for x in jax.tree.leaves(pulled)].count("float32") == 1


def test_a_number_below_the_range_of_float16_scales(qk):
    def scaled(q, k):
        return q @ k.swapaxes(-1, -2) * 1e-9

    found = mpx.autocast(scaled, jnp.float16)(*qk)
    assert relative_error(found, scaled(*qk)) < 1e-3


def test_dropout_leaves_a_half_stream_half(getkey):
    drop = eqx.nn.Dropout(0.1)

    def block(w, x, key):
        x = x @ w
        return x + drop(jnp.tanh(x) @ w, key=key)

    w, x = jnp.eye(16), jax.random.normal(getkey(), (8, 16))
    key = getkey()
    cast = mpx.autocast(block, residual_stream="half")
    assert dtypes_of("div", cast, w, x, key) == ["float32"]
    assert dtypes_of("add", cast, w, x, key)[-1] == "bfloat16"
    assert kept(lambda w, x: cast(w, x, key), w, x) == {"bfloat16", "bool"}
    np.testing.assert_allclose(cast(w, x, key), block(w, x, key), rtol=2e-2, atol=2e-2)


def test_products_are_scaled_by_numbers_that_half_cannot_hold():
    """Positions behind 256, and a rate near 1."""

    def weighted(x, rate):
        positions = jax.lax.broadcasted_iota(jnp.float32, x.shape, 1)
        return (x @ x) * positions * (1.0 - rate)

    args = jnp.eye(300), 1e-3
    np.testing.assert_array_equal(mpx.autocast(weighted)(*args), weighted(*args))


def test_statistics_of_a_half_stream_are_computed_in_float32(getkey):
    x = jax.random.normal(getkey(), (8, 16))

    def loss(w, x):
        y = x + x @ w
        return jnp.var(y) + jnp.mean(y)

    cast = mpx.autocast(loss, residual_stream="half")
    assert set(dtypes_of("reduce_sum", cast, jnp.eye(16), x)) == {"float32"}
    # w, x for the product and the stream, and the stream for each of the statistics.
    assert count_casts(cast, jnp.eye(16), x) == 5


def test_a_sum_of_losses_is_no_half_stream(getkey):
    x = jax.random.normal(getkey(), (8, 16))

    def loss(w, x):
        y = x @ w
        return jnp.mean(y**2) + jnp.mean(jnp.abs(y))

    args = jnp.eye(16), x
    full, half = (
        mpx.autocast(loss, residual_stream=stream)(*args) for stream in ("full", "half")
    )
    assert half == full
