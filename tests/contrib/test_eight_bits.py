"""MXFP8 by a kernel of Pallas: XLA's numbers, on one device and on many.

Interpreted on the CPU, and lowered for CUDA; no GPU has run it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mpx
from mpx.contrib._pallas import in_both_layouts
from tests.contrib.kernels import (
    dtypes_of_maxima,
    filter_deprecation,
    lowered,
    mesh_of_b200s,
    two_axes,
    wild,
)

pytestmark = filter_deprecation


def interpreted(x, format=mpx.Format.E4M3, rounded_to=None):
    return in_both_layouts(x, format, rounded_to, interpret=True)


def bits(tree):
    """The bytes of arrays, one NaN like another."""
    return jax.tree.map(
        lambda x: np.where(
            np.isnan(np.asarray(x, np.float32)), 255, np.asarray(x).view(np.uint8)
        ),
        tree,
    )


@functools.partial(jax.jit, static_argnums=1)
def by_xla(x, format):
    """The same four arrays from the quantizer."""
    found = []
    for axis in (-1, -2):
        q = mpx.quantization.quantize(
            x, mpx.quantization.MXFP8Quantizer(format), axis=axis
        )
        codes = jax.lax.bitcast_convert_type(q.inverse_scale, jnp.uint8)
        found += [q.payload, codes] if axis == -1 else [q.payload.mT, codes.mT]
    return tuple(found)


@pytest.mark.parametrize(
    ("shape", "dtype", "format"),
    [
        ((128, 96), "float32", mpx.Format.E4M3),
        ((128, 96), "bfloat16", mpx.Format.E5M2),
        ((128, 96), "float16", mpx.Format.E4M3),
        pytest.param((2, 64, 128), "bfloat16", mpx.Format.E4M3, marks=pytest.mark.slow),
    ],
)
def test_its_numbers_are_those_of_the_quantizer(format, dtype, shape):
    x = wild(shape, dtype)
    found = jax.jit(interpreted, static_argnums=1)(x, format)
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(by_xla(x, format)))


def test_it_rounds_first_what_the_program_rounds():
    x = wild((64, 96))
    jitted = jax.jit(interpreted, static_argnums=(1, 2))
    found = jitted(x, mpx.Format.E4M3, np.dtype("bfloat16"))
    want = by_xla(x.astype(jnp.bfloat16), mpx.Format.E4M3)
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(want))
    assert any(
        (a != b).any() for a, b in zip(bits(found), bits(jitted(x)), strict=True)
    )


def test_no_maximum_of_it_loses_a_nan():
    """On a GPU a maximum of floats does: Pallas lowers it to `maxnumf`."""
    found = dtypes_of_maxima(in_both_layouts, wild((64, 96)), mpx.Format.E4M3)
    assert found == [np.dtype("int32")] * 2


def test_vmap():
    x = wild((3, 64, 96))
    found = jax.vmap(interpreted, 1)(jnp.moveaxis(x, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(interpreted(x)))


@pytest.mark.parametrize("spec", [P(None, "a", "b"), P()], ids=str)
def test_each_device_quantizes_its_part(spec):
    x = wild((2, 256, 128))
    there = jax.device_put(x, NamedSharding(two_axes(), spec))
    compiled = jax.jit(interpreted).lower(there).compile()
    assert "all-" not in compiled.as_text()
    found = compiled(there)
    assert found[0].sharding.is_equivalent_to(there.sharding, 3)
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(interpreted(x)))


def test_a_block_on_two_devices_is_brought_together():
    x = wild((2, 256, 128))
    sharding = NamedSharding(two_axes(), P(None, None, ("a", "b")))
    found = jax.jit(interpreted)(jax.device_put(x, sharding))
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(interpreted(x)))


def test_in_shard_map():
    x, whole, turned = wild((256, 128)), P("a", "b"), P("b", "a")
    specs = (whole, whole, turned, turned)
    mapped = functools.partial(jax.shard_map, in_specs=whole, out_specs=specs)
    found = mapped(interpreted, mesh=two_axes(), check_vma=False)(x)
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(interpreted(x)))

    # JAX interprets no kernel where it checks what varies, and lowers one.
    def for_a_gpu(x):
        return in_both_layouts(x, mpx.Format.E4M3)

    assert (
        lowered(mapped(for_a_gpu, mesh=mesh_of_b200s()), x).count("xla.gpu.triton") == 1
    )
