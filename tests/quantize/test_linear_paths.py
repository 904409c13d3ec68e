"""The paths of other devices: what is lowered for them, and the same bits on a CPU.

Nothing is compiled for a device here. StableHLO is what JAX hands to its compiler: the
forms in it are those that become calls of FP8 and block-scaled units.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpx
from mpx._quantize import target_from
from mpx._quantize._products._contraction import contractions
from mpx._quantize._products._lowering import (
    _dequantized,
    _in_fp8,
    _in_fp8_to_sum,
    _with_axis_last,
)
from mpx.quantization import AbstractRecipe, Leg, Quantizer, Role, TensorQuantizer
from tests.autocast.counting import equations
from tests.nn.cases import relative_error
from tests.quantize import linear_cases as linear
from tests.quantize.linear_cases import RECIPES, lowered_for, matrix_product, trained

F8 = r"tensor<\d+x\d+xf8E\dM\d(?:FN)?>"
CURRENT = mpx.Float8CurrentScaling()
SMALL = (64, 32), (32, 16)


def lowered(
    recipe, target, shapes=((256, 512), (512, 128)), dtype="bfloat16", **options
):
    """The lines of products in what is lowered for forward and backward."""
    found = target_from(target)
    product = matrix_product(recipe, dtype, found, **options)
    lines = lowered_for(found, trained(product), *shapes).splitlines()
    return [line for line in lines if re.search(r"dot_general|call @__op\$", line)]


def test_fp8_units_of_cuda():
    forward, *backward = lowered(CURRENT, "sm_90")
    assert len(backward) == 2
    assert "allow_imprecise_accumulation = true" in forward
    for line in (forward, *backward):
        assert len(re.findall(F8, line)) == 2
        assert "algorithm = <lhs_precision_type = f8E" in line
    for line in backward:
        assert "allow_imprecise_accumulation = false" in line
    results = [line.rpartition("-> ")[2] for line in (forward, *backward)]
    shapes = ("256x128", "256x512", "512x128")
    assert results == [f"tensor<{shape}xbf16>" for shape in shapes]


def test_what_devices_sum_in_float32_is_scaled_before_the_product():
    """So that XLA sums once behind a loop, and gives each device its piece only."""
    summed = np.dtype("float32")
    *others, for_weight = lowered(CURRENT, "sm_90", reduce_dtype=summed)
    for line in others:
        assert len(re.findall(F8, line)) == 2
    assert "(tensor<256x512xf32>, tensor<256x128xf32>)" in for_weight
    assert "precision = [HIGHEST, HIGHEST]" in for_weight
    assert for_weight.endswith("tensor<512x128xf32>")
    # cuBLAS is called for bfloat16 only where the scale comes afterwards.
    *_, for_weight = lowered(CURRENT, "sm_90", reduce_dtype=np.dtype("bfloat16"))
    assert len(re.findall(F8, for_weight)) == 2


def test_scales_before_a_product_give_what_they_give_behind_it():
    left, right, forward = operands(CURRENT)
    found = jax.jit(_in_fp8_to_sum, static_argnums=2)(left, right, forward)
    assert found.dtype == jnp.float32
    assert relative_error(found, dequantized(left, right, forward)) < 1e-6


def test_products_on_fp8_units_of_cuda_stand_alone():
    """XLA joins those that share an operand, and does not compile all gelus behind."""

    def barriers(name: str) -> list[str]:
        target = target_from(name)
        product = matrix_product(CURRENT, "bfloat16", target)
        text = lowered_for(target, trained(product), *SMALL)
        return re.findall(r"optimization_barrier.*: (.*)", text)

    operand = "tensor<64x32xf8E4M3FN>, tensor<f32>"
    assert barriers("sm_90") == [operand, "tensor<64x16xbf16>"]
    assert barriers("tpu7x") == []


def barriers_of(f, *shapes) -> list[list[str]]:
    """The dtypes of what waits together."""
    closed = jax.make_jaxpr(f)(*(jnp.ones(shape) for shape in shapes))
    barriers = [e for e, _ in equations(closed) if "barrier" in e.primitive.name]
    return [[str(v.aval.dtype) for v in e.outvars] for e in barriers]


def test_nothing_waits_for_the_amaxes_of_delayed_scaling():
    """So that devices join those of a step at once."""
    product = matrix_product(mpx.DelayedScaling(), "bfloat16", target_from("sm_90"))
    kinds = barriers_of(trained(product), *SMALL, (3,))
    # The data with its scale, and the gradient.
    assert ["float8_e4m3fn", "float32"] in kinds and ["float8_e5m2"] in kinds
    assert all(len(kind) <= 2 for kind in kinds)


def test_fp8_units_give_float32_where_the_scale_is_not_taken_in():
    for options in ({"dtype": "float16"}, {"shapes": ((255, 512), (512, 128))}):
        for line in lowered(CURRENT, "sm_90", **options)[:2]:
            assert len(re.findall(F8, line)) == 2 and line.endswith("xf32>")


@pytest.mark.parametrize(
    ("recipe", "target", "shapes"),
    [
        (CURRENT, "sm_80", ((256, 512), (512, 128))),
        (CURRENT, "tpu v5e", ((256, 512), (512, 128))),
        (CURRENT, "sm_90", ((1, 512), (512, 128))),
        (mpx.MXFP8BlockScaling(), "sm_90", ((256, 512), (512, 128))),
    ],
)
def test_without_units_products_are_of_half_precision(recipe, target: str, shapes):
    lines = lowered(recipe, target, shapes)
    operands = [re.findall(r"x(bf16|f32|f8\w+)>", line) for line in lines]
    assert operands[0] == ["bf16", "bf16", "f32"]


def test_fp8_of_tpus_has_no_preset():
    for line in lowered(CURRENT, "tpu7x"):
        assert len(re.findall(F8, line)) == 2 and "algorithm" not in line


def test_e5m2_by_e5m2_is_left_out():
    def wide(role: Role, leg: Leg) -> Quantizer:
        return TensorQuantizer(mpx.Format.E5M2)

    for line in lowered(mpx.CustomRecipe(wide), "sm_90"):
        assert not re.findall(F8, line)


HYBRID = mpx.MXFP8BlockScaling(mpx.Format.HYBRID)
BLOCKS = [mpx.MXFP8BlockScaling(), mpx.NVFP4BlockScaling()]


@pytest.mark.parametrize("recipe", [*BLOCKS, HYBRID])
def test_block_scaled_units(recipe: AbstractRecipe):
    lines = lowered(recipe, "sm_100")
    assert len(lines) == 3 and all("block_scaled_dot" in line for line in lines)


def test_block_scaled_units_under_vmap_get_one_batch():
    target = target_from("sm_100")
    product = matrix_product(mpx.MXFP8BlockScaling(), "bfloat16", target)
    f = jax.vmap(functools.partial(linear.linear_product, product), (0, None))
    program = lowered_for(target, f, (5, 64, 96), (96, 32))
    assert re.search(r"call @__op\$block_scaled_dot.*tensor<5x64x96xf8E4M3FN>", program)


@pytest.mark.parametrize("recipe", BLOCKS, ids=type)
def test_block_scaled_units_in_a_program_per_device(recipe: AbstractRecipe):
    target = target_from("sm_100")
    product = matrix_product(recipe, "bfloat16", target)
    f = jax.shard_map(
        functools.partial(linear.linear_product, product),
        mesh=jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(P("d"), P()),
        out_specs=P("d"),
    )
    program = lowered_for(target, f, (64, 96), (96, 32))
    assert "block_scaled_dot" in program and "tensor<1x32x96x" in program


def test_what_is_kept_stays_narrow_where_nothing_computes_with_it():
    """Compilers leave out narrowing and widening again, but for a barrier."""

    def barriers(target: str) -> list[list[str]]:
        product = matrix_product(CURRENT, "bfloat16", target_from(target))
        loss = lambda *args: linear.linear_product(product, *args).sum()  # noqa: E731
        found = barriers_of(jax.grad(loss, (0, 1)), *SMALL)
        # But for scales, which are float32.
        return [[dtype for dtype in kind if dtype != "float32"] for kind in found]

    narrow = ["float8_e4m3fn", "float8_e4m3fn"]
    assert barriers("sm_80") == [["bfloat16", *narrow], ["float8_e5m2", "float8_e5m2"]]
    # Operand and result, which stand alone.
    assert barriers("sm_90") == [["float8_e4m3fn"], ["bfloat16"]]


# Each recipe and each device; that a path is right is what other tests are about.
@pytest.mark.parametrize(
    ("recipe_name", "target"),
    [
        ("delayed", "sm_80"),
        ("nvfp4", "sm_100"),
        pytest.param("delayed", "sm_100", marks=pytest.mark.slow),
        pytest.param("mxfp8", "tpu7x", marks=pytest.mark.slow),
        pytest.param("nvfp4", "tpu7x", marks=pytest.mark.slow),
    ],
)
def test_a_program_for_another_device_runs_on_the_cpu(recipe_name: str, target: str):
    recipe, layout = RECIPES[recipe_name], linear.LAYOUTS["3-D"]
    here = linear.product_of(recipe, layout, "bfloat16")
    there = dataclasses.replace(here, target=target_from(target))
    args = (*linear.data(layout), linear.scales_of(recipe))
    results = (linear.result_and_gradients(one, *args) for one in (there, here))
    jax.tree.map(np.testing.assert_array_equal, *results)


def operands(recipe: AbstractRecipe, shape=(64, 96)):
    normal = np.random.default_rng(0).standard_normal
    left, right = normal(shape, np.float32), normal((shape[1], 48), np.float32)
    forward = contractions(linear.MATRICES, 2, 2).forward
    return *linear.quantized_operands(recipe, left, right / 10), forward


@functools.partial(jax.jit, static_argnums=(2, 3))
def dequantized(left, right, forward, inner="float32"):
    return _dequantized(left, right, forward, np.dtype(inner), np.dtype("float32"))


in_fp8 = jax.jit(_in_fp8, static_argnums=(2, 3, 4))


@pytest.mark.parametrize("recipe_name", ["current", "nvfp4"])
def test_half_precision_holds_the_numbers_of_8_and_4_bits(recipe_name: str):
    """They are exact in it, and what is common to a tensor is applied afterwards."""
    args = operands(RECIPES[recipe_name].recipe)
    assert relative_error(dequantized(*args, "bfloat16"), dequantized(*args)) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_scaling_of_fp8_units_is_that_of_the_emulation(dtype: str):
    left, right, forward = operands(CURRENT)
    found = in_fp8(left, right, forward, np.dtype(dtype), None)
    error = relative_error(found, dequantized(left, right, forward))
    assert found.dtype == dtype
    assert error <= max(1e-6, float(jnp.finfo(dtype).eps) / 2)


@pytest.mark.parametrize("recipe_name", ["mxfp8", "nvfp4"])
def test_block_scaled_units_get_the_numbers_that_were_quantized(recipe_name: str):
    left, right, forward = operands(RECIPES[recipe_name].recipe)
    exact = dequantized(left, right, forward)
    dense = []
    for operand, axis in ((left, -1), (right, -2)):
        payload, scales = jax.jit(_with_axis_last, static_argnums=1)(operand, axis)
        block = payload.shape[-1] // scales.shape[-1]
        assert payload.ndim == 3 and block == operand.block
        scales = np.repeat(np.asarray(scales, np.float64), block, axis=-1)
        x = np.asarray(payload, np.float64) * scales
        if operand.tensor_inverse_scale is not None:
            x = x * np.float64(operand.tensor_inverse_scale)
        dense.append(x[0])
    found = dense[0] @ dense[1].T
    assert np.abs(found - exact).max() <= 1e-6 * np.abs(exact).max()
