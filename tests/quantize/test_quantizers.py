"""Every quantizer on every kind of data against its oracle, bit for bit."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import mpx
from mpx.quantization import TensorQuantizer, quantize
from tests import helpers
from tests.quantize.cases import DATA, KINDS, QUANTIZERS, SHAPE, codes_of, scales_of
from tests.reference import low_precision as reference

each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
each_kind = pytest.mark.parametrize("name", KINDS)


@functools.cache
def jitted(name: str):
    quantizer, _ = QUANTIZERS[name]

    @jax.jit
    def run(x):
        q = quantize(x, quantizer)
        return q, q.dequantize()

    return run


@each_quantizer
@pytest.mark.parametrize("data", DATA)
def test_codes_scales_and_values_are_the_oracle_s(name: str, data: str):
    _, oracle = QUANTIZERS[name]
    x = DATA[data]()
    expected = oracle(x)
    q, values = jitted(name)(x)
    np.testing.assert_array_equal(codes_of(q), expected.codes)
    np.testing.assert_array_equal(scales_of(q), expected.scales)
    if expected.tensor is not None:
        np.testing.assert_array_equal(q.tensor_inverse_scale, expected.tensor)
    bits = reference.FORMATS[q.format.name]
    exact = reference.dequantize(expected.codes, bits, expected.factors, expected.shape)
    # Subnormal products are zero on some devices.
    np.testing.assert_array_equal(
        reference.flush(np.asarray(values)), reference.flush(exact)
    )


@pytest.mark.parametrize("name", helpers.slow_but(["mxfp8 e4m3"], QUANTIZERS))
def test_the_bits_are_those_of_eager_operations(name: str):
    quantizer, _ = QUANTIZERS[name]
    x = jnp.asarray(DATA["outliers"]())
    q, values = jitted(name)(x)
    eager = quantize(x, quantizer)
    helpers.assert_same_bits(eager, q)
    helpers.assert_same_bits(eager.dequantize(), values)


@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(KINDS, itertools.cycle(helpers.HALF))]
)
def test_half_precision_is_quantized_as_its_float32(name: str, dtype: str):
    x = jnp.asarray(DATA["normal"]()).astype(dtype)
    q, narrow = jitted(name)(x)
    wide, values = jitted(name)(x.astype(jnp.float32))
    helpers.assert_same_bits(q.payload, wide.payload)
    helpers.assert_same_bits(q.inverse_scale, wide.inverse_scale)
    helpers.assert_same_bits(narrow, values.astype(dtype))


# What tests are compiled with, and what users are.
COMPILERS = [
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True},
]
if not jax.__version__.startswith("0.10."):
    for _options in COMPILERS:  # later ones have nothing but these emitters
        del _options["xla_cpu_use_fusion_emitters"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    helpers.slow_but(
        [("mxfp8 e4m3", "bfloat16"), ("nvfp4 1x16", "float32")],
        zip(KINDS, itertools.cycle(["float32", "bfloat16"])),
    ),
)
def test_the_same_bits_come_out_however_it_is_compiled(name: str, dtype: str):
    quantizer, _ = QUANTIZERS[name]

    def run(x):
        return quantize(x, quantizer)

    shape = jax.ShapeDtypeStruct(SHAPE, dtype)
    lowered = jax.jit(run).lower(shape)
    compiled = [lowered.compile(compiler_options=options) for options in COMPILERS]
    random = np.random.default_rng(0)
    rows = np.exp2(random.uniform(-6, 0, (SHAPE[0], 1))).astype(np.float32)
    x = random.standard_normal(SHAPE).astype(np.float32) * rows
    for amax in [448.0, *random.uniform(1e-3, 1e3, 5)]:
        given = jnp.asarray(x * np.float32(amax / np.abs(x).max()), dtype)
        eager = run(given)
        for one in compiled:
            helpers.assert_same_bits(one(given), eager)


@each_kind
def test_axis_is_where_the_blocks_lie(name: str):
    """Along axis 0 the result is that of the transposed array, transposed."""
    quantizer, _ = QUANTIZERS[name]
    x = jnp.asarray(DATA["outliers"]())

    @jax.jit
    def run(x):
        q = quantize(x.T, quantizer, axis=0)
        return q, q.dequantize()

    q, transposed = run(x)
    straight, values = jitted(name)(x)
    assert q.shape == x.T.shape
    helpers.assert_same_bits(transposed, np.asarray(values).T)
    helpers.assert_same_bits(q.inverse_scale, np.asarray(straight.inverse_scale).T)
    if q.format is not mpx.Format.E2M1 or quantizer.block_dimensions == 1:
        helpers.assert_same_bits(q.payload, np.asarray(straight.payload).T)


finite = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@pytest.mark.parametrize(
    "name", helpers.slow_but(["1x128", "mxfp8 e4m3", "nvfp4 16x16"], QUANTIZERS)
)
@hypothesis.given(block=hnp.arrays(np.float32, 256, elements=finite))
def test_the_error_is_at_most_half_a_step(name: str, block: np.ndarray):
    """Half a unit in the last place, or half the smallest step of the block's scale."""
    x = np.broadcast_to(block, (SHAPE[0], 256)).T.reshape(-1)[: SHAPE[0] * 256]
    x = np.concatenate([x, np.zeros(SHAPE[0] * 128, "f4")]).reshape(SHAPE)
    q, values = jitted(name)(x)
    factors = np.asarray(q.inverse_scale, np.float64)
    if q.tensor_inverse_scale is not None:
        factors = factors * float(q.tensor_inverse_scale)
    if factors.ndim:
        block = np.array(SHAPE) // factors.shape
        factors = np.kron(factors, np.ones(block))
    bits = reference.FORMATS[q.format.name]
    largest = bits.largest * factors
    relative = 2.0 ** -(bits.mantissa + 1) * np.abs(x)
    bound = np.maximum(relative, q.format.smallest / 2 * factors) * (1 + 1e-5)
    # An NVFP4 block's scale is itself rounded, perhaps down: then numbers saturate.
    bound = np.maximum(bound, np.abs(x) - largest * (1 - 1e-5))
    assert (np.abs(np.asarray(values, np.float64) - x) <= bound + 2.0**-126).all()
    if q.format is mpx.Format.E2M1:
        slack = 2.0**-10 * np.abs(x).max() + 2.0**-126
        assert (np.abs(x) <= largest * (1 + 2.0**-3) + slack).all()


