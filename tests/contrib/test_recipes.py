"""Recipes whose kernels are those of Pallas: which of their products use them."""

import dataclasses

import jax
import numpy as np
import pytest

import mpx
from tests.contrib.kernels import (
    filter_deprecation,
    loss,
    lowered,
    operands,
    step,
    under_scan_vmap_and_remat,
)
from tests.helpers import slow_but, unchecked_annotations

pytestmark = filter_deprecation

MXFP8, NVFP4 = mpx.MXFP8BlockScaling(), mpx.NVFP4BlockScaling()
each_recipe = pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])


def with_kernel(recipe, **options):
    return dataclasses.replace(recipe, kernel=mpx.contrib.PallasKernel(), **options)


def calls(recipe, *args):
    """The calls of kernels in a step for a B200."""
    lines = lowered(step(recipe), *args).splitlines()
    return [line for line in lines if "xla.gpu.triton" in line]


def test_each_operand_is_quantized_by_one_kernel():
    found = calls(with_kernel(MXFP8), *operands())
    # Inputs, weights and gradients of two products.
    assert len(found) == 6
    # Nobody writes a weight in bfloat16 only for a kernel to read.
    assert sum("tensor<1x64x96xf32>) ->" in line for line in found) == 1


@pytest.mark.parametrize(
    ("options", "count"),
    slow_but(
        [({"disable_rht": True}, 2 * (1 + 2 + 1))],  # noise is drawn by a hash
        [
            ({"disable_rht": True}, 2 * (1 + 2 + 1)),
            ({}, 2 * (2 + 2 + 1)),
            ({"disable_2d_quantization": True}, 2 * (2 + 2 + 1)),
            ({"disable_stochastic_rounding": True}, 2 * (2 + 2 + 1)),
        ],
    ),
)
def test_each_operand_of_four_bits_is_measured_and_quantized(options, count):
    """Of two products: inputs and gradients, and weights, whose amax is XLA's."""
    assert len(calls(with_kernel(NVFP4, **options), *operands())) == count


@pytest.mark.parametrize("recipe", slow_but([MXFP8], [MXFP8, NVFP4]))
def test_without_a_kernel_there_is_none(recipe):
    assert not calls(recipe, *operands())


@pytest.mark.parametrize(
    ("recipe", "count"), slow_but([(MXFP8, 2)], [(MXFP8, 2), (NVFP4, 4)])
)
def test_other_sizes_are_left_to_xla(recipe, count):
    # Of the first product, only the input has whole blocks both ways; of the second,
    # only the gradient.
    assert len(calls(with_kernel(recipe), *operands(48))) == count


@pytest.mark.parametrize(
    ("recipe", "override"), [(MXFP8, "dequantized"), (NVFP4, "high_precision")]
)
def test_one_copy_needs_no_kernel(recipe, override):
    assert not calls(with_kernel(recipe, backward_override=override), *operands())


def test_a_forward_pass_has_one_copy():
    func = mpx.autocast(loss, recipe=with_kernel(MXFP8), target="B200")
    assert "xla.gpu.triton" not in lowered(func, *operands())


@pytest.mark.parametrize("recipe", slow_but([MXFP8], [MXFP8, NVFP4]))
def test_elsewhere_it_is_the_same_recipe(recipe):
    both = with_kernel(recipe), recipe
    found, want = (jax.jit(step(one))(*operands()) for one in both)
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.exhaustive
@each_recipe
def test_under_scan_vmap_and_remat(recipe):
    found, want = map(under_scan_vmap_and_remat, (with_kernel(recipe), recipe))
    jax.tree.map(np.testing.assert_array_equal, found, want)


@each_recipe
def test_wrong_kernels_are_named(recipe):
    message = "None or a kernel; got 'pallas'. Pass `mpx.contrib.PallasKernel"
    with unchecked_annotations(), pytest.raises(TypeError, match=message):
        dataclasses.replace(recipe, kernel="pallas")
