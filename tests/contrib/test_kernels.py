"""MXFP8 and NVFP4 by kernels of Pallas: XLA's numbers, on one device and on many.

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
from mpx.contrib._pallas import in_both_layouts
from mpx.contrib._tiles import has_tiles
from mpx.quantization import Leg, MXFP8Quantizer, NVFP4Quantizer, Role, quantize
from tests.collectives import compiled
from tests.contrib import kernels
from tests.contrib.kernels import lowered, two_axes, wild
from tests.helpers import slow_but

pytestmark = kernels.filter_deprecation
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

HALF = np.dtype("bfloat16")
PALLAS = mpx.NVFP4BlockScaling(kernel=mpx.contrib.PallasKernel())
XLA = mpx.NVFP4BlockScaling()
PLAIN = mpx.NVFP4BlockScaling(disable_rht=True)
# Those of a linear layer y = x w.
AXES = {Role.INPUT: (-1, -2), Role.WEIGHT: (-2, -1), Role.GRADIENT: (-1, -2)}
# A format is one of MXFP8, a role one in NVFP4.
E4M3 = mpx.Format.E4M3
KINDS = (E4M3, *Role)
jitted = functools.partial(jax.jit, static_argnames=("kind", "recipe", "rounded_to"))


@jitted
def by_xla(x, kind, recipe=XLA, step=3, rounded_to=None):
    if isinstance(kind, mpx.Format):
        found = [quantize(x, MXFP8Quantizer(kind), axis=axis) for axis in (-1, -2)]
        arrays = [(q.payload, q.inverse_scale.view(jnp.uint8)) for q in found]
        return *arrays[0], *(x.mT for x in arrays[1])
    axes, step = AXES[kind], jnp.int32(step)
    copies = Copies(recipe, kind, HALF, CPU, alone, axes, step, rounded_to)
    found = first, _ = copies.both(x)
    if kind is Role.WEIGHT and not recipe.disable_2d_quantization:
        return tuple(_packed_along(first, axis) for axis in axes)
    return found


@jitted
def interpreted(x, kind, recipe=XLA, step=3, rounded_to=None):
    if isinstance(kind, mpx.Format):
        return in_both_layouts(x, kind, rounded_to, interpret=True)
    second = recipe.quantizer(kind, leg=Leg.DGRAD if kind is Role.WEIGHT else Leg.WGRAD)
    options = {"step": jnp.int32(step), "rounded_to": rounded_to, "interpret": True}
    both = recipe.quantizer(kind), second
    return quantize_four_bits(x, both, HALF, AXES[kind], alone, **options)


def assert_same(found, want):
    """Bit for bit, one NaN like another."""
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        np.testing.assert_array_equal(a, b)
        assert (np.isnan(a) | (np.signbit(a) == np.signbit(b))).all()


@functools.partial(jax.jit, static_argnums=(0, 1))
def numbers(shape, dtype="bfloat16"):
    """Numbers of many magnitudes, a block of zeros among them."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[1], shape) * jnp.exp(jax.random.normal(keys[0], shape))
    return x.at[..., 32:64, :32].set(0).astype(dtype)


def data_of(kind, shape, dtype="bfloat16"):
    return (wild if isinstance(kind, mpx.Format) else numbers)(shape, dtype)


def integers(shape, dtype="bfloat16"):
    """Numbers whose sums over 16 are exact in bfloat16, in any order."""
    return jax.random.randint(jax.random.key(2), shape, -3, 4).astype(dtype)


def exact_of(kind, shape):
    return wild(shape) if isinstance(kind, mpx.Format) else integers(shape)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        (E4M3, (128, 96), "float32"),
        (mpx.Format.E5M2, (128, 96), "bfloat16"),
        (E4M3, (128, 96), "float16"),
        (Role.INPUT, (128, 96), "bfloat16"),
        (Role.WEIGHT, (64, 96), "float32"),
        (Role.GRADIENT, (64, 96), "float32"),
        slow(E4M3, (2, 64, 128), "bfloat16"),
        slow(Role.INPUT, (64, 64), "float32"),
        slow(Role.WEIGHT, (2, 64, 128), "float32"),
        slow(Role.GRADIENT, (64, 96), "float16"),
    ],
)
def test_numbers_are_those_of_the_quantizers(kind, shape, dtype):
    x = data_of(kind, shape, dtype)
    assert_same(interpreted(x, kind, PLAIN), by_xla(x, kind, PLAIN))


@pytest.mark.parametrize("role", [Role.INPUT, Role.GRADIENT])
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float32"]))
def test_the_transform_is_that_of_the_quantizer(role, dtype):
    x = integers((96, 64), dtype)
    assert_same(interpreted(x, role), by_xla(x, role))


def test_one_copy_of_rows_is_transformed_too():
    """As where a program has the contracted axis of its data first."""
    x, one = integers((64, 96)), NVFP4Quantizer()
    other = NVFP4Quantizer(hadamard=True, signs=(1, -1) * 8)

    @jax.jit
    def both(x):
        args = (one, other), HALF, (-2, -1), alone
        want = quantize(x, one, axis=-2), quantize(x, other, axis=-1)
        want = tuple(dataclasses.replace(q, guard=None) for q in want)
        return quantize_four_bits(x, *args, interpret=True), want

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


