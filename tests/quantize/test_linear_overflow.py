"""An infinity or a NaN in an operand shows in its products, on every path."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize import Target
from mpx._quantize._formats._blocks import alone
from mpx._quantize._formats._target import CPU
from mpx._quantize._products._contraction import contractions
from mpx._quantize._products._lowering import _dequantized, _in_fp8, _with_axis_last
from mpx._quantize._products._operands import Copies
from mpx.quantization import (
    AbstractRecipe,
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Role,
    TensorQuantizer,
)
from tests.autocast.counting import equations
from tests.helpers import slow_but
from tests.quantize import (
    test_linear_convolution as convolution,
    test_linear_ragged as ragged,
)
from tests.quantize.linear_cases import (
    LAYOUTS,
    MATRICES,
    RECIPES,
    data,
    linear_product,
    matrix_product,
    product_of,
    result_and_gradients,
    scales_of,
)

VALUES = [np.inf, -np.inf, np.nan]
# Where products are of half precision and no unit knows low precision.
HALF = Target("other", "a device without units")
each_recipe = pytest.mark.parametrize("recipe_name", RECIPES)


@functools.partial(jax.jit, static_argnums=0)
def plain(f, left, right, g):
    """The product and its gradients in float32."""
    y, backward = jax.vjp(f, left, right)
    return y, *backward(g)


@functools.cache
def dot_of(layout):
    return lambda left, right: jax.lax.dot_general(
        left, right, layout.dimension_numbers
    )


def ragged_dot(x, w):
    return jax.lax.ragged_dot(x, w, jnp.asarray(ragged.SIZES))


# Each recipe as it is emulated; another path, and experts, with one of each kind
# in 8 bits.
KINDS = ("current", "delayed", "mxfp8")


def assert_shown(found, exact) -> None:
    """What a number that is not finite goes into is not finite either."""
    bad = [~np.isfinite(np.asarray(x)) for x in exact]
    assert sum(x.any() for x in bad) == 2  # each operand is one of two products
    for one, there in zip(found, bad, strict=False):
        assert not np.isfinite(np.asarray(one, np.float32))[there].any()


def with_one(operands, which: int, value: float):
    x = np.array(operands[which])
    x[tuple(length // 2 for length in x.shape)] = value
    return [*operands[:which], x, *operands[which + 1 :]]


@pytest.mark.parametrize(
    ("path", "recipe_name"),
    [
        *slow_but(
            [("emulated", name) for name in (*KINDS, "blocks", "nvfp4", "custom")],
            [("emulated", name) for name in RECIPES],
        ),
        *slow_but(
            [("dequantized", "delayed")], [("dequantized", name) for name in RECIPES]
        ),
    ],
)
def test_what_is_not_finite_goes_into_both_products_of_an_operand(path, recipe_name):
    recipe, layout = RECIPES[recipe_name], LAYOUTS["3-D"]
    product = product_of(recipe, layout, "float32")
    if path == "dequantized":
        bfloat16 = np.dtype("bfloat16")
        product = dataclasses.replace(product, target=HALF, dtype=bfloat16)
    for which in range(3):
        for value in VALUES:
            operands = with_one(data(layout), which, value)
            found = result_and_gradients(product, *operands, scales_of(recipe))
            assert_shown(found, plain(dot_of(layout), *operands))


@pytest.mark.parametrize("recipe_name", ["current", "delayed"])
def test_of_a_convolution_too(recipe_name: str):
    recipe = RECIPES[recipe_name]
    product = convolution.product_of(recipe.recipe)
    for which in range(3):
        for value in VALUES:
            x, w, g = with_one(convolution.arrays(), which, value)
            found = convolution.result_and_gradients(
                product, x, w, g, scales_of(recipe)
            )
            assert_shown(
                found, plain(functools.partial(product._multiply, ()), x, w, g)
            )


@pytest.mark.parametrize("recipe_name", slow_but(["mxfp8"], (*KINDS, "nvfp4")))
def test_of_experts_too(recipe_name: str):
    recipe = RECIPES[recipe_name]
    product = ragged.product_of(recipe.recipe)
    for which in range(3):
        for value in VALUES:
            x, w, g = with_one(ragged.arrays(), which, value)
            found = ragged.result_and_gradients(product, x, w, g, scales_of(recipe))
            assert_shown(found, plain(ragged_dot, x, w, g))


@functools.partial(jax.jit, static_argnums=0)
def quantized(recipe: AbstractRecipe, x, w):
    like = np.dtype("float32"), CPU, alone
    scale = jnp.ones(()) if isinstance(recipe, mpx.DelayedScaling) else None
    left = Copies(recipe, Role.INPUT, *like, (-1, -2)).first(x, scale)
    right = Copies(recipe, Role.WEIGHT, *like, (-2, -1)).first(w, scale)
    return left, right


@jax.jit
def fp8_products(left, right):
    """What FP8 units give and what is computed without them, in each dtype."""
    forward = contractions(MATRICES, 2, 2).forward
    return [
        (
            _in_fp8(left, right, forward, dtype, None),
            _dequantized(left, right, forward, np.dtype("float32"), dtype),
        )
        for dtype in map(np.dtype, ("bfloat16", "float16", "float32"))
    ]


def operands_of(recipe: AbstractRecipe, which: int, value: float):
    """Quantized operands of a product of matrices, one number of which is another."""
    ones = np.ones((64, 96), np.float32), np.ones((96, 48), np.float32)
    x, w = with_one(ones, which, value)
    bad = np.zeros((64, 48), bool)
    if which == 0:
        bad[32] = True
    else:
        bad[:, 24] = True
    return *quantized(recipe, x, w), bad


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("recipe_name", ["current", "delayed"])
def test_on_fp8_units(recipe_name: str, value: float, which: int):
    left, right, bad = operands_of(RECIPES[recipe_name].recipe, which, value)
    for found in jax.tree.leaves(fp8_products(left, right)):
        assert not np.isfinite(np.asarray(found, np.float32))[bad].any()


with_axis_last = jax.jit(_with_axis_last, static_argnums=1)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("recipe_name", ["mxfp8", "nvfp4"])
def test_block_units_get_a_scale_that_is_nan(recipe_name: str, value: float, which):
    """By the formats' specifications a block with such a scale is NaN."""
    operands = operands_of(RECIPES[recipe_name].recipe, which, value)
    for index, axis in ((0, -1), (1, -2)):
        payload, scales = with_axis_last(operands[index], axis)
        rows = np.isnan(np.asarray(scales, np.float32)).any(axis=(0, 2))
        if index != which:
            assert not rows.any()
            continue
        assert rows[payload.shape[1] // 2]
        if recipe_name == "mxfp8":
            assert rows.sum() == 1
            assert np.isnan(np.asarray(payload, np.float32)).any()
        else:  # what is computed after the units is in float32
            assert np.isnan(operands[index].tensor_inverse_scale)


@pytest.mark.parametrize("recipe_name", slow_but(["blocks", "nvfp4"], RECIPES))
def test_finite_numbers_give_finite_products(recipe_name: str):
    """However large or small: they saturate, or become zero."""
    recipe, layout = RECIPES[recipe_name], LAYOUTS["3-D"]
    product = product_of(recipe, layout)
    left, right, g = data(layout)
    for size in (1e-38, 1e-20, 1e15):
        x = np.asarray(left) * np.float32(size)
        found = result_and_gradients(
            product, x, right, np.asarray(g) / np.float32(1e3), scales_of(recipe)
        )
        assert all(np.isfinite(x).all() for x in found if x is not None)


# As many as before there was anything to show; five and more are blocks along two axes.
REDUCTIONS = {
    "current": 3,
    "delayed": 3,
    "delayed, warm start": 3,
    "blocks": 5,
    "mxfp8": 6,
    "nvfp4": 10,
    "nvfp4, 1-D, no transform": 12,
    "high precision backward": 2,
    "dequantized backward": 4,
    "custom": 6,
}


@each_recipe
def test_an_array_is_read_for_its_amax_and_for_nothing_more(recipe_name: str):
    recipe = RECIPES[recipe_name]
    product = matrix_product(recipe.recipe)

    def train(x, w, g, scales):
        f = functools.partial(linear_product, product)
        y, backward = jax.vjp(f, x, w, scales)
        return y, *backward(g)

    shapes = (64, 128), (128, 256), (64, 256)
    args = [jnp.ones(shape) for shape in shapes]
    program = jax.make_jaxpr(train)(*args, scales_of(recipe))
    found = collections.Counter(e.primitive.name for e, _ in equations(program))
    reductions = {k: n for k, n in found.items() if k.startswith(("reduce", "arg"))}
    assert reductions.pop("reduce_max") == REDUCTIONS[recipe_name]
    assert set(reductions) <= {"reduce_precision"}


# Bytes that a compiled quantization moved for each number of bfloat16 before there was
# anything to show, by XLA on the CPU. One more pass over the array is 2.
TRAFFIC = {
    "current": (TensorQuantizer(), 23.01),
    "delayed": (TensorQuantizer(), 3.0),
    "blocks": (BlockQuantizer(), 13.5),
    "mxfp8": (MXFP8Quantizer(), 5.41),
    "nvfp4": (NVFP4Quantizer(), 6.57),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_showing_it_costs_no_pass_over_memory(name: str):
    quantizer, before = TRAFFIC[name]
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)

    def quantize(x, scale):
        given = {"scale": scale} if name == "delayed" else {}
        return mpx.quantization.quantize(x, quantizer, **given)

    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(quantize).lower(x, jnp.ones(())).compile()
    analysis = compiled.cost_analysis()
    assert isinstance(analysis, dict)
    assert analysis["bytes accessed"] / x.size < before + 0.2
