"""What devices compute otherwise than by arithmetic: the same codes, amaxes, products.

GPUs that round right cast, without masks; CPUs stack bits, and may have bfloat16.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._arithmetic import EXACT, ON_CPU
from mpx._quantize._formats._rounding import flushed, pack, round_to_format
from mpx._quantize._formats._target import CPU, CPU_WITH_UNITS, target_from
from mpx._quantize._quantizers._casting import (
    CAST,
    CAST_OF_WEIGHT,
    _to_e2m1,
    amax_of,
    is_cast,
)
from mpx._quantize._quantizers._kinds import Asked
from tests.autocast.counting import equations
from tests.helpers import slow_but
from tests.quantize.linear_cases import matrix_product, result_and_gradients
from tests.quantize.test_rounding import hard_numbers
from tests.reference import low_precision as reference
from tests.registries import RECIPES

FORMATS = [mpx.Format.E4M3, mpx.Format.E5M2]
H100 = target_from("sm_90")
RANDOM = mpx.quantization.NVFP4Quantizer(stochastic_rounding=True)
QUANTIZERS = {
    "tensor": mpx.quantization.TensorQuantizer(),
    "blocks of 128": mpx.quantization.BlockQuantizer(),
    "mxfp8": mpx.quantization.MXFP8Quantizer(),
    "nvfp4": mpx.quantization.NVFP4Quantizer(),
    "nvfp4 in squares": mpx.quantization.NVFP4Quantizer(block_dimensions=2),
    "nvfp4 to random neighbours": RANDOM,
}
ONE_OF_EACH = ("tensor", "mxfp8", "nvfp4 in squares", "nvfp4 to random neighbours")


@functools.cache
def usual_numbers() -> np.ndarray:
    """Every float16 and bfloat16 number, and a million of float32."""
    bits = np.arange(2**16, dtype=np.uint16)
    random = np.random.default_rng(0)
    spread = random.standard_normal(500_000) * 2.0 ** random.integers(-25, 20, 500_000)
    found = [bits.view(np.float16), bits.view(ml_dtypes.bfloat16), spread]
    found.append(random.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32))
    return np.concatenate([part.astype(np.float32) for part in found])


def numbers() -> np.ndarray:
    x = usual_numbers()
    return x[~(np.abs(x) < 2.0**-126) | (x == 0)]


def coded(by, x, format=mpx.Format.E4M3, key=None) -> np.ndarray:
    found = jax.jit(lambda x: by.to_format(x, format, key))(x)
    return np.asarray(found).view(np.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_of_a_cast_are_those_of_the_arithmetic(format):
    """By this device's cast, which is to round as that of CUDA does."""
    x = numbers()
    cast, exact = (coded(by, x, format) for by in (CAST, EXACT))
    is_nan = np.isnan(x)
    assert np.isnan(cast[is_nan].view(format.dtype).astype(np.float32)).all()
    np.testing.assert_array_equal(cast[~is_nan], exact[~is_nan])


class Here(type(CAST)):
    """XLA:CPU makes no byte of two numbers of 4 bits: "Invalid bitcast i8 to i4"."""

    def to_four_bits(self, x, axis, key):
        return pack(_to_e2m1(x, key).astype(jnp.float32), axis)


HERE = Here()


@pytest.mark.parametrize("scale", [1.0, 2.0**-90, 448.0])
def test_a_weight_is_scaled_by_a_chain_that_gives_the_same_bits(scale):
    x = numbers()
    data = np.asarray(jax.jit(CAST.scaled)(x, jnp.float32(scale)))
    weight = np.asarray(jax.jit(CAST_OF_WEIGHT.scaled)(x, jnp.float32(scale)))
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
        transform = mpx.quantization.hadamard_transform
        exact = np.asarray(transform(x, axis=axis, signs=signs))
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


