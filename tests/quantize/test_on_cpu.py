"""What CPUs compute otherwise: the same codes, amaxes, products; stacks of bits."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._arithmetic import EXACT, ON_CPU
from mpx._quantize._formats._rounding import flushed
from mpx._quantize._formats._target import CPU_WITH_UNITS, target_from
from tests.autocast.counting import equations

from ..reference import low_precision as reference
from .linear_cases import (
    LAYOUTS,
    RECIPES,
    assert_close,
    data,
    expected,
    matrix_product,
    product_of,
    result_and_gradients,
    scales_of,
)
from .test_rounding import hard_numbers

FORMATS = [mpx.Format.E4M3, mpx.Format.E5M2]


@functools.cache
def numbers(format: mpx.Format) -> np.ndarray:
    """All numbers of 16 bits, midpoints with their neighbours, a million of float32."""
    bits = np.arange(2**16, dtype=np.uint16)
    random = np.random.default_rng(0)
    spread = random.standard_normal(500_000) * 2.0 ** random.integers(-25, 20, 500_000)
    found = [bits.view(np.float16), bits.view(ml_dtypes.bfloat16), spread]
    found.append(random.integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32))
    found.append(hard_numbers(reference.FORMATS[format.name]))
    found.append(np.float32([0, np.inf, np.nan, 464, 465, 61440, 61441, 3e38, 1e-40]))
    found = np.concatenate([part.astype(np.float32) for part in found])
    return np.concatenate([found, -found])


def codes(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_arithmetic_and_of_the_cast(format: mpx.Format):
    x = numbers(format)
    here, exact = (
        codes(jax.jit(lambda x, by=by: by.to_format(x, format, None))(x))
        for by in (ON_CPU, EXACT)
    )
    np.testing.assert_array_equal(here, exact)
    clipped = x.clip(-format.largest, format.largest)[~np.isnan(x)]
    casts = [clipped]  # ml_dtypes', and XLA's, which rounded twice before jaxlib 0.10.2
    casts += [jnp.asarray(clipped)] if jax.__version_info__ >= (0, 10, 2) else []
    for cast in casts:
        np.testing.assert_array_equal(
            here[~np.isnan(x)], codes(cast.astype(format.dtype))
        )


@pytest.mark.parametrize("scale", [1.0, 3.7, 2.0**-60, 2.0**100])
def test_scaled_numbers_have_the_same_codes(scale: float):
    """Of what is subnormal none is left, and NaN of what is not finite."""
    x = numbers(mpx.Format.E4M3)

    @functools.partial(jax.jit, static_argnums=0)
    def run(by, x, scale):
        return by.to_format(by.scaled(x, scale), mpx.Format.E4M3, None)

    exact = run(EXACT, flushed(jnp.asarray(x)), jnp.float32(scale))
    np.testing.assert_array_equal(
        codes(run(ON_CPU, x, jnp.float32(scale))), codes(exact)
    )


def test_random_neighbours_have_the_same_codes():
    x, key = jnp.linspace(-3, 3, 1000), jax.random.key(0)
    here, exact = (
        codes(jax.jit(lambda x, by=by: by.to_format(x, mpx.Format.E4M3, key))(x))
        for by in (ON_CPU, EXACT)
    )
    np.testing.assert_array_equal(here, exact)


def test_amaxes_are_those_of_the_bits():
    """NaN where there is a NaN, also under a negative sign and beside infinities."""
    special = [0.0, 1e-38, 1.0, 2.0, 1.9999999, 3.4028235e38, np.inf, np.nan, -np.nan]
    random = np.random.default_rng(0)
    rows = random.choice(np.float32([*special, *random.standard_normal(9)]), (500, 4))
    rows = rows * random.choice(np.float32([1, -1]), rows.shape)
    for name, axis in (("largest", {"axis": (1,)}), ("largest_finite", {})):
        for x in (rows, rows[:, :0], rows[0], rows[:1], rows[np.isfinite(rows)]):
            given = axis if x.ndim > 1 else {}
            here, exact = (
                flushed(jax.jit(functools.partial(getattr(by, name), **given))(x))
                for by in (ON_CPU, EXACT)
            )
            np.testing.assert_array_equal(here, exact)


ONE_OF_EACH = [
    *((recipe, "matrices") for recipe in ("delayed", "mxfp8", "nvfp4", "custom")),
    ("nvfp4, 1-D, no transform", "matrices"),
    ("high precision backward", "matrices"),
    *(("current", layout) for layout in LAYOUTS),
]


@pytest.mark.parametrize(("recipe_name", "layout_name"), ONE_OF_EACH)
def test_products_of_bfloat16_are_those_of_float64(recipe_name, layout_name):
    recipe, layout = RECIPES[recipe_name], LAYOUTS[layout_name]
    product = product_of(recipe, layout, target=CPU_WITH_UNITS)
    found = result_and_gradients(product, *data(layout), scales_of(recipe))
    for one, exact in zip(found, expected(recipe, layout, *data(layout)), strict=False):
        assert_close(one, exact)


def operands(recipe, dtype: str, target: str) -> list[str]:
    """The dtypes of the operands of the three products of a layer."""
    product = matrix_product(recipe, dtype, target_from(target))
    x, w, g = jnp.ones((64, 128)), jnp.ones((128, 256)), jnp.ones((64, 256))
    program = jax.make_jaxpr(functools.partial(result_and_gradients, product))(x, w, g)
    products = [e for e, _ in equations(program) if e.primitive.name == "dot_general"]
    assert all(e.outvars[0].aval.dtype == jnp.float32 for e in products)
    found = [{str(v.aval.dtype) for v in e.invars} for e in products]
    return [name for (name,) in found]


CURRENT = mpx.Float8CurrentScaling()
HIGH = mpx.Float8CurrentScaling(backward_override="high_precision")
IN_BFLOAT16, IN_FLOAT32 = ["bfloat16"] * 3, ["float32"] * 3


@pytest.mark.skipif(
    not CPU_WITH_UNITS.wants_cpu_form, reason="XLA:CPU has it since jaxlib 0.10.2"
)
@pytest.mark.parametrize(
    ("recipe", "dtype", "found"),
    [
        (CURRENT, "float16", IN_BFLOAT16),
        (mpx.MXFP8BlockScaling(), "float32", IN_BFLOAT16),
        # The Hadamard transform of data meets that of the gradient.
        (mpx.NVFP4BlockScaling(), "bfloat16", IN_BFLOAT16),
        (mpx.Float8BlockScaling(), "bfloat16", IN_FLOAT32),
        (HIGH, "bfloat16", IN_BFLOAT16),
        (HIGH, "float16", ["bfloat16", "float32", "float32"]),
        (HIGH, "float32", ["bfloat16", "float32", "float32"]),
    ],
)
def test_operands_are_bfloat16_where_that_is_exact(recipe, dtype, found):
    assert operands(recipe, dtype, "cpu bf16") == found


def test_a_layer_has_the_same_gradients_in_bfloat16_and_in_float32():
    """Sums of these are exact, in any order."""
    random = np.random.default_rng(0)
    arrays = [random.integers(-4, 5, s) for s in ((32, 64), (64, 48), (32, 48))]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    wide, narrow = (
        result_and_gradients(matrix_product(CURRENT, "bfloat16", target), *arrays)
        for target in (target_from("A100"), CPU_WITH_UNITS)
    )
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


STEPS = 37  # the length of no other axis


def recurrent(w, x):
    def cell(h, x):
        h = jnp.tanh(x + h @ w)
        return h, None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[0] ** 2)


def convolved(w, x):
    def cell(h, x):
        y = jax.lax.conv_general_dilated(
            h.reshape(2, 16, 8, 8),
            w.reshape(8, 8, 8, 8)[:3, :3],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.tanh(x + y.reshape(h.shape)), None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[0] ** 2)


def routed(w, x):
    def cell(h, x):
        y = jax.lax.ragged_dot(h, jnp.stack([w, w]), jnp.array([20, 12]))
        return jnp.tanh(x + y), None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[0] ** 2)


def gradient_of(func, recipe):
    low = mpx.autocast(func, recipe=recipe, target="cpu")
    w, x = jnp.ones((64, 64)), jnp.ones((STEPS, 32, 64))
    scaling = mpx.init_scaling(low, w, x)
    return (lambda w, s: mpx.value_and_grad(low, s)(w, x)), (w, scaling)


ALL = {
    "current": CURRENT,
    "delayed": mpx.DelayedScaling(),
    "blocks": mpx.Float8BlockScaling(),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(),
}


@pytest.mark.parametrize(
    ("func", "recipe"),
    [
        *((recurrent, name) for name in ALL),
        *((routed, name) for name in ("delayed", "mxfp8", "nvfp4")),
        (convolved, "current"),
    ],
)
def test_a_scan_stacks_bits(func, recipe):
    step, args = gradient_of(func, ALL[recipe])
    scans = [
        e
        for e, _ in equations(jax.make_jaxpr(step)(*args))
        if e.primitive.name == "scan"
    ]
    moved = {str(v.aval.dtype) for e in scans for v in (*e.invars, *e.outvars)}
    assert len(scans) == 2 and "uint8" in moved
    assert not any(name.startswith("float8") for name in moved)


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_no_loop_converts_a_stack_of_8_bits(recipe: str):
    """As XLA:CPU does with one of 8-bit floats: to float16 and back, in each step."""
    step, args = gradient_of(recurrent, ALL[recipe])
    text = jax.jit(step).lower(*args).compile().as_text()
    assert re.search(rf"= u8\[{STEPS},32,64\]\S* dynamic-update-slice\(", text)
    assert not re.search(rf"= (f8\w+|f16|u8)\[{STEPS},\S* convert\(", text)
