"""The cast of devices that round right: the same codes as arithmetic, and no masks."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx
from mpx._quantize._casting import CAST, _cast_blocks, _cast_tensor, amax_on
from mpx._quantize._rounding import EXACT
from mpx._quantize._target import CPU, target_from

FORMATS = [mpx.Format.E4M3, mpx.Format.E5M2]
H100 = target_from("sm_90")
QUANTIZERS = {
    "tensor": mpx.TensorQuantizer(),
    "blocks of 128": mpx.BlockQuantizer(),
    "mxfp8": mpx.MXFP8Quantizer(),
}


@functools.cache
def numbers() -> np.ndarray:
    """Every float16 and bfloat16 number, and a million of float32; no subnormal one."""
    bits = np.arange(2**16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(500_000) * 10 ** rng.uniform(-6, 3, 500_000)
    found = [bits.view(np.float16), bits.view(ml_dtypes.bfloat16), spread]
    found.append(rng.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32))
    found = np.concatenate([part.astype(np.float32) for part in found])
    return found[~(np.abs(found) < 2.0**-126) | (found == 0)]


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_arithmetic(format):
    """By this device's cast, which is to round as that of CUDA does."""
    x = numbers()
    cast, exact = (
        np.asarray(jax.jit(lambda x, by=by: by.to_format(x, format, None))(x))
        for by in (CAST, EXACT)
    )
    is_nan = np.isnan(x)
    assert np.isnan(cast[is_nan].astype(np.float32)).all()
    np.testing.assert_array_equal(
        cast[~is_nan].view(np.uint8), exact[~is_nan].view(np.uint8)
    )


def cast_by(quantizer, x):
    """What an H100 computes."""
    if isinstance(quantizer, mpx.TensorQuantizer):
        return _cast_tensor(quantizer, x.dtype, x, quantizer._scale(CAST.largest(x)))
    return _cast_blocks(quantizer, x.dtype, (-1,), x, None)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_finite_arrays_are_quantized_alike(name):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 256)), jnp.float32)
    found = jax.jit(functools.partial(cast_by, QUANTIZERS[name]))(x)
    expected = jax.jit(lambda x: mpx.quantize(x, QUANTIZERS[name]))(x)
    for part in ("payload", "inverse_scale"):
        one, other = getattr(found, part), getattr(expected, part)
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_infinity_makes_nan_of_all_that_shares_its_scale(name):
    x = np.ones((8, 256), np.float32)
    x[3, 5] = np.inf
    found = jax.jit(lambda x: cast_by(QUANTIZERS[name], x).dequantize())(x)
    block = QUANTIZERS[name].block or 256
    assert np.isnan(found[3, :block]).all()
    if name == "tensor":
        assert np.isnan(found).all()
    else:
        assert (np.delete(found, 3, 0) == 1).all() and (found[3, block:] == 1).all()


def test_a_scale_from_elsewhere_saturates_what_is_finite_and_shows_what_is_not():
    """Delayed scaling: the scale is of steps before, the amax of this one."""
    quantizer, like = mpx.TensorQuantizer(), np.dtype("float32")

    def found(x):
        return _cast_tensor(quantizer, like, jnp.asarray(x), jnp.float32(1))

    x = np.array([1.0, 600.0, -1e30], np.float32)
    assert found(x).dequantize().tolist() == [1, 448, -448]
    for bad in (np.inf, -np.inf, np.nan):
        x[0] = bad
        is_nan = np.isnan(jax.jit(found)(x).dequantize())
        assert is_nan.tolist() == [True, False, False]


@pytest.mark.parametrize("recipe", [mpx.Float8CurrentScaling(), mpx.DelayedScaling()])
def test_nothing_is_masked_where_the_device_casts(recipe):
    """A mask of an operand would be written, transposed, to memory."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w).astype(jnp.float32))

    def lowered(target):
        func = mpx.autocast(loss, recipe=recipe, target=target)
        scaling = mpx.init_scaling(func, w, x)
        step = jax.jit(lambda s, w, x: mpx.grad(func, s)(w, x))
        return step.trace(scaling, w, x).lower(lowering_platforms=("cuda",)).as_text()

    w, x = jnp.ones((48, 64)), jnp.ones((32, 48))
    masks = "tensor<32x48xi1>", "tensor<32x64xi1>"  # of the input and of the gradient
    assert not any(mask in lowered("sm_90") for mask in masks)
    assert all(mask in lowered("sm_80") for mask in masks)


def test_only_the_device_that_is_named_casts():
    """A program for an H100 that runs here has the maxima of here, which keep NaN."""
    x = jnp.array([1.0, np.nan, np.inf], jnp.float32)
    assert np.isnan(jax.jit(functools.partial(amax_on, H100))(x))
    assert np.isnan(amax_on(CPU, x)) and amax_on(CPU, x, only_finite=True) == 1
    assert H100.rounds_to_fp8 and not CPU.rounds_to_fp8
    assert not target_from("sm_80").rounds_to_fp8
