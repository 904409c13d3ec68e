"""An infinity or a NaN in an operand shows in its products, on every path.

And in the amaxes that delayed scaling learns from a product, for a gradient.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize import Target
from mpx._quantize._products._contraction import contractions
from mpx._quantize._products._lowering import _dequantized, _in_fp8, _with_axis_last
from mpx.quantization import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Role,
    TensorQuantizer,
)
from tests.autocast.counting import equations
from tests.helpers import slow_but
from tests.quantize import (
    linear_cases as linear,
    test_linear_convolution as convolution,
    test_linear_ragged as ragged,
)
from tests.quantize.linear_cases import (
    LAYOUTS,
    RECIPES,
    data,
    product_of,
    result_and_gradients,
    scales_of,
)

VALUES = [np.inf, -np.inf, np.nan]
# Where products are of half precision and no unit knows low precision.
HALF, CPU = Target("other", "a device without units"), linear.CPU
LAYOUT = LAYOUTS["3-D"]


@functools.partial(jax.jit, static_argnums=0)
def plain(f, left, right, g):
    y, backward = jax.vjp(f, left, right)
    return y, *backward(g)


def dot(left, right):
    return jax.lax.dot_general(left, right, LAYOUT.dimension_numbers)


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


def case_of(path, recipe):
    """A product, its operands, what runs it, and what it is in float32."""
    if path == "convolution":
        product = convolution.product_of(recipe.recipe)
        multiply = functools.partial(product._multiply, ())
        return product, convolution.arrays(), result_and_gradients, multiply
    if path == "experts":
        product = ragged.product_of(recipe.recipe)
        return product, ragged.arrays(), ragged.result_and_gradients, ragged_dot
    target, dtype = (HALF, "bfloat16") if path == "dequantized" else (CPU, "float32")
    product = product_of(recipe, LAYOUT, dtype, target)
    return product, data(LAYOUT), result_and_gradients, dot


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
        ("convolution", "current"),
        ("convolution", "delayed"),
        *slow_but(
            [("experts", "mxfp8")], [("experts", name) for name in (*KINDS, "nvfp4")]
        ),
    ],
)
def test_what_is_not_finite_goes_into_both_products_of_an_operand(path, recipe_name):
    recipe = RECIPES[recipe_name]
    product, operands, run, exact = case_of(path, recipe)
    for which in range(3):
        for value in VALUES:
            changed = with_one(operands, which, value)
            found = run(product, *changed, scales_of(recipe))
            assert_shown(found, plain(exact, *changed))


@jax.jit
def fp8_products(left, right):
    args = left, right, contractions(linear.MATRICES, 2, 2).forward
    dtypes = [np.dtype(name) for name in ("bfloat16", "float16", "float32")]
    found = [_in_fp8(*args, dtype, None) for dtype in dtypes]
    return found + [_dequantized(*args, linear.FLOAT32, dtype) for dtype in dtypes]


def operands_of(recipe_name: str, which: int, value: float):
    """Quantized operands of a product of matrices, one number of which is another."""
    ones = np.ones((64, 96), np.float32), np.ones((96, 48), np.float32)
    bad = np.zeros((64, 48), bool)
    bad[(32, slice(None)) if which == 0 else (slice(None), 24)] = True
    changed = with_one(ones, which, value)
    return *linear.quantized_operands(RECIPES[recipe_name].recipe, *changed), bad


each_operand = pytest.mark.parametrize("which", [0, 1])
each_value = pytest.mark.parametrize("value", VALUES)


@each_operand
@each_value
@pytest.mark.parametrize("recipe_name", ["current", "delayed"])
def test_on_fp8_units(recipe_name: str, value: float, which: int):
    left, right, bad = operands_of(recipe_name, which, value)
    for found in jax.tree.leaves(fp8_products(left, right)):
        assert not np.isfinite(np.asarray(found, np.float32))[bad].any()


with_axis_last = jax.jit(_with_axis_last, static_argnums=1)


@each_operand
@each_value
@pytest.mark.parametrize("recipe_name", ["mxfp8", "nvfp4"])
def test_block_units_get_a_scale_that_is_nan(recipe_name: str, value: float, which):
    """By the formats' specifications a block with such a scale is NaN."""
    operands = operands_of(recipe_name, which, value)
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
    recipe = RECIPES[recipe_name]
    product, (left, right, g) = product_of(recipe, LAYOUT), data(LAYOUT)
    for size in (1e-38, 1e-20, 1e15):
        arrays = np.asarray(left) * np.float32(size), right, np.asarray(g) / 1000
        found = result_and_gradients(product, *arrays, scales_of(recipe))
        assert all(np.isfinite(x).all() for x in found if x is not None)


# As many as before there was anything to show; four are rows, whose gradient has two
# copies; five and more are blocks along two axes.
REDUCTIONS = {
    "current": 3,
    "delayed": 3,
    "delayed, warm start": 3,
    "current, each matrix": 3,
    "rows": 4,
    "int8": 4,
    "int8, one scale": 3,
    "blocks": 5,
    "mxfp8": 6,
    "nvfp4": 10,
    "nvfp4, 1-D, no transform": 12,
    "high precision backward": 2,
    "dequantized backward": 4,
    "custom": 6,
}


