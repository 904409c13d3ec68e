"""Quantized convolutions against float64, written as sums over windows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from mpx._quantize import ConvolutionProduct, target_from
from tests.helpers import slow_but
from tests.quantize.linear_cases import CPU, assert_close, linear_product, tensor
from tests.reference import low_precision as reference

DATA, WEIGHT = (2, 7, 6, 4), (3, 2, 4, 6)  # NHWC, HWIO
STRIDES, PADDING, DILATION = (2, 1), ((1, 1), (0, 2)), (1, 2)
NUMBERS = lax.conv_dimension_numbers(DATA, WEIGHT, ("NHWC", "HWIO", "NHWC"))


def product_of(recipe=None, dtype="float32", **options) -> ConvolutionProduct:
    return ConvolutionProduct(
        recipe=recipe or mpx.Float8CurrentScaling(),
        dtype=np.dtype(dtype),
        target=options.pop("target", CPU),
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


@functools.partial(jax.jit, static_argnums=0)
def result_and_gradients(product, x, w, g, scales=None):
    f = functools.partial(linear_product, product)
    y, backward = jax.vjp(f, x, w, scales)
    return y, *backward(g.astype(y.dtype))


def quantized(x, bits) -> np.ndarray:
    return tensor(bits)(np.asarray(x), False)


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


def exact(x, w, g, backward_x=None, backward_w=None):
    y, dw = np.zeros(g.shape), np.zeros(WEIGHT)
    d_padded = 0
    x_kept = x if backward_x is None else backward_x
    w_kept = w if backward_w is None else backward_w
    for i, j, padded, here in windows(x):
        y += padded[here] @ w[i, j]
    for i, j, padded, here in windows(x_kept):
        dw[i, j] = np.einsum("nhwc,nhwo->co", padded[here], g)
        d_padded = d_padded + np.zeros(padded.shape)
        d_padded[here] += g @ w_kept[i, j].T
    (top, bottom), (left, right) = PADDING
    inside = d_padded[:, top : top + DATA[1], left : left + DATA[2]]
    return y, inside, dw


def test_a_convolution_and_its_gradients_are_those_of_float64():
    x, w, g = arrays()
    found = result_and_gradients(product_of(), x, w, g)
    e4m3 = (quantized(x, reference.E4M3), quantized(w, reference.E4M3))
    expected = exact(*e4m3, quantized(g, reference.E5M2))
    for one, other in zip(found, expected, strict=False):
        assert_close(one, other)


def test_a_backward_pass_in_high_precision():
    x, w, g = arrays()
    recipe = mpx.Float8CurrentScaling(backward_override="high_precision")
    found = result_and_gradients(product_of(recipe), x, w, g)
    e4m3 = (quantized(x, reference.E4M3), quantized(w, reference.E4M3))
    high = [np.asarray(array, np.float64) for array in (g, x, w)]
    for one, other in zip(found, exact(*e4m3, *high), strict=False):
        assert_close(one, other)


def test_dtypes_amaxes_and_bytes():
    x, w, g = arrays()
    product = product_of(mpx.DelayedScaling(), "bfloat16")
    y, dx, dw, amaxes = result_and_gradients(
        product, x.astype("bfloat16"), w, g, jnp.zeros(3)
    )
    assert (y.dtype, dx.dtype, dw.dtype) == ("bfloat16", "bfloat16", "float32")
    seen = (x.astype("bfloat16"), w, g.astype("bfloat16"))
    largest = [jnp.abs(array.astype("float32")).max() for array in seen]
    np.testing.assert_array_equal(amaxes, largest)

    def backward(x, w, scales):
        return jax.vjp(functools.partial(linear_product, product), x, w, scales)[1]

    kept = jax.eval_shape(backward, x, w, jnp.zeros(3))
    sizes = {leaf.dtype.name: leaf.size for leaf in jax.tree.leaves(kept)}
    # 8 bits, which a CPU keeps as integers.
    assert sizes.pop("float32") <= 3 and list(sizes) == ["uint8"]


@pytest.mark.parametrize("check_vma", slow_but([False], [True, False]))
def test_in_pieces_on_devices(check_vma: bool):
    x, w, g = arrays()
    x = x * jnp.array([1.0, 8.0])[:, None, None, None]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    recipe, scales = mpx.DelayedScaling(), jnp.zeros(3)
    product = product_of(recipe, manual_axes=("data",), sums_over_devices=not check_vma)

    def loss(x, w, scales, g):
        y = linear_product(product, x, w, scales)
        return lax.psum((y * g).sum(), "data")

    run = jax.shard_map(
        loss,
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    found = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(x, w, scales, g)
    alone = result_and_gradients(product_of(recipe), x, w, g, scales)[1:]
    for one, other in zip(found, alone, strict=True):
        assert_close(one, np.asarray(other))


def test_the_path_of_a_gpu_runs_on_the_cpu():
    x, w, g = arrays()
    there = product_of(target=target_from("sm_90"))
    here = result_and_gradients(product_of(), x, w, g)
    found = result_and_gradients(there, x, w, g)
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
