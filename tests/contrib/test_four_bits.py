"""NVFP4 by kernels of Pallas: XLA's numbers, on one device and on many.

Interpreted on the CPU, and lowered for CUDA; no GPU has run them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mpx
from mpx._quantize._formats._blocks import alone, joined_over
from mpx._quantize._formats._target import CPU
from mpx._quantize._products._operands import Copies, _packed_along
from mpx.contrib._four_bits import quantize_four_bits
from mpx.contrib._tiles import has_tiles
from tests.collectives import compiled
from tests.contrib.kernels import (
    dtypes_of_maxima,
    filter_deprecation,
    lowered,
    mesh_of_b200s,
    two_axes,
    wild,
)
from tests.helpers import slow_but

pytestmark = filter_deprecation

Role, NVFP4Quantizer = mpx.quantization.Role, mpx.quantization.NVFP4Quantizer
HALF = np.dtype("bfloat16")
PALLAS = mpx.NVFP4BlockScaling(kernel=mpx.contrib.PallasKernel())
XLA = mpx.NVFP4BlockScaling()
PLAIN = mpx.NVFP4BlockScaling(disable_rht=True)
# Those of a linear layer y = x w.
AXES = {Role.INPUT: (-1, -2), Role.WEIGHT: (-2, -1), Role.GRADIENT: (-1, -2)}


@functools.partial(jax.jit, static_argnames=("role", "recipe", "rounded_to"))
def by_xla(x, role, recipe=XLA, step=3, rounded_to=None):
    """Both copies, of the quantizers."""
    copies = Copies(
        recipe, role, HALF, CPU, alone, AXES[role], jnp.int32(step), rounded_to
    )
    first, again = copies.begin(x)
    found = first, again(first)
    if role is Role.WEIGHT and not recipe.disable_2d_quantization:
        return tuple(_packed_along(first, axis) for axis in AXES[role])
    return found


@functools.partial(jax.jit, static_argnames=("role", "recipe", "rounded_to"))
def interpreted(x, role, recipe=XLA, step=3, rounded_to=None):
    """Both copies, of the kernels."""
    second = recipe.quantizer(role, for_wgrad=role is not Role.WEIGHT)
    return quantize_four_bits(
        x,
        (recipe.quantizer(role), second),
        HALF,
        AXES[role],
        alone,
        step=jnp.int32(step),
        rounded_to=rounded_to,
        interpret=True,
    )


def assert_same(found, want):
    assert jax.tree.structure(found) == jax.tree.structure(want)

    def bits(x):
        x = np.asarray(x)
        return np.where(np.isnan(x.astype(np.float32)), 0, x.astype(np.float32))

    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


@functools.partial(jax.jit, static_argnums=(0, 1))
def numbers(shape, dtype="bfloat16"):
    """Numbers of many magnitudes, a block of zeros among them."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[1], shape) * jnp.exp(jax.random.normal(keys[0], shape))
    return x.at[..., 32:64, :32].set(0).astype(dtype)


def integers(shape, dtype="bfloat16"):
    """Numbers whose sums over 16 are exact in bfloat16, in any order."""
    return jax.random.randint(jax.random.key(2), shape, -3, 4).astype(dtype)


@pytest.mark.parametrize(
    ("role", "shape", "dtype"),
    [
        (Role.INPUT, (128, 96), "bfloat16"),
        (Role.WEIGHT, (64, 96), "float32"),
        (Role.GRADIENT, (64, 96), "float32"),
        pytest.param(Role.INPUT, (64, 64), "float32", marks=pytest.mark.slow),
        pytest.param(Role.WEIGHT, (2, 64, 128), "float32", marks=pytest.mark.slow),
        pytest.param(Role.GRADIENT, (64, 96), "float16", marks=pytest.mark.slow),
    ],
)
def test_its_numbers_are_those_of_the_quantizers(role, shape, dtype):
    x = numbers(shape, dtype)
    found = interpreted(x, role, PLAIN)
    assert_same(found, by_xla(x, role, PLAIN))


@pytest.mark.parametrize("role", [Role.INPUT, Role.GRADIENT])
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float32"]))
def test_the_transform_is_that_of_the_quantizer(role, dtype):
    x = integers((96, 64), dtype)
    assert_same(interpreted(x, role), by_xla(x, role))


def test_one_copy_of_rows_is_transformed_too():
    """As where a program has the contracted axis of its data first."""
    x, one = integers((64, 96)), NVFP4Quantizer()
    signs = (1, -1) * 8
    other = NVFP4Quantizer(hadamard=True, signs=signs)

    @jax.jit
    def both(x):
        found = quantize_four_bits(
            x, (one, other), HALF, (-2, -1), alone, interpret=True
        )
        want = (
            mpx.quantization.quantize(x, one, axis=-2),
            mpx.quantization.quantize(x, other, axis=-1),
        )
        return found, tuple(dataclasses.replace(q, guard=None) for q in want)

    assert_same(*both(x))


