"""Cross entropy against Optax and JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx.nn

from ..helpers import HALF, assert_same_bits
from .cases import relative_error

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}


@pytest.fixture
def logits(getkey):
    return 3 * jax.random.normal(getkey(), (5, 7))


@pytest.fixture
def labels():
    return jnp.array([0, 6, 3, 3, 1])


@pytest.fixture
def distribution(getkey):
    return jax.nn.softmax(jax.random.normal(getkey(), (5, 7)))


def by_log_softmax(logits, labels):
    """The loss of integer labels with nothing but `jax.nn`."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]


def test_float32_is_bit_equal(logits, labels, distribution):
    found = mpx.nn.cross_entropy(logits, labels)
    assert_same_bits(found, by_log_softmax(logits, labels))
    by_optax = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(found, by_optax, rtol=1e-6, atol=5e-7)
    found = mpx.nn.cross_entropy(logits, distribution)
    assert_same_bits(found, optax.softmax_cross_entropy(logits, distribution))


def test_a_distribution_of_one_hots_is_an_integer(logits, labels):
    one_hot = jax.nn.one_hot(labels, 7)
    for smoothing in (0.0, 0.3):
        loss = functools.partial(mpx.nn.cross_entropy, label_smoothing=smoothing)
        found, expected = loss(logits, labels), loss(logits, one_hot)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_label_smoothing_is_that_of_optax(logits, labels):
    found = mpx.nn.cross_entropy(logits, labels, label_smoothing=0.1)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 7), 0.1)
    expected = optax.softmax_cross_entropy(logits, smooth)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_half_logits_give_float32_losses(logits, labels, dtype):
    half = logits.astype(dtype)
    found = mpx.nn.cross_entropy(half, labels)
    assert_same_bits(found, by_log_softmax(half.astype(jnp.float32), labels))


def test_float64_stays(logits, labels):
    with jax.enable_x64(True):
        wide = logits.astype(jnp.float64)
        found = mpx.nn.cross_entropy(wide, labels)
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, by_log_softmax(wide, labels), rtol=1e-14)


@pytest.mark.parametrize(
    ("smoothing", "dtype", "shift"),
    [
        (0.0, "float32", 0.0),
        (0.1, "float32", 2e4),
        (0.0, "float16", 2e4),
        (0.1, "bfloat16", 0.0),
    ],
)
def test_gradients(logits, labels, distribution, dtype, smoothing, shift):
    """For both kinds of labels, and for the distribution itself, against float64."""
    x = logits.astype(dtype) + jnp.asarray(shift, dtype)
    g = jnp.array([1.0, -2.0, 0.5, 3.0, 1.0])

    def mine(x, labels):
        losses = mpx.nn.cross_entropy(x, labels, label_smoothing=smoothing)
        return jnp.sum(losses * g.astype(losses.dtype))

    def exact(x, labels):
        q = (1 - smoothing) * labels + smoothing / 7
        return -jnp.sum(q * jax.nn.log_softmax(x) * g.astype(x.dtype)[:, None])

    @jax.jit
    def gradients_of(x, wide):
        found, expected = [], []
        for y in (jax.nn.one_hot(labels, 7, dtype=jnp.float32), distribution):
            found.append(jax.grad(mine, (0, 1))(x, y))
            expected.append(jax.grad(exact, (0, 1))(wide, y.astype(wide.dtype)))
        return found, expected, jax.grad(lambda x: mine(x, labels))(x)

    with jax.enable_x64(True):
        found, expected, of_integers = gradients_of(x, np.asarray(x, np.float64))
    for mine, exact in zip(found, expected, strict=True):
        assert mine[0].dtype == x.dtype and mine[1].dtype == jnp.float32
        assert exact[0].dtype == jnp.float64
        assert relative_error(mine[0], exact[0]) <= ROUNDING[dtype]
        assert relative_error(mine[1], exact[1]) <= 1e-6
    assert relative_error(of_integers, expected[0][0]) <= ROUNDING[dtype]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_where_is_leaving_the_classes_out(logits, distribution, smoothing):
    keep = np.array([True, True, False, True, True, False, True])
    y = jnp.where(keep[None], distribution, 0)
    y = y / y.sum(1, keepdims=True)
    labels = jnp.array([0, 6, 3, 3, 1])

    @functools.partial(jax.jit, static_argnames="where")
    def loss_and_gradient(x, labels, where=None):
        options = {"where": where and jnp.array([where]), "label_smoothing": smoothing}
        loss = lambda x: mpx.nn.cross_entropy(x, labels, **options)  # noqa: E731
        found, pullback = jax.vjp(loss, x)
        return found, pullback(jnp.ones(5))[0]

    for full, short in ((y, y[:, keep]), (labels, jnp.array([0, 4, 2, 2, 1]))):
        found, gradient = loss_and_gradient(logits, full, tuple(keep.tolist()))
        expected, short_gradient = loss_and_gradient(logits[:, keep], short)
        np.testing.assert_allclose(found, expected, rtol=2e-6)
        gradient = np.asarray(gradient)
        assert (gradient[:, ~keep] == 0).all()
        np.testing.assert_allclose(
            gradient[:, keep], short_gradient, rtol=1e-5, atol=1e-6
        )


