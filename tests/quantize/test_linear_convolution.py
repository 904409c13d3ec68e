"""Quantized convolutions against float64, written as sums over windows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from mpx._quantize import ConvolutionProduct, target_from
from tests.helpers import slow_but
from tests.quantize import linear_cases as linear
from tests.quantize.linear_cases import assert_close, linear_product
from tests.reference import low_precision as reference

DATA, WEIGHT = (2, 7, 6, 4), (3, 2, 4, 6)  # NHWC, HWIO
STRIDES, PADDING, DILATION = (2, 1), ((1, 1), (0, 2)), (1, 2)
NUMBERS = lax.conv_dimension_numbers(DATA, WEIGHT, ("NHWC", "HWIO", "NHWC"))


def product_of(recipe=None, dtype="float32", **options) -> ConvolutionProduct:
    return ConvolutionProduct(
        recipe=recipe or mpx.Float8CurrentScaling(),
        dtype=np.dtype(dtype),
        target=options.pop("target", linear.CPU),
        window_strides=STRIDES,
        padding=PADDING,
        lhs_dilation=(1, 1),
        rhs_dilation=DILATION,
        dimension_numbers=NUMBERS,
        feature_group_count=1,
        batch_group_count=1,
        **options,
    )


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], DATA), jax.random.normal(keys[1], WEIGHT)
    shape = jax.eval_shape(lambda *a: linear_product(product_of(), *a), x, w).shape
    return x, w, jax.random.normal(keys[2], shape)


def quantized(x, bits=reference.E4M3) -> np.ndarray:
    return linear.tensor(bits)(np.asarray(x), False)


def windows(x: np.ndarray):
    """The numbers of x that each place of the weight meets: [N, H', W', C]."""
    padded = np.pad(x, ((0, 0), *PADDING, (0, 0)))
    rows = (padded.shape[1] - WEIGHT[0]) // STRIDES[0] + 1
    columns = padded.shape[2] - DILATION[1] * (WEIGHT[1] - 1)
    for i in range(WEIGHT[0]):
        for j in range(WEIGHT[1]):
            here = (
                slice(None),
                slice(i, i + STRIDES[0] * (rows - 1) + 1, STRIDES[0]),
                slice(j * DILATION[1], j * DILATION[1] + columns),
            )
            yield i, j, padded, here


def exact(x, w, g, backward_x, backward_w):
    y, dw = np.zeros(g.shape), np.zeros(WEIGHT)
    d_padded = 0
    for i, j, padded, here in windows(x):
        y += padded[here] @ w[i, j]
    for i, j, padded, here in windows(backward_x):
        dw[i, j] = np.einsum("nhwc,nhwo->co", padded[here], g)
        d_padded = d_padded + np.zeros(padded.shape)
        d_padded[here] += g @ backward_w[i, j].T
    (top, bottom), (left, right) = PADDING
    inside = d_padded[:, top : top + DATA[1], left : left + DATA[2]]
    return y, inside, dw


@pytest.mark.parametrize("override", [None, "high_precision"])
def test_a_convolution_and_its_gradients_are_those_of_float64(override):
    x, w, g = arrays()
    recipe = mpx.Float8CurrentScaling(backward_override=override)
    found = linear.result_and_gradients(product_of(recipe), x, w, g)
    low = quantized(x), quantized(w)
    backward = quantized(g, reference.E5M2), *low
    if override:
        backward = [np.asarray(array, np.float64) for array in (g, x, w)]
    for one, other in zip(found, exact(*low, *backward), strict=False):
        assert_close(one, other)


def test_dtypes_amaxes_and_bytes_of_a_convolution():
    product = product_of(mpx.DelayedScaling(), "bfloat16")
    linear.check_delayed_in_bfloat16(
        functools.partial(linear_product, product), *arrays()
    )


@pytest.mark.parametrize("check_vma", slow_but([False], [True, False]))
def test_a_convolution_in_pieces_on_devices(check_vma: bool):
    x, w, g = arrays()
    x = x * jnp.array([1.0, 8.0])[:, None, None, None]
    recipe, scales = mpx.DelayedScaling(), jnp.zeros(3)
    product = product_of(recipe, manual_axes=("data",), sums_over_devices=not check_vma)
    f = functools.partial(linear_product, product)
    found = linear.gradients_on_two_devices(f, check_vma, x, w, scales, g)
    alone = linear.result_and_gradients(product_of(recipe), x, w, g, scales)[1:]
    for one, other in zip(found, alone, strict=True):
        assert_close(one, np.asarray(other))


def test_the_path_of_a_gpu_runs_on_the_cpu():
    x, w, g = arrays()
    there = product_of(target=target_from("sm_90"))
    here = linear.result_and_gradients(product_of(), x, w, g)
    found = linear.result_and_gradients(there, x, w, g)
    jax.tree.map(np.testing.assert_array_equal, found, here)


def test_blocks_are_refused():
    with pytest.raises(ValueError, match="one scale per array.*MXFP8.*blocks"):
        product_of(mpx.MXFP8BlockScaling())


def test_scales_and_vmap():
    x, w, _ = arrays()
    with pytest.raises(TypeError, match=r"float32\[3\].*got None"):
        linear_product(product_of(mpx.DelayedScaling()), x, w)
    f = functools.partial(linear_product, product_of(mpx.DelayedScaling()))
    with pytest.raises(ValueError, match="outside vmap"):
        jax.vmap(f, (0, None, None))(x[None], w, jnp.ones(3))