@pytest.mark.parametrize("recipe_name", RECIPES)
def test_an_array_is_read_for_its_amax_and_for_nothing_more(recipe_name: str):
    recipe = RECIPES[recipe_name]
    train = linear.trained(linear.matrix_product(recipe.recipe))
    program = jax.make_jaxpr(train)(
        jnp.ones((64, 128)), jnp.ones((128, 256)), scales_of(recipe)
    )
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


# --- What delayed scaling learns ------------------------------------------------------

WEIGHT_FIRST, MATRICES = LAYOUTS["weight first"], LAYOUTS["matrices"]
DELAYED = product_of(RECIPES["delayed"], WEIGHT_FIRST)
ONES = jnp.ones(3)


def amaxes_of(left, right, g, scales=ONES) -> np.ndarray:
    return np.asarray(result_and_gradients(DELAYED, left, right, g, scales)[3])


def test_amaxes_are_those_of_input_weight_and_gradient():
    weight, x, g = data(WEIGHT_FIRST)
    exact = [np.abs(array).max() for array in (x, weight, g)]
    np.testing.assert_array_equal(amaxes_of(weight, x, g), exact)
    # They are what came, not what the scales made of it.
    np.testing.assert_array_equal(amaxes_of(weight, x, g, 1e-6 * ONES), exact)


@each_value
def test_what_is_not_finite_shows_in_amaxes(value: float):
    operands = data(WEIGHT_FIRST)
    for which, role in ((1, 0), (2, 2)):  # the input, and the gradient
        expected = amaxes_of(*operands).copy()
        expected[role] = abs(value)
        bad = amaxes_of(*with_one(operands, which, value))
        np.testing.assert_array_equal(bad, expected)


def test_amaxes_go_into_the_state_as_they_come():
    recipe, amaxes = mpx.DelayedScaling(margin=1), amaxes_of(*data(WEIGHT_FIRST))
    for role, amax, largest in zip(Role, amaxes, (448, 448, 57344), strict=True):
        state = recipe.update(recipe.init(), jnp.asarray(amax), role)
        assert state.scale == np.float32(np.float32(largest) / amax) / 2


def delayed(**options):
    recipe = mpx.DelayedScaling(**options)
    return linear.matrix_product(
        recipe, dimension_numbers=WEIGHT_FIRST.dimension_numbers, is_weight_first=True
    )


def test_a_scale_of_zero_starts_warm_with_the_margin_of_the_recipe():
    left, right, g = data(WEIGHT_FIRST)
    product = delayed(margin=2, warm_start=True)
    scales = jnp.array([448.0, 448.0, 57344.0]) / amaxes_of(left, right, g) / 4
    warm, given = (
        result_and_gradients(product, left, right, g, s) for s in (jnp.zeros(3), scales)
    )
    jax.tree.map(np.testing.assert_array_equal, warm, given)
    # Nothing to learn from: a scale of 1.
    zero = jnp.zeros_like(right)
    warm = result_and_gradients(product, left, zero, g, jnp.zeros(3))
    assert not warm[0].any() and np.isfinite(warm[1]).all()


def test_only_a_warm_start_lets_quantizing_wait_for_the_amax():
    """An array is read once more for that."""

    def reduces(product):
        results = lambda *args: result_and_gradients(product, *args)[:3]  # noqa: E731
        compiled = jax.jit(results).lower(*data(WEIGHT_FIRST), ONES).compile()
        return " reduce(" in compiled.as_text()

    assert reduces(delayed(warm_start=True)) and not reduces(delayed())


def test_a_scale_of_zero_without_a_warm_start_is_one():
    found = result_and_gradients(DELAYED, *data(WEIGHT_FIRST), jnp.zeros(3))
    expected = result_and_gradients(DELAYED, *data(WEIGHT_FIRST), ONES)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_each_slot_of_a_scan_gets_its_own_amaxes():
    x, *_ = data(MATRICES)
    square = jnp.eye(40) * 0.5
    product = product_of(RECIPES["delayed"], MATRICES)

    @jax.jit
    def run(x, scales):
        def layer(x, scales):
            return linear.linear_product(product, x, square, scales), None

        return jax.lax.scan(layer, x, scales)[0].sum()

    found = jax.grad(run, argnums=1)(x, jnp.zeros((4, 3)))
    expected = [[np.abs(x).max() / 2**i, 0.5, 0.5 ** (3 - i)] for i in range(4)]
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_vmap_inside_is_refused_and_outside_is_not_needed():
    weight, x, _ = data(WEIGHT_FIRST)
    product = product_of(RECIPES["delayed"], MATRICES)

    def loss(x, weight, scales):
        return linear.linear_product(product, x, weight.T, scales).sum()

    def mapped(x, weight, scales):
        return jax.vmap(loss, (0, None, None))(x, weight, scales).sum()

    with pytest.raises(ValueError, match=r"3 examples.*mpx.autocast\(jax.vmap\(f\)\)"):
        jax.eval_shape(jax.grad(mapped), x, weight, ONES)
    with pytest.raises(ValueError, match="outside vmap"):
        jax.eval_shape(mapped, x, weight, ONES)
    # One slot for each element is what an ensemble has.
    x, weight = np.asarray(x), np.asarray(weight)
    ensemble = jax.jit(jax.vmap(jax.grad(loss, argnums=2)))
    found = ensemble(x, np.stack([weight] * 3), np.ones((3, 3), np.float32))
    expected = [np.abs(x).max((1, 2)), [np.abs(weight).max()] * 3, [1.0] * 3]
    np.testing.assert_array_equal(found, np.stack(expected, 1))
