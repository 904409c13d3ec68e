"""The cast of devices that round right: the same codes as arithmetic, and no masks."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._arithmetic import EXACT
from mpx._quantize._formats._rounding import pack, round_to_format
from mpx._quantize._formats._target import CPU, target_from
from mpx._quantize._quantizers._casting import (
    CAST,
    CAST_OF_WEIGHT,
    _to_e2m1,
    amax_of,
    is_cast,
)
from mpx._quantize._quantizers._kinds import Asked
from tests.helpers import slow_but

FORMATS = [mpx.Format.E4M3, mpx.Format.E5M2]
H100 = target_from("sm_90")
QUANTIZERS = {
    "tensor": mpx.quantization.TensorQuantizer(),
    "blocks of 128": mpx.quantization.BlockQuantizer(),
    "mxfp8": mpx.quantization.MXFP8Quantizer(),
    "nvfp4": mpx.quantization.NVFP4Quantizer(),
    "nvfp4 in squares": mpx.quantization.NVFP4Quantizer(block_dimensions=2),
    "nvfp4 to random neighbours": mpx.quantization.NVFP4Quantizer(
        stochastic_rounding=True
    ),
}


ONE_OF_EACH = ("tensor", "mxfp8", "nvfp4 in squares", "nvfp4 to random neighbours")


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


class Here(type(CAST)):
    """XLA:CPU makes no byte of two numbers of 4 bits: "Invalid bitcast i8 to i4"."""

    def to_four_bits(self, x, axis, key):
        return pack(_to_e2m1(x, key).astype(jnp.float32), axis)


HERE = Here()


@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 448.0])
def test_a_weight_is_scaled_by_a_chain_that_gives_the_same_bits(scale):
    x = numbers()
    data, weight = (
        np.asarray(jax.jit(by.scaled)(x, jnp.float32(scale)))
        for by in (CAST, CAST_OF_WEIGHT)
    )
    is_finite = np.isfinite(x)
    assert data[is_finite].tobytes() == weight[is_finite].tobytes()
    assert np.isnan(data[~is_finite]).all() and np.isnan(weight[~is_finite]).all()


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def quantized(quantizer, x, by, dtype="float32"):
    """What an H100 or a B200 computes, or all others."""
    axes = {0: (), 1: (-1,), 2: (-2, -1)}[quantizer.block_dimensions]
    key = jax.random.key(2) if quantizer.stochastic_rounding else None
    if by is CAST:
        by = HERE
    return quantizer._quantize(x, Asked(np.dtype(dtype), axes, key, by=by))


@pytest.mark.parametrize("name", slow_but(ONE_OF_EACH, QUANTIZERS))
def test_finite_arrays_are_quantized_alike(name):
    x = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    x[:16, :16] = 0
    found, expected = (quantized(QUANTIZERS[name], x, by) for by in (CAST, EXACT))
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    for one, other in zip(leaves, others, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_codes_of_four_bits_are_those_of_the_arithmetic():
    x = numbers()
    x = x[~np.isnan(x)]
    found = jax.jit(lambda x: _to_e2m1(x, None).astype(jnp.float32))(x)
    expected = jax.jit(lambda x: round_to_format(x, mpx.Format.E2M1))(x)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("axis", slow_but([-2], [-1, -2, -3]))
def test_a_transform_is_the_same_but_for_the_order_of_its_sums(axis):
    x = np.random.default_rng(3).standard_normal((16, 32, 48)).astype("bfloat16")
    x = jnp.asarray(x, jnp.float32)
    for signs in (None, (1, -1) * 8):
        exact = np.asarray(
            mpx.quantization.hadamard_transform(x, axis=axis, signs=signs)
        )
        found = {
            dtype: np.asarray(CAST.rotated(x, axis, signs, np.dtype(dtype)))
            for dtype in ("float32", "float16", "bfloat16")
        }
        np.testing.assert_allclose(found["float32"], exact, atol=1e-6)
        # Rounded as what it is a transform of, but not to the range of float16.
        np.testing.assert_array_equal(found["float16"], found["float32"])
        rounded = exact.astype("bfloat16").astype(np.float32)
        np.testing.assert_allclose(found["bfloat16"], rounded, rtol=2**-7, atol=1e-6)
        assert (found["bfloat16"] == rounded).mean() > 0.99


@pytest.mark.parametrize("name", slow_but(ONE_OF_EACH, QUANTIZERS))
def test_an_infinity_makes_nan_of_all_that_shares_its_scale(name):
    x = np.ones((32, 256), np.float32)
    x[3, 5] = np.inf
    found = quantized(QUANTIZERS[name], x, CAST).dequantize()
    block = QUANTIZERS[name].block or 256
    assert np.isnan(found[3, :block]).all()
    if name == "tensor" or name.startswith("nvfp4"):
        assert np.isnan(found).all()
    else:
        assert (np.delete(found, 3, 0) == 1).all() and (found[3, block:] == 1).all()


@pytest.mark.parametrize("by", [CAST, CAST_OF_WEIGHT])
def test_a_scale_from_elsewhere_saturates_what_is_finite_and_shows_what_is_not(by):
    """Delayed scaling: the scale is of steps before, the amax of this one."""
    quantizer, like = mpx.quantization.TensorQuantizer(), np.dtype("float32")

    def found(x):
        scale = jnp.float32(1)
        return quantizer._quantize(jnp.asarray(x), Asked(like, scale=scale, by=by))

    x = np.array([1.0, 600.0, -1e30], np.float32)
    assert found(x).dequantize().tolist() == [1, 448, -448]
    for bad in (np.inf, -np.inf, np.nan):
        x[0] = bad
        is_nan = np.isnan(jax.jit(found)(x).dequantize())
        assert is_nan.tolist() == [True, False, False]


@pytest.mark.parametrize(
    "recipe",
    slow_but(
        [mpx.DelayedScaling()], [mpx.Float8CurrentScaling(), mpx.DelayedScaling()]
    ),
)
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
    assert np.isnan(jax.jit(functools.partial(amax_of, H100))(x))
    assert np.isnan(amax_of(CPU, x)) and EXACT.largest_finite(x) == 1
    assert H100.rounds_to_fp8 and not CPU.rounds_to_fp8
    assert not target_from("sm_80").rounds_to_fp8


@pytest.mark.parametrize(
    ("target", "casts"),
    [
        ("cpu", set()),
        ("sm_80", set()),
        ("tpu7x", set()),
        ("sm_90", {"tensor", "blocks of 128", "mxfp8"}),
        ("sm_100", set(QUANTIZERS)),
    ],
)
def test_a_device_casts_what_it_is_known_to_round(target, casts):
    device = target_from(target)
    assert {name for name in QUANTIZERS if is_cast(QUANTIZERS[name], device)} == casts
    random = mpx.quantization.MXFP8Quantizer(stochastic_rounding=True)
    assert not is_cast(random, device)