@pytest.mark.parametrize("kind", slow_but([E4M3, Role.WEIGHT], KINDS))
def test_a_kernel_rounds_first_what_the_program_rounds(kind):
    x = data_of(kind, (64, 96), "float32")
    found = interpreted(x, kind, PLAIN, rounded_to=HALF)
    plain = interpreted(x, kind, PLAIN)
    assert_same(found, by_xla(x.astype(HALF), kind, PLAIN))
    pairs = zip(*map(jax.tree.leaves, (found, plain)), strict=True)
    assert any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


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


@pytest.mark.parametrize("kind", KINDS)
def test_no_maximum_of_a_kernel_loses_a_nan(kind):
    """On a GPU a maximum of floats does: Pallas lowers it to `maxnumf`."""
    run = functools.partial(interpreted, kind=kind)
    found = kernels.dtypes_of_maxima(run, data_of(kind, (64, 96)))
    assert set(found) == {np.dtype("int32")} and (kind is not E4M3 or len(found) == 2)


@pytest.mark.parametrize("kind", slow_but([E4M3, Role.GRADIENT], KINDS))
def test_vmap_of_a_kernel(kind):
    """Each array with its own scale and its own noise."""
    x = exact_of(kind, (3, 64, 96))
    found = jax.vmap(lambda x: interpreted(x, kind), 1)(jnp.moveaxis(x, 0, 1))
    each = [interpreted(one, kind) for one in x]
    assert_same(found, jax.tree.map(lambda *xs: jnp.stack(xs), *each))


ROWS_AND_COLUMNS = P(None, "a", "b")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (E4M3, ROWS_AND_COLUMNS),
        (E4M3, P()),
        *slow_but(
            [(Role.GRADIENT, ROWS_AND_COLUMNS)],
            zip(Role, (P(), P("b", "a"), ROWS_AND_COLUMNS), strict=True),
        ),
    ],
)
def test_each_device_quantizes_its_part(kind, spec):
    x = exact_of(kind, (2, 256, 128))
    there = jax.device_put(x, NamedSharding(two_axes(), spec))
    run, sent = compiled(functools.partial(interpreted, kind=kind), there, devices=8)
    found = run(there)
    assert_same(found, interpreted(x, kind))
    if kind is E4M3:
        assert not sent and "all-" not in run.as_text()
        assert found[0].sharding.is_equivalent_to(there.sharding, 3)
    # Amaxes and hashes of blocks travel, no numbers.
    assert sum(message.bytes for message in sent) <= x.nbytes // 64


@pytest.mark.parametrize("kind", [E4M3, slow(Role.GRADIENT)])
def test_a_block_on_two_devices_is_brought_together(kind):
    x = exact_of(kind, (2, 256, 128))
    sharding = NamedSharding(two_axes(), P(None, None, ("a", "b")))
    found = interpreted(jax.device_put(x, sharding), kind)
    assert_same(found, interpreted(x, kind))


def mapped(f, mesh, out_specs, **options):
    return jax.shard_map(
        f, mesh=mesh, in_specs=P("a", "b"), out_specs=out_specs, **options
    )


def test_eight_bits_in_shard_map():
    x, whole, turned = wild((256, 128)), P("a", "b"), P("b", "a")
    specs = (whole, whole, turned, turned)
    run = functools.partial(interpreted, kind=E4M3)
    found = mapped(run, two_axes(), specs, check_vma=False)(x)
    assert_same(found, interpreted(x, E4M3))
    # JAX interprets no kernel where it checks what varies, and lowers one.
    for_a_gpu = lambda x: in_both_layouts(x, E4M3)  # noqa: E731
    text = lowered(mapped(for_a_gpu, kernels.mesh_of_b200s(), specs), x)
    assert text.count("xla.gpu.triton") == 1


@pytest.mark.slow
def test_four_bits_in_shard_map():
    x, role = integers((256, 128)), Role.INPUT
    join, specs = joined_over(("a", "b"), all_vary=True), P("a", "b")
    both = PALLAS.quantizer(role), PALLAS.quantizer(role, leg=Leg.WGRAD)

    def dequantized(x, interpret=True, join=join):
        args = both, HALF, AXES[role], join
        one, other = quantize_four_bits(x, *args, interpret=interpret)
        return one.dequantize(), other.dequantize(rotated=True)

    found = jax.jit(mapped(dequantized, two_axes(), specs, check_vma=False))(x)
    assert_same(found, jax.jit(functools.partial(dequantized, join=alone))(x))
    for_a_gpu = functools.partial(dequantized, interpret=False)
    text = lowered(mapped(for_a_gpu, kernels.mesh_of_b200s(), specs), x)
    assert text.count("xla.gpu.triton") == 2


def test_no_place_is_beyond_32_bits():
    assert has_tiles((2**16, 2**15))
    assert not has_tiles((2**16, 2**16))