@pytest.mark.slow
def test_sums_of_the_transform_differ_by_their_order_only():
    x = numbers((256, 64))
    found, want = (f(x, Role.INPUT)[1] for f in (interpreted, by_xla))
    a, b = (jnp.asarray(q.dequantize(rotated=True), jnp.float32) for q in (found, want))
    # The quantizer on the CPU does not round sums to bfloat16, so that few numbers
    # change sides.
    assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(b)
    exact = mpx.quantization.hadamard_transform(x.astype(jnp.float32), axis=-2)
    errors = [float(jnp.linalg.norm(one - exact)) for one in (a, b)]
    assert abs(errors[0] / errors[1] - 1) < 0.01


@pytest.mark.parametrize("disabled", slow_but([True], [True, False]))
def test_weights_of_long_blocks(disabled):
    recipe = mpx.NVFP4BlockScaling(disable_2d_quantization=disabled)
    x = numbers((64, 96), "float32")
    found = interpreted(x, Role.WEIGHT, recipe)
    assert_same(found, by_xla(x, Role.WEIGHT, recipe))


@pytest.mark.parametrize("role", slow_but([Role.WEIGHT], Role))
def test_it_rounds_first_what_the_program_rounds(role):
    x = numbers((64, 96), "float32")
    found = interpreted(x, role, PLAIN, rounded_to=HALF)
    assert_same(found, by_xla(x.astype(HALF), role, PLAIN))
    plain = interpreted(x, role, PLAIN)
    assert any(
        (a.payload != b.payload).any() for a, b in zip(found, plain, strict=True)
    )


@pytest.mark.parametrize("role", slow_but([Role.GRADIENT], Role))
def test_zeros_are_zeros_and_what_is_not_finite_shows_everywhere(role):
    for copy in interpreted(jnp.zeros((64, 96), HALF), role):
        assert (copy.dequantize() == 0).all()
        assert float(copy.tensor_inverse_scale) == 1
    for bad in (jnp.inf, jnp.nan):
        for copy in interpreted(numbers((64, 96)).at[5, 40].set(bad), role):
            assert jnp.isnan(copy.dequantize(rotated=True)).all()


def test_extreme_magnitudes():
    """Where scales of blocks are zero, subnormal, or the largest there is."""
    x = wild((64, 96))
    x = jnp.where(jnp.isfinite(x), x, 0)
    for role in Role:
        assert_same(interpreted(x, role, PLAIN), by_xla(x, role, PLAIN))


@pytest.mark.parametrize("role", Role)
def test_no_maximum_of_it_loses_a_nan(role):
    """On a GPU a maximum of floats does: Pallas lowers it to `maxnumf`."""
    found = dtypes_of_maxima(
        functools.partial(interpreted, role=role), numbers((64, 96))
    )
    assert set(found) == {np.dtype("int32")}


@pytest.mark.parametrize("role", slow_but([Role.GRADIENT], Role))
def test_vmap(role):
    """Each array with its own scale and its own noise."""
    x = integers((3, 64, 96))
    found = jax.vmap(lambda x: interpreted(x, role), 1)(jnp.moveaxis(x, 0, 1))
    each = [interpreted(one, role) for one in x]
    assert_same(found, jax.tree.map(lambda *xs: jnp.stack(xs), *each))


@pytest.mark.parametrize(
    ("role", "spec"),
    slow_but(
        [(Role.GRADIENT, P(None, "a", "b"))],
        zip(Role, (P(), P("b", "a"), P(None, "a", "b")), strict=True),
    ),
)
def test_each_device_quantizes_its_part(role, spec):
    x = integers((2, 256, 128))
    there = jax.device_put(x, NamedSharding(two_axes(), spec))
    function = functools.partial(interpreted, role=role)
    run, sent = compiled(function, there, devices=8)
    assert_same(run(there), interpreted(x, role))
    # Amaxes and hashes of blocks travel, no numbers.
    assert sum(message.bytes for message in sent) <= x.nbytes // 64


@pytest.mark.slow
def test_a_block_on_two_devices_is_brought_together():
    x = integers((2, 256, 128))
    sharding = NamedSharding(two_axes(), P(None, None, ("a", "b")))
    found = jax.jit(interpreted, static_argnums=1)(
        jax.device_put(x, sharding), Role.GRADIENT
    )
    assert_same(found, interpreted(x, Role.GRADIENT))


@pytest.mark.slow
def test_in_shard_map():
    x, role = integers((256, 128)), Role.INPUT
    join = joined_over(("a", "b"), all_vary=True)

    def dequantized(x, interpret=True, join=join):
        one, other = quantize_four_bits(
            x,
            (PALLAS.quantizer(role), PALLAS.quantizer(role, for_wgrad=True)),
            HALF,
            AXES[role],
            join,
            interpret=interpret,
        )
        return one.dequantize(), other.dequantize(rotated=True)

    mapped = functools.partial(
        jax.shard_map, in_specs=P("a", "b"), out_specs=P("a", "b")
    )
    found = jax.jit(mapped(dequantized, mesh=two_axes(), check_vma=False))(x)
    assert_same(found, jax.jit(functools.partial(dequantized, join=alone))(x))

    # JAX interprets no kernel where it checks what varies, and lowers one.
    for_a_gpu = functools.partial(dequantized, interpret=False)
    text = lowered(mapped(for_a_gpu, mesh=mesh_of_b200s()), x)
    assert text.count("xla.gpu.triton") == 2


def test_no_place_is_beyond_32_bits():
    assert has_tiles((2**16, 2**15))
    assert not has_tiles((2**16, 2**16))
