"""What the users of a value want of it, and where the wish ends."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.autocast.counting import count_casts, equations


def dtypes_of(primitive, func, *args):
    """The dtypes of what every equation of a primitive gives."""
    return [
        str(equation.outvars[0].aval.dtype)
        for equation, _ in equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == primitive
    ]


@pytest.fixture
def qk(getkey):
    return tuple(jax.random.normal(getkey(), (2, 4, 8, 16)) for _ in range(2))


def by_einsum(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k)


def by_matmul(q, k):
    return (q @ k.swapaxes(-1, -2)).reshape(2, 4, 8, 8)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("div", lambda x: x / 3.7),
        ("mul", lambda x: x * 0.3),
        ("mul", lambda x: 0.3 * x),
    ],
)
@pytest.mark.parametrize("product", [by_einsum, by_matmul])
def test_scores_stay_half_until_softmax(qk, product, name, scale):
    def weights(q, k):
        return jax.nn.softmax(scale(product(q, k)))

    cast = mpx.autocast(weights)
    assert dtypes_of(name, cast, *qk)[0] == "bfloat16"
    assert dtypes_of("exp", cast, *qk) == ["float32"]
    np.testing.assert_allclose(cast(*qk), weights(*qk), atol=2e-2)


def test_a_number_that_does_not_fit_scales_in_float32(qk):
    def loss(q, k):
        return jnp.sum(jnp.exp(q @ k.swapaxes(-1, -2) * 1e-9))

    assert dtypes_of("mul", mpx.autocast(loss, jnp.float16), *qk) == ["float32"]


def test_what_is_no_product_is_scaled_in_float32(qk):
    def loss(q, k):
        return jnp.sum(jnp.tanh(q @ k.swapaxes(-1, -2)) * 0.3)

    assert dtypes_of("mul", mpx.autocast(loss), *qk) == ["float32"]


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_leaves_a_half_stream_half(getkey, rate):
    drop = eqx.nn.Dropout(rate)

    def block(w, x, key):
        return x @ w + drop(jnp.tanh(x @ w) @ w, key=key)

    w, x = jnp.eye(16), jax.random.normal(getkey(), (8, 16))
    key = getkey()
    cast = mpx.autocast(block, residual_stream="half")
    assert dtypes_of("div", cast, w, x, key) == ["bfloat16"]
    assert dtypes_of("add", cast, w, x, key)[-1] == "bfloat16"
    np.testing.assert_allclose(cast(w, x, key), block(w, x, key), rtol=2e-2, atol=2e-2)


def test_arithmetic_on_numbers_is_done_at_once():
    def scaled(x):
        keep = 1.0 - jax.lax.stop_gradient(0.1)
        return x @ x * (jnp.sqrt(keep * 2.0) / keep)

    x = jnp.eye(8)
    names = {e.primitive.name for e, _ in equations(jax.make_jaxpr(scaled)(x))}
    cast = mpx.autocast(scaled)
    left = {e.primitive.name for e, _ in equations(jax.make_jaxpr(cast)(x))}
    assert {"sub", "sqrt", "div"} <= names
    assert not {"sub", "sqrt", "div"} & left
    np.testing.assert_allclose(cast(x), scaled(x), rtol=1e-2)


def test_arithmetic_on_an_argument_is_left_to_the_program():
    def scaled(x, rate):
        return x @ x * (1.0 - rate)

    assert dtypes_of("sub", mpx.autocast(scaled), jnp.eye(8), 0.1) == ["float32"]


def test_positions_make_nothing_float32():
    """They were computed in no precision: what they meet stays in half."""

    def weighted(x):
        return (x @ x * jax.lax.broadcasted_iota(jnp.float32, (8, 8), 1)) @ x

    assert dtypes_of("mul", mpx.autocast(weighted), jnp.eye(8)) == ["bfloat16"]


def test_a_program_that_wants_float32_is_given_it(getkey):
    x = jax.random.normal(getkey(), (8, 16))

    def loss(w, x):
        y = x + x @ w
        return jnp.var(y) + jnp.mean(y)

    cast = mpx.autocast(loss, residual_stream="half")
    variance = next(
        equation
        for equation, _ in equations(jax.make_jaxpr(cast)(jnp.eye(16), x))
        if equation.params.get("name") == "_var"
    )
    assert variance.invars[0].aval.dtype == np.float32
    # x, w, and the stream once for both statistics.
    assert count_casts(cast, jnp.eye(16), x) == 3