@pytest.mark.parametrize("name", slow_but(["delayed"], ["current", "delayed"]))
def test_nothing_is_masked_where_the_device_casts(name):
    """A mask of an operand would be written, transposed, to memory."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w).astype(jnp.float32))

    def lowered(target):
        func = mpx.autocast(loss, recipe=RECIPES[name], target=target)
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


# --- CPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_codes_on_cpus_are_those_of_the_arithmetic_and_of_the_cast(format: mpx.Format):
    special = np.float32([0, np.inf, np.nan, 464, 465, 61440, 61441, 3e38, 1e-40])
    hard = hard_numbers(reference.FORMATS[format.name])
    x = np.concatenate([usual_numbers(), hard, special])
    x = np.concatenate([x, -x])
    here, exact = (coded(by, x, format) for by in (ON_CPU, EXACT))
    np.testing.assert_array_equal(here, exact)
    clipped = x.clip(-format.largest, format.largest)[~np.isnan(x)]
    casts = [clipped]  # ml_dtypes', and XLA's, which rounded twice before jaxlib 0.10.2
    casts += [jnp.asarray(clipped)] if jax.__version_info__ >= (0, 10, 2) else []
    for cast in casts:
        found = np.asarray(cast.astype(format.dtype)).view(np.uint8)
        np.testing.assert_array_equal(here[~np.isnan(x)], found)


@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**-60, 2.0**100])
def test_scaled_numbers_have_the_same_codes_on_cpus(scale: float):
    """Of what is subnormal none is left, and NaN of what is not finite."""
    x = np.concatenate([usual_numbers(), hard_numbers(reference.E4M3)])

    @functools.partial(jax.jit, static_argnums=0)
    def run(by, x, scale):
        return by.to_format(by.scaled(x, scale), mpx.Format.E4M3, None)

    exact = run(EXACT, flushed(jnp.asarray(x)), jnp.float32(scale))
    found = run(ON_CPU, x, jnp.float32(scale))
    np.testing.assert_array_equal(found.view(np.uint8), exact.view(np.uint8))


def test_random_neighbours_have_the_same_codes_on_cpus():
    x, key = jnp.linspace(-3, 3, 1000), jax.random.key(0)
    here, exact = (coded(by, x, key=key) for by in (ON_CPU, EXACT))
    np.testing.assert_array_equal(here, exact)


def test_amaxes_are_those_of_the_bits():
    """NaN where there is a NaN, also under a negative sign and beside infinities."""
    special = [0.0, 1e-38, 1.0, 2.0, 1.9999999, 3.4028235e38, np.inf, np.nan, -np.nan]
    random = np.random.default_rng(0)
    rows = random.choice(np.float32([*special, *random.standard_normal(9)]), (500, 4))
    rows = rows * random.choice(np.float32([1, -1]), rows.shape)
    for name, axis in (("largest", {"axis": (1,)}), ("largest_finite", {})):
        for x in (rows, rows[:, :0], rows[0], rows[:1], rows[np.isfinite(rows)]):
            given = axis if x.ndim > 1 else {}
            here, exact = (
                flushed(jax.jit(functools.partial(getattr(by, name), **given))(x))
                for by in (ON_CPU, EXACT)
            )
            np.testing.assert_array_equal(here, exact)


def operands(recipe, dtype: str, target: str) -> list[str]:
    """The dtypes of the operands of the three products of a layer."""
    product = matrix_product(recipe, dtype, target_from(target))
    x, w, g = jnp.ones((64, 128)), jnp.ones((128, 256)), jnp.ones((64, 256))
    program = jax.make_jaxpr(functools.partial(result_and_gradients, product))(x, w, g)
    products = [e for e, _ in equations(program) if e.primitive.name == "dot_general"]
    assert all(e.outvars[0].aval.dtype == jnp.float32 for e in products)
    found = [{str(v.aval.dtype) for v in e.invars} for e in products]
    return [name for (name,) in found]


CURRENT = mpx.Float8CurrentScaling()
HIGH = mpx.Float8CurrentScaling(backward_override="high_precision")
IN_BFLOAT16, IN_FLOAT32 = ["bfloat16"] * 3, ["float32"] * 3


@pytest.mark.skipif(
    not CPU_WITH_UNITS.wants_cpu_form, reason="XLA:CPU has it since jaxlib 0.10.2"
)
@pytest.mark.parametrize(
    ("recipe", "dtype", "found"),
    [
        (CURRENT, "float16", IN_BFLOAT16),
        (mpx.MXFP8BlockScaling(), "float32", IN_BFLOAT16),
        # The Hadamard transform of data meets that of the gradient.
        (mpx.NVFP4BlockScaling(), "bfloat16", IN_BFLOAT16),
        (mpx.Float8BlockScaling(), "bfloat16", IN_FLOAT32),
        (HIGH, "bfloat16", IN_BFLOAT16),
        (HIGH, "float16", ["bfloat16", "float32", "float32"]),
        (HIGH, "float32", ["bfloat16", "float32", "float32"]),
    ],
)
def test_operands_are_bfloat16_where_that_is_exact(recipe, dtype, found):
    assert operands(recipe, dtype, "cpu bf16") == found


def test_a_layer_has_the_same_gradients_in_bfloat16_and_in_float32():
    """Sums of these are exact, in any order."""
    random = np.random.default_rng(0)
    arrays = [random.integers(-4, 5, s) for s in ((32, 64), (64, 48), (32, 48))]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    targets = target_from("A100"), CPU_WITH_UNITS
    products = [matrix_product(CURRENT, "bfloat16", target) for target in targets]
    wide, narrow = (result_and_gradients(product, *arrays) for product in products)
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


STEPS = 37  # the length of no other axis


def scanned(multiply):
    def loss(w, x):
        cell = lambda h, x: (jnp.tanh(x + multiply(h, w)), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[0] ** 2)

    return loss


def convolved(h, w):
    images, kernel = h.reshape(2, 16, 8, 8), w.reshape(8, 8, 8, 8)[:3, :3]
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=layout
    )
    return y.reshape(h.shape)


def routed(h, w):
    return jax.lax.ragged_dot(h, jnp.stack([w, w]), jnp.array([20, 12]))


def gradient_of(multiply, recipe_name):
    loss = scanned(multiply)
    low = mpx.autocast(loss, recipe=RECIPES[recipe_name], target="cpu")
    w, x = jnp.ones((64, 64)), jnp.ones((STEPS, 32, 64))
    scaling = mpx.init_scaling(low, w, x)
    return (lambda w, s: mpx.value_and_grad(low, s)(w, x)), (w, scaling)


@pytest.mark.parametrize(
    ("multiply", "recipe"),
    [
        *((jnp.matmul, name) for name in RECIPES if name != "custom"),
        *((routed, name) for name in ("delayed", "mxfp8", "nvfp4")),
        (convolved, "current"),
    ],
)
def test_a_scan_stacks_bits(multiply, recipe):
    step, args = gradient_of(multiply, recipe)
    program = jax.make_jaxpr(step)(*args)
    scans = [e for e, _ in equations(program) if e.primitive.name == "scan"]
    moved = {str(v.aval.dtype) for e in scans for v in (*e.invars, *e.outvars)}
    assert len(scans) == 2 and moved & {"uint8", "int8"}
    assert not any(name.startswith("float8") for name in moved)


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_no_loop_converts_a_stack_of_8_bits(recipe: str):
    """As XLA:CPU does with one of 8-bit floats: to float16 and back, in each step."""
    step, args = gradient_of(jnp.matmul, recipe)
    text = jax.jit(step).lower(*args).compile().as_text()
    assert re.search(rf"= u8\[{STEPS},32,64\]\S* dynamic-update-slice\(", text)
    assert not re.search(rf"= (f8\w+|f16|u8)\[{STEPS},\S* convert\(", text)
