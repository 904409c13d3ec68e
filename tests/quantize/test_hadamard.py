"""The random Hadamard transform against its matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import Leg, NVFP4Quantizer, Role, hadamard_transform
from tests import helpers
from tests.quantize.cases import DATA
from tests.quantize.linear_cases import matrix_product, result_and_gradients
from tests.reference import low_precision as reference

rotated = jax.jit(hadamard_transform, static_argnames=("axis", "inverse"))
quantize = jax.jit(mpx.quantization.quantize, static_argnums=1)


def matrix(signs=None) -> np.ndarray:
    return np.asarray(rotated(np.eye(16, dtype=np.float32), signs=signs))


both_dequantized = jax.jit(lambda q: (q.dequantize(rotated=True), q.dequantize()))


def test_the_matrix_is_orthogonal_and_sylvester_s_with_signs():
    h = matrix()
    np.testing.assert_array_equal(h @ h.T, np.eye(16))  # powers of two: exact
    np.testing.assert_array_equal(np.abs(h), 0.25)
    signs = np.sign(h[:, 0])
    np.testing.assert_array_equal(h, reference.hadamard(signs))
    chosen = np.where(np.random.default_rng(0).random(16) < 0.5, -1.0, 1.0)
    found = matrix(jnp.asarray(chosen))
    np.testing.assert_array_equal(found, reference.hadamard(chosen))
    # No column of Sylvester's matrix: a constant block stays spread.
    assert (np.abs(np.ones(16) @ h) < 4).all()


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("inverse", [False, True])
def test_blocks_along_an_axis_are_multiplied(axis: int, inverse: bool):
    x = np.random.default_rng(1).standard_normal((32, 48, 16)).astype(np.float32)
    h = reference.hadamard(np.sign(matrix()[:, 0]))
    h = h.T if inverse else h
    blocks = np.moveaxis(x, axis, -1).astype(np.float64)
    exact = (blocks.reshape(*blocks.shape[:-1], -1, 16) @ h).reshape(blocks.shape)
    f = lambda x: hadamard_transform(x, axis=axis, inverse=inverse)  # noqa: E731
    found = jax.jit(f)(jnp.asarray(x))
    np.testing.assert_allclose(found, np.moveaxis(exact, -1, axis), atol=2e-6)
    if axis == -1:
        helpers.assert_same_bits(f(jnp.asarray(x)), found)


@pytest.mark.parametrize("dtype", helpers.WIDE)
def test_the_transpose_is_the_inverse(dtype: str):
    x = jnp.asarray(DATA["normal"]()).astype(dtype)
    y = rotated(x)
    assert y.dtype == x.dtype
    back, x = (np.asarray(a, np.float32) for a in (rotated(y, inverse=True), x))
    np.testing.assert_allclose(back, x, atol=4 * helpers.TOLERANCE[dtype])


def test_its_derivative_is_itself():
    x, g = (jnp.asarray(DATA["normal"]()[part]) for part in (slice(2), slice(2, 4)))
    pull = jax.jit(lambda x, g: jax.vjp(hadamard_transform, x)[1](g)[0])
    np.testing.assert_allclose(pull(x, g), rotated(g, inverse=True), atol=1e-6)


def test_the_quantizer_rotates_and_dequantize_undoes_it():
    x = jnp.asarray(DATA["normal"]())
    rotating = NVFP4Quantizer(hadamard=True)

    @jax.jit
    def both_ways(x):
        q = mpx.quantization.quantize(x, rotating, axis=0)
        rotated = hadamard_transform(x, axis=0)
        plain = mpx.quantization.quantize(rotated, NVFP4Quantizer(), axis=0)
        undone = hadamard_transform(plain.dequantize(), axis=0, inverse=True)
        first = q.payload, q.dequantize(rotated=True), q.dequantize()
        return first, (plain.payload, plain.dequantize(), undone)

    found, expected = both_ways(x)
    helpers.assert_same_bits(found, expected)
    error = jnp.abs(found[2] - x).mean() / jnp.abs(x).mean()
    assert float(error) < 0.12


def test_less_vanishes_beside_an_outlier():
    """Beside a number 100 times as large the others of a block become zero."""
    x = np.array(DATA["normal"]())
    beside = np.arange(x.shape[1]) % 16 != 5
    x[:, ~beside] = 100
    kept = {}
    for hadamard in (False, True):
        q = quantize(x, NVFP4Quantizer(hadamard=hadamard))
        _, values = both_dequantized(q)
        small, found = x[:, beside], np.asarray(values)[:, beside]
        kept[hadamard] = (small * found).sum() / (small * small).sum()
    assert kept[False] < 0.01
    assert kept[True] > 0.1


SIGNS = tuple(int(sign) for sign in np.where(np.arange(16) % 3, 1, -1))


def test_the_quantizer_takes_signs():
    x = DATA["normal"]()
    own = NVFP4Quantizer(hadamard=True, signs=SIGNS)
    with helpers.unchecked_annotations():
        assert own == NVFP4Quantizer(hadamard=True, signs=np.asarray(SIGNS))
    assert hash(own) != hash(NVFP4Quantizer(hadamard=True))
    q = quantize(x, own)
    signs = np.asarray(SIGNS, np.int32)
    plain = quantize(rotated(x, signs=signs), NVFP4Quantizer())
    helpers.assert_same_bits(q.payload, plain.payload)
    (found, undone), (_, expected) = both_dequantized(q), both_dequantized(plain)
    helpers.assert_same_bits(found, expected)
    expected = rotated(expected, signs=signs, inverse=True)
    np.testing.assert_allclose(undone, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("of_input", "of_gradient"),
    [(None, SIGNS), pytest.param(SIGNS, None, marks=pytest.mark.slow)],
)
def test_a_product_stays_whatever_signs_its_operands_have(of_input, of_gradient):
    def qfactory(role: Role, leg: Leg):
        is_last = leg is Leg.WGRAD
        signs = of_gradient if role is Role.GRADIENT else of_input
        return NVFP4Quantizer(hadamard=is_last, signs=signs if is_last else None)

    product = matrix_product(mpx.CustomRecipe(qfactory))
    normal = np.random.default_rng(0).standard_normal
    x, w, g = (normal(s, np.float32) for s in ((64, 32), (32, 48), (64, 48)))
    _, _, dw, _ = result_and_gradients(product, x, w, g)
    exact = x.T @ g
    assert np.linalg.norm(dw - exact) / np.linalg.norm(exact) < 0.2