def test_a_row_without_classes_has_no_loss(logits, labels):
    where = jnp.arange(5)[:, None] != jnp.zeros((1, 7), int)
    for y in (labels, jax.nn.one_hot(labels, 7)):
        loss = lambda x: mpx.nn.cross_entropy(x, y, where=where).sum()  # noqa: B023, E731
        value, gradient = map(np.asarray, jax.jit(jax.value_and_grad(loss))(logits))
        assert np.isfinite(value) and (gradient[0] == 0).all()
        assert (gradient[1:] != 0).any(1).all()


def test_rows_are_left_out_by_the_mean(logits):
    labels = jnp.array([0, -1, 3, -1, 1])
    loss = lambda x: mpx.nn.mean(mpx.nn.cross_entropy(x, labels), where=labels >= 0)  # noqa: E731
    value, gradient = map(np.asarray, jax.jit(jax.value_and_grad(loss))(logits))
    rows = np.array([0, 2, 4])
    expected = np.mean(jax.jit(by_log_softmax)(logits[rows], labels[rows]))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert (gradient[[1, 3]] == 0).all()


def test_other_axes(logits, labels):
    found = mpx.nn.cross_entropy(logits.T, labels, axis=0)
    assert_same_bits(found, mpx.nn.cross_entropy(logits, labels))


@pytest.mark.parametrize("dtype", HALF)
def test_minus_infinity_where_nothing_is_expected(dtype):
    logits = jnp.array([[0.0, -jnp.inf, 0.0]], dtype)
    one_hot = jnp.array([[1.0, 0.0, 0.0]], dtype)
    for y in (jnp.array([0]), one_hot):
        loss = lambda x: mpx.nn.cross_entropy(x, y).sum()  # noqa: B023, E731
        value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
        np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
        np.testing.assert_array_equal(gradient, [[-0.5, 0, 0.5]])


def test_small_integers_and_many_classes():
    logits = jnp.zeros((2, 1000), jnp.float16)
    found = mpx.nn.cross_entropy(logits, jnp.array([3, -1], jnp.int8))
    np.testing.assert_allclose(found, np.log(1000), rtol=1e-6)
    assert jnp.isnan(mpx.nn.cross_entropy(logits, jnp.array([1000, 2000]))).all()


def test_forward_mode_and_vmap(logits, labels):
    x = logits.astype(jnp.bfloat16)
    loss = lambda x: mpx.nn.cross_entropy(x, labels)  # noqa: E731
    _, dots = jax.jit(lambda x: jax.jvp(loss, (x,), (jnp.ones_like(x),)))(x)
    np.testing.assert_allclose(dots, 0, atol=1e-6)  # a shift changes no loss
    single = lambda x, y: mpx.nn.cross_entropy(x, y)  # noqa: E731
    found = jax.jit(jax.vmap(jax.value_and_grad(single)))(x, labels)[1]
    expected = jax.jit(jax.grad(lambda x: loss(x).sum()))(x)
    found, expected = (x.astype("float32") for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=2**-7)


@pytest.mark.parametrize(
    ("error", "match", "wrong"),
    [
        (ValueError, "must have the shape", {"labels": jnp.zeros(4, int)}),
        (ValueError, "must have", {"labels": jnp.zeros((5, 6))}),
        (TypeError, "integers or dist", {"labels": jnp.zeros((5, 7), bool)}),
        (ValueError, "between 0 and 1", {"label_smoothing": 1.5}),
        (ValueError, "must be an axis", {"axis": 2}),
    ],
)
def test_bad_input_of_cross_entropy(logits, labels, error, match, wrong):
    with pytest.raises(error, match=match):
        mpx.nn.cross_entropy(**{"logits": logits, "labels": labels, **wrong})
