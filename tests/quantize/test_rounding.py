"""Rounding to the nearest number of a format: midpoints, neighbours, and every half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._rounding import round_to_format
from tests import helpers
from tests.reference import low_precision as reference
from tests.registries import FORMATS


def hard_numbers(bits: reference.Bits) -> np.ndarray:
    """Every number and every midpoint with both float32 neighbours, both signs."""
    numbers = reference.finite_numbers(bits)
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = np.concatenate([numbers, middles]).astype(np.float32)
    assert (np.sort(exact[exact > 0]) == np.unique(exact[exact > 0])).all()
    above = np.nextafter(exact, np.float32(np.inf))
    below = np.nextafter(exact[1:], np.float32(0))
    top = bits.largest * np.array([1 + 2**-4, 1.0357, 1.0358, 1.25, 2, 1e9], "f4")
    rest = np.array([1e-30, 3e38, np.inf, np.nan], np.float32)
    positive = np.concatenate([exact, above, below, top, rest])
    return np.concatenate([positive, -positive])


def rounded(x: jax.Array, format: mpx.Format) -> jax.Array:
    return round_to_format(x.astype(jnp.float32), format)


def check(x: np.ndarray, format: mpx.Format) -> None:
    bits = reference.FORMATS[format.name]
    codes = reference.encode(reference.flush(x), bits)
    expected = reference.decode(np.where(codes < 0, 0, codes), bits)
    expected[codes < 0] = np.nan
    for transform in (lambda f: f, jax.jit):
        found = np.asarray(transform(lambda x: rounded(x, format))(jnp.asarray(x)))
        np.testing.assert_array_equal(found, expected)
        real = ~np.isnan(expected)
        assert (np.signbit(found) == np.signbit(expected))[real].all()


@pytest.mark.parametrize("format", FORMATS.values())
def test_midpoints_and_their_neighbours(format: mpx.Format):
    x = hard_numbers(reference.FORMATS[format.name])
    assert len(x) > 30
    check(x, format)


@pytest.mark.parametrize("format", FORMATS.values())
@pytest.mark.parametrize("dtype", helpers.HALF)
def test_every_number_of_half_precision(format: mpx.Format, dtype: str):
    check(helpers.all_codes(jnp.dtype(dtype)), format)


@pytest.mark.parametrize(
    ("format", "dtype"), [(FORMATS["E4M3"], "float16"), (FORMATS["E5M2"], "bfloat16")]
)
def test_every_number_of_half_precision_as_payload(format: mpx.Format, dtype: str):
    x = helpers.all_codes(jnp.dtype(dtype))
    bits = reference.FORMATS[format.name]
    expected = reference.encode(reference.flush(x), bits)
    expected[np.isinf(x.astype(np.float32))] = -1  # NaN: only finite numbers saturate
    quantizer = mpx.quantization.TensorQuantizer(format)
    for transform in (lambda f: f, jax.jit):
        q = transform(lambda x: mpx.quantization.quantize(x, quantizer, scale=1.0))(
            jnp.asarray(x)
        )
        found = reference.without_nan(np.asarray(q.payload).view(np.uint8), bits)
        np.testing.assert_array_equal(found, expected)


def test_the_cast_of_numpy_agrees_where_it_saturates_itself():
    """E2M1 saturates in ml_dtypes, too: a second witness for the oracle."""
    x = hard_numbers(reference.E2M1)
    x = x[~np.isnan(x)]
    expected = x.astype(mpx.Format.E2M1.dtype).astype(np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(x), mpx.Format.E2M1), expected)


def test_narrow_numbers_survive_jit():
    """A pair of casts may be dropped under jit; what was rounded stays rounded."""
    x = jnp.linspace(-3, 3, 1000, dtype=jnp.float32)
    quantizer = mpx.quantization.TensorQuantizer()
    jitted = jax.jit(lambda x: mpx.quantization.quantize_dequantize(x, quantizer))(x)
    helpers.assert_same_bits(mpx.quantization.quantize_dequantize(x, quantizer), jitted)
    assert len(np.unique(jitted)) < 256
