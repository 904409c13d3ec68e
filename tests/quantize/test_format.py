"""Facts of the formats against their bits, and every code of each."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._rounding import pack, unpack
from mpx.quantization import QuantizedArray, TensorQuantizer, quantize
from tests.helpers import slow_but
from tests.reference import low_precision as reference

SINGLE = [mpx.Format.E4M3, mpx.Format.E5M2, mpx.Format.E2M1]


@pytest.mark.parametrize("format", SINGLE)
def test_facts_follow_from_the_bits(format: mpx.Format):
    bits = reference.FORMATS[format.name]
    numbers = reference.finite_numbers(bits)
    assert format.largest == numbers.max() == bits.largest
    assert format.smallest == numbers[1]
    assert format.smallest_normal == numbers[1 << bits.mantissa]
    assert format.bits == bits.exponent + bits.mantissa + 1


def test_hybrid_is_two_formats():
    hybrid = mpx.Format.HYBRID
    assert (hybrid.forward, hybrid.backward) == (mpx.Format.E4M3, mpx.Format.E5M2)
    for format in SINGLE:
        assert format.forward is format.backward is format
    for fact in ("dtype", "largest", "smallest", "smallest_normal", "bits"):
        with pytest.raises(ValueError, match="two formats.*`Format.HYBRID.forward`"):
            getattr(hybrid, fact)


@pytest.mark.parametrize("format", list(mpx.Format))
def test_formats_are_frozen_constants(format: mpx.Format):
    assert pickle.loads(pickle.dumps(format)) is format
    assert hash(format) == hash(mpx.Format[format.name])
    with pytest.raises(AttributeError):
        format.largest = 1.0


each_way = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])


@pytest.mark.parametrize("format", SINGLE[:2])
@each_way
def test_every_code_of_8_bits_dequantizes_and_comes_back(format: mpx.Format, wrap):
    bits = reference.FORMATS[format.name]
    codes = np.arange(256, dtype=np.uint8)
    payload, dtype = jnp.asarray(codes.view(format.dtype)), np.dtype("float32")
    q = QuantizedArray(payload, jnp.float32(1), format=format, dtype=dtype)
    values = np.asarray(wrap(lambda q: q.dequantize())(q))
    np.testing.assert_array_equal(values, reference.decode(codes, bits))
    quantizer = TensorQuantizer(format)
    back = wrap(lambda x: quantize(x, quantizer, scale=1.0))(values)
    expected = reference.encode(reference.decode(codes, bits), bits)
    expected[np.isinf(values)] = -1
    found = np.asarray(back.payload).view(np.uint8)
    np.testing.assert_array_equal(reference.without_nan(found, bits), expected)
    # Everything but infinities, which become NaN, is what it was.
    kept = np.isfinite(values)
    np.testing.assert_array_equal(found[kept], codes[kept])


@each_way
def test_every_pair_of_codes_of_4_bits_unpacks_and_packs(wrap):
    packed = np.arange(256, dtype=np.uint8)
    values = np.asarray(wrap(lambda x: unpack(x, -1))(jnp.asarray(packed)))
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1)
    expected = reference.decode(codes, reference.E2M1)
    np.testing.assert_array_equal(values, expected)
    assert (np.signbit(values) == np.signbit(expected)).all()
    again = wrap(lambda x: pack(x, -1))(jnp.asarray(values))
    np.testing.assert_array_equal(again, packed)


def test_packing_is_that_of_jax():
    """The first of two neighbours is in the low half, as in a bitcast of JAX."""
    packed = jnp.arange(256, dtype=jnp.uint8)
    typed = jax.lax.bitcast_convert_type(packed, mpx.Format.E2M1.dtype)
    values = unpack(packed[:, None], -1)
    np.testing.assert_array_equal(values, np.asarray(typed).astype(np.float32))


@pytest.mark.parametrize("axis", slow_but([-2], [-1, -2, -3]))
def test_packing_along_any_axis(axis: int):
    x = np.random.default_rng(0).choice([-6.0, -0.0, 0.5, 3.0], (4, 6, 8)).astype("f4")
    packed = pack(jnp.asarray(x), axis)
    assert packed.shape[axis] == x.shape[axis] // 2 and packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack(packed, axis), x)