@each_kind
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_nan_and_so_is_its_block(name: str, value: float):
    quantizer, _ = QUANTIZERS[name]
    x = np.ones(SHAPE, np.float32)
    x[0, 3] = value
    bad = ~np.isfinite(x)
    if quantizer.format.bits == 4:  # by the scale of the tensor
        bad[...] = True
    elif quantizer.block:
        square = quantizer.block_dimensions == 2
        bad[: quantizer.block if square else 1, : quantizer.block] = True
    _, values = jitted(name)(x)
    np.testing.assert_array_equal(values, np.where(bad, np.nan, 1))


@pytest.mark.parametrize("format", [mpx.Format.E4M3, mpx.Format.E5M2])
def test_with_a_scale_that_is_given_only_what_is_not_finite_is_nan(format):
    x = jnp.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 1.0, 0.0], jnp.float32)
    quantizer = TensorQuantizer(format)
    # 3e38 times 8 is infinite in float32, and still a finite number that saturates.
    for transform in (lambda f: f, jax.jit):
        q = transform(lambda x: quantize(x, quantizer, scale=8.0))(x)
        found = q.payload.astype(jnp.float32)
        expected = np.array([*(np.nan,) * 3, format.largest, -format.largest, 8, 0])
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(q.dequantize(), expected / 8)


@pytest.mark.parametrize("shape", [(), (0, 128), (3,)])
def test_one_scale_takes_any_shape(shape: tuple[int, ...]):
    @jax.jit
    def run(x):
        q = quantize(x, TensorQuantizer())
        return q, q.dequantize()

    q, values = run(np.ones(shape, jnp.bfloat16))
    assert q.shape == shape and values.shape == shape
    assert (np.asarray(values) == 1).all()
