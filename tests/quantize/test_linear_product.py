"""The products of linear layers against float64, in every layout and recipe."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._target import CPU_WITH_UNITS
from tests.helpers import slow_but
from tests.quantize.linear_cases import (
    CPU,
    LAYOUTS,
    RECIPES,
    assert_close,
    data,
    expected,
    linear_product,
    product_of,
    result_and_gradients,
    scales_of,
)

# One layout for all recipes: odd sizes, nothing is a multiple of a block.
ODD = LAYOUTS["3-D"]
# Of options of a recipe one is quick.
OPTIONS = ("delayed, warm start", "nvfp4, 1-D, no transform", "high precision backward")
PLAIN = [name for name in RECIPES if name not in OPTIONS]
# One recipe that keeps the layout, and one that brings operands into blocks.
IN_LAYOUTS = [
    *(("current", name) for name in LAYOUTS if name not in ("3-D", "matrices")),
    *(("nvfp4", name) for name in ("weight first", "batches")),
    ("int8", "weight first"),
    ("current, each matrix", "batches"),
]
MORE = [
    *(("nvfp4", name) for name in ("several contracted", "vector")),
    *(("rows", name) for name in ("several contracted", "batches", "vector")),
    *((name, "weight first") for name in ("dequantized backward", "blocks")),
]
ON_UNITS = ("delayed", "mxfp8", "nvfp4", "custom", "rows", "int8", *OPTIONS[1:])


@pytest.mark.parametrize(
    ("recipe_name", "layout_name", "target"),
    [
        *slow_but(
            [(name, "3-D", CPU) for name in PLAIN],
            [(name, "3-D", CPU) for name in RECIPES],
        ),
        *((*case, CPU) for case in IN_LAYOUTS),
        *(pytest.param(*case, CPU, marks=pytest.mark.slow) for case in MORE),
        *((name, "matrices", CPU_WITH_UNITS) for name in ON_UNITS),
        *(("current", name, CPU_WITH_UNITS) for name in LAYOUTS),
    ],
)
def test_products_are_those_of_float64(recipe_name, layout_name, target):
    """Of each recipe, in each layout, and in bfloat16 on CPUs with units for it."""
    recipe, layout = RECIPES[recipe_name], LAYOUTS[layout_name]
    product, arrays = product_of(recipe, layout, target=target), data(layout)
    found = result_and_gradients(product, *arrays, scales_of(recipe))
    for one, exact in zip(found, expected(recipe, layout, *arrays), strict=False):
        assert one.dtype == jnp.float32
        assert_close(one, exact)


@pytest.mark.parametrize(
    ("recipe_name", "half"), [("current", "float16"), ("mxfp8", "bfloat16")]
)
def test_half_precision_rounds_once(recipe_name: str, half: str):
    recipe, (left, right, g) = RECIPES[recipe_name], data(ODD)
    product = product_of(recipe, ODD, half)
    y, d_left, d_right, amaxes = result_and_gradients(
        product, left.astype(half), right, g
    )
    assert (y.dtype, d_left.dtype, d_right.dtype) == (half, half, jnp.float32)
    assert amaxes is None
    both = left.astype(half), right.astype(half)
    assert result_and_gradients(product, *both, g)[2].dtype == half
    exact = expected(recipe, ODD, left, right, g)
    rounded = [(y, exact[0]), (d_left, exact[1])]
    if half == "float16":
        # Its range may be too small for the gradient of a weight.
        assert_close(d_right, exact[2])
    else:
        rounded.append((d_right, exact[2]))
    # Numbers in half precision are the exact ones rounded, but for ties.
    for one, other in rounded:
        step = float(jnp.finfo(half).eps)
        error = np.abs(np.asarray(one, np.float64) - other)
        assert (error <= 0.51 * step * np.abs(other) + 1e-6 * np.abs(other).max()).all()


def test_a_weight_is_quantized_from_float32():
    """Rounded to bfloat16 first, 1 + 2^-4 + 2^-10 would be a tie and become 1."""
    near = np.float32(1 + 2**-4 + 2**-10)
    product = product_of(RECIPES["current"], LAYOUTS["matrices"], "bfloat16")
    run = jax.jit(linear_product, static_argnums=0)
    y = run(product, jnp.ones((2, 1), "bfloat16"), np.array([[near, 1.75]], np.float32))
    assert float(y[0, 0]) == 1.125


def test_eager_and_jit_give_the_same_bits():
    recipe, (left, right, g) = RECIPES["delayed"], data(ODD)
    product, scales = product_of(recipe, ODD, "bfloat16"), scales_of(recipe)
    jitted = result_and_gradients(product, left, right, g, scales)
    eager = result_and_gradients.__wrapped__(product, left, right, g, scales)
    jax.tree.map(np.testing.assert_array_equal, jitted, eager)


def test_a_rematerialized_product_has_the_same_bits():
    """With stochastic rounding, whose draws have to be the same."""
    left, right, g = data(ODD)
    recipe = dataclasses.replace(RECIPES["nvfp4"], recipe=mpx.NVFP4BlockScaling())
    product = product_of(recipe, ODD, "bfloat16")

    @jax.jit
    def rematerialized(left, right):
        f = jax.checkpoint(lambda *a: linear_product(product, *a))
        y, backward = jax.vjp(f, left, right)
        return y, *backward(g.astype(y.dtype))

    once = result_and_gradients(product, left, right, g)[:3]
    again = rematerialized(left, right)
    jax.tree.map(np.testing.assert_array_equal, once, again)


@pytest.mark.parametrize("recipe_name", slow_but(["mxfp8"], ["mxfp8", "nvfp4"]))
def test_vmap_gives_every_example_its_scale(recipe_name: str):
    recipe, (left, right, g) = RECIPES[recipe_name], data(ODD)
    left = left * np.float32([1, 1e-3, 1e3])[:, None, None]
    product = product_of(recipe, LAYOUTS["matrices"])
    right = jnp.asarray(right)
    mapped = jax.vmap(lambda x, g: result_and_gradients(product, x, right, g))(left, g)
    for index in range(len(left)):
        alone = result_and_gradients(product, left[index], right, g[index])
        for one, other in zip(mapped, alone, strict=True):
            if other is not None:
                np.testing.assert_allclose(one[index], other, rtol=1e-6, atol=1e-6)


def test_forward_mode_is_refused():
    left, right, _ = data(ODD)
    product = product_of(RECIPES["current"], ODD)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: linear_product(product, x, right), (left,), (left,))


def test_scales_are_for_delayed_scaling_only():
    left, right, _ = data(ODD)
    delayed, current = (product_of(RECIPES[n], ODD) for n in ("delayed", "current"))
    with pytest.raises(TypeError, match=r"float32\[3\].*got None"):
        linear_product(delayed, left, right)
    with pytest.raises(TypeError, match=r"float32\[3\].*got float32\[2\]"):
        linear_product(delayed, left, right, jnp.ones(2))
    with pytest.raises(TypeError, match="Float8CurrentScaling.*Omit them"):
        linear_product(current, left, right, jnp.ones(3))


def test_a_product_is_a_constant_to_jit():
    one, other = (product_of(RECIPES["current"], ODD) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != product_of(RECIPES["mxfp8"], ODD)
    assert one.recipe == mpx.Float8CurrentScaling()
