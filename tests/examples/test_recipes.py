"""Recipes from papers: programs of at most 40 lines, against figures of the papers."""

import functools
import inspect
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx
from mpx.quantization import Leg, NVFP4Quantizer, Quantizer, Role, quantize

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "guides" / "recipes.md"
PROGRAMS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
E4M3, E2M1, E8M0 = (
    np.dtype(getattr(ml_dtypes, name))
    for name in ("float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu")
)


@functools.cache
def names_of(program: str) -> dict:
    return runpy.run_path(str(FOLDER / f"{program}.py"), run_name="__main__")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def f32(x) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


@pytest.mark.third_party
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_recipe_is_a_short_program_on_the_page(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    assert f'--8<-- "examples/recipes/{path.name}"' in PAGE.read_text("utf-8")
    names_of(path.stem)


def test_the_page_has_at_most_900_words_besides_code():
    text = re.sub(r"```.*?```", "", PAGE.read_text("utf-8"), flags=re.DOTALL)
    assert len(PROGRAMS) == 5 and len(text.split()) <= 900


# As the page says: what a device does with the forward matmul.
DEQUANTIZED = "dequantized"
ON_DEVICES = {
    ("static_scales", "unit"): {"H100": "FP8 units", "tpu7x": "FP8 units"},
    ("mxfp4", "qfactory"): {"B200": DEQUANTIZED},
    ("four_over_six", "qfactory"): {"B200": "block-scaled units", "H100": DEQUANTIZED},
    ("square_mxfp8", "qfactory"): {"B200": "block-scaled units", "H100": DEQUANTIZED},
    ("switchback", "switchback"): {"tpu v5e": "int8 units", "H100": "int8 units"},
    ("switchback", "rowwise"): {"H100": "FP8 units", "tpu7x": "FP8 units"},
}


@pytest.mark.parametrize(("program", "name"), ON_DEVICES)
def test_devices_multiply_as_the_page_says(program: str, name: str):
    recipe = names_of(program)[name]
    if not isinstance(recipe, mpx.quantization.AbstractRecipe):
        recipe = mpx.CustomRecipe(recipe)
    w = jnp.eye(128)
    for device, path in ON_DEVICES[program, name].items():
        loss = mpx.autocast(
            lambda w, x: jnp.tanh(x @ w) @ w, recipe=recipe, target=device
        )
        operations = mpx.explain(loss)(w, w).operations
        (reason,) = {one.reason for one in operations if one.is_low}
        assert f" {path} (" in reason and "no fast" not in reason.partition(path)[0]


# --- Constant scales (arXiv:2303.11257; Qwix, `calibration_method`) -------------------


def test_unit_scaling_clips_and_casts():
    names = names_of("static_scales")
    quantizer = names["unit"](Role.INPUT, Leg.FORWARD)
    x = jnp.concatenate([normal(4096), jnp.array([0.0, 449.0, -1e4, jnp.nan])])
    q = quantize(x, quantizer)
    cast = np.clip(np.asarray(x), -448, 448).astype(E4M3)
    assert q.inverse_scale == 1
    np.testing.assert_array_equal(f32(q.payload), f32(cast))


def test_a_constant_scale_needs_no_amax():
    """No pass over the numbers, and one that they are as accurate without."""
    quantizer = names_of("static_scales")["unit"](Role.INPUT, Leg.FORWARD)
    x, errors = normal(1 << 16), []
    for one in quantizer, Quantizer(mpx.Format.E4M3):
        jaxpr = str(jax.make_jaxpr(lambda x, one=one: quantize(x, one).payload)(x))
        errors.append(float(jnp.linalg.norm(quantize(x, one).dequantize() - x)))
        assert ("reduce_max" in jaxpr) == (one is not quantizer)
    assert errors[0] < 1.02 * errors[1]


def test_a_fixed_range_is_that_of_qwix():
    """Its scale is 224 / 448, the inverse of ours, and larger numbers saturate."""
    fixed = names_of("static_scales")["fixed_range"]
    x = jnp.array([224.0, 1000.0, -0.3, 112.0])
    q = quantize(x, fixed(Role.WEIGHT, Leg.FORWARD))
    assert q.inverse_scale == 0.5
    assert q.dequantize().tolist() == [224, 224, -0.3125, 112]
    assert fixed(Role.GRADIENT, Leg.DGRAD) == Quantizer(mpx.Format.E5M2)


# --- MXFP4 (OCP Microscaling Formats 1.0, sections 5.3.3, 5.4.1, 6.3) -----------------

GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def mxfp4_of_ocp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and scales of section 6.3, in float64."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    scales = 2.0 ** (np.floor(np.log2(amax)) - 2)
    numbers = np.clip(blocks / scales, -6, 6).astype(E2M1).astype(np.float64)
    return (numbers * scales).reshape(x.shape), scales[..., 0]


def test_mxfp4_has_the_grid_and_the_bits_of_the_specification():
    quantizer = names_of("mxfp4")["qfactory"](Role.INPUT, Leg.FORWARD)
    fine = jnp.linspace(0, 6, 32 * 512).reshape(-1, 32)
    fine = fine.at[:, 0].set(6.0)
    q = quantize(fine, quantizer)
    assert sorted({*f32(q.dequantize()).ravel().tolist()}) == GRID
    assert q.inverse_scale.dtype == E8M0 and (f32(q.inverse_scale) == 1).all()
    assert 8 * q.nbytes / fine.size == 4.25


def test_a_block_of_mxfp4_worked_by_hand():
    """amax 7: the scale is 2^(2 - 2), 7 saturates. Rounded up it is 2, and 7 is 8."""
    quantizer = names_of("mxfp4")["qfactory"](Role.INPUT, Leg.FORWARD)
    x = jnp.zeros(32).at[:6].set(jnp.array([7.0, -5.0, 2.4, 1.25, 0.2, 0.3]))
    q = quantize(x, quantizer)
    assert f32(q.inverse_scale).tolist() == [1]
    assert q.dequantize()[:6].tolist() == [6, -4, 2, 1, 0, 0.5]
    q = quantize(x, Quantizer(mpx.Format.E2M1, 1, 32, scales="e8m0"))
    assert f32(q.inverse_scale).tolist() == [2]
    assert q.dequantize()[:6].tolist() == [8, -4, 2, 1, 0, 0]


def test_mxfp4_is_that_of_the_specification_bit_for_bit():
    quantizer = names_of("mxfp4")["qfactory"](Role.INPUT, Leg.FORWARD)
    x = normal(64, 256) * 2.0 ** np.arange(-32.0, 32, dtype="f")[:, None]
    q = jax.jit(functools.partial(quantize, quantizer=quantizer))(x)
    numbers, scales = mxfp4_of_ocp(np.asarray(x))
    np.testing.assert_array_equal(f32(q.inverse_scale), scales)
    np.testing.assert_array_equal(f32(q.dequantize()), numbers)
    x = jnp.zeros((3, 32)).at[1, 3].set(jnp.inf).at[2, 4].set(jnp.nan)
    found = quantize(x, quantizer).dequantize()
    assert (found[0] == 0).all() and jnp.isnan(found[1:]).all()


def test_mxfp4_by_mxfp8_has_no_block_units():
    def mixed(role, leg):
        few = role is Role.WEIGHT
        format = mpx.Format.E2M1 if few else mpx.Format.E4M3
        return Quantizer(format, 1, 32, scales="e8m0")

    recipe = mpx.CustomRecipe(mixed)
    loss = mpx.autocast(lambda w, x: x @ w @ w, recipe=recipe, target="B200")
    operations = mpx.explain(loss)(jnp.eye(64), jnp.eye(64)).operations
    (reason,) = {one.reason for one in operations if one.is_low}
    assert DEQUANTIZED in reason


# --- Four Over Six (arXiv:2512.02010, sections 3 and 4) -------------------------------

BLOCK = [10.0, 20.0, 30.0, 40.0]


@functools.cache
def four_over_six() -> Quantizer:
    return names_of("four_over_six")["qfactory"](Role.INPUT, Leg.FORWARD)


@pytest.mark.parametrize(
    ("quantizer", "amax", "scale", "numbers", "error"),
    [
        (NVFP4Quantizer, 448 * 6, 6.5, [9.75, 19.5, 26, 39], 4.33),
        (four_over_six, 256 * 6, 10, BLOCK, 0),
    ],
)
def test_the_block_of_the_paper(quantizer, amax, scale, numbers, error):
    """The largest number is such that the scale of the tensor is 1."""
    x = jnp.zeros((2, 16)).at[0, :4].set(jnp.array(BLOCK)).at[1, 0].set(amax)
    q = quantize(x, quantizer())
    assert q.tensor_inverse_scale == 1 and q.inverse_scale[0, 0] == scale
    found = q.dequantize()[0, :4]
    assert found.tolist() == numbers
    assert round(float(jnp.mean((found - x[0, :4]) ** 2)), 2) == error


def test_the_tensor_scale_leaves_room():
    """The block with the amax of the tensor becomes 4: its scale is 1.5 x 256."""
    x = jnp.zeros(16).at[:4].set(jnp.array(BLOCK))
    q = quantize(x, four_over_six())
    assert q.inverse_scale[0] == 384 and q.tensor_inverse_scale == np.float32(40 / 1536)
    np.testing.assert_allclose(q.dequantize()[:4], BLOCK, rtol=1e-6)


def four_over_six_of_paper(x: np.ndarray) -> np.ndarray:
    """Algorithm 1: both scales are rounded to E4M3 before they are compared."""
    blocks = x.astype(np.float64).reshape(-1, 16)
    tensor = 256 * 6 / np.abs(x).max()
    best, least = blocks, np.full(len(blocks), np.inf)
    for largest in 6, 4:
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / largest * tensor
        scale = scale.astype(E4M3).astype(np.float64) / tensor
        found = (blocks / scale).clip(-6, 6).astype(E2M1).astype(np.float64) * scale
        error = ((found - blocks) ** 2).sum(axis=-1)
        best = np.where((error < least)[:, None], found, best)
        least = np.minimum(error, least)
    return best.reshape(x.shape)


def test_four_over_six_loses_less_than_nvfp4():
    """Normal numbers lose 0.84 of NVFP4's squared error, as by the algorithm."""
    x = np.asarray(normal(512, 512))
    paper = four_over_six_of_paper(x)
    ours, nvfp4 = (
        f32(quantize(x, one).dequantize())
        for one in (four_over_six(), NVFP4Quantizer())
    )
    assert np.mean(np.abs(ours - paper) > 1e-5 * np.abs(paper)) < 1e-4  # ties
    ours, paper, nvfp4 = (float(np.mean((y - x) ** 2)) for y in (ours, paper, nvfp4))
    assert 0.83 < ours / nvfp4 < 0.85 and abs(ours - paper) < 1e-3 * paper


def test_four_over_six_shows_what_is_not_finite():
    for value in jnp.inf, jnp.nan:
        x = normal(32, 32).at[3, 5].set(value)
        assert jnp.isnan(quantize(x, four_over_six()).dequantize()).all()
    assert (quantize(jnp.zeros((2, 16)), four_over_six()).dequantize() == 0).all()


# --- MXFP8 with square weights --------------------------------------------------------


def test_one_copy_of_a_square_weight_serves_both_ways():
    qfactory = names_of("square_mxfp8")["qfactory"]
    forward, dgrad = (qfactory(Role.WEIGHT, leg) for leg in (Leg.FORWARD, Leg.DGRAD))
    assert forward == dgrad and qfactory(Role.INPUT, Leg.FORWARD).block_dimensions == 1
    w = np.asarray(normal(96, 64)) * 2.0 ** np.arange(96)[:, None] / 2.0**48
    q, back = quantize(w, forward), quantize(w.T, dgrad)
    np.testing.assert_array_equal(f32(q.payload), f32(back.payload).T)
    np.testing.assert_array_equal(f32(q.inverse_scale), f32(back.inverse_scale).T)
    blocks = w.astype(np.float64).reshape(3, 32, 2, 32)
    scales = 2 ** np.ceil(np.log2(np.abs(blocks).max(axis=(1, 3)) / 448))
    np.testing.assert_array_equal(f32(q.inverse_scale), scales)
    numbers = blocks / scales[:, None, :, None]
    numbers = numbers.reshape(w.shape).astype(np.float32).astype(E4M3)
    np.testing.assert_array_equal(f32(q.payload), f32(numbers))
    assert q.nbytes == w.size + w.size // 1024


# --- SwitchBack (arXiv:2304.13013, algorithm 1), and torchao --------------------------


def int8(x: np.ndarray, axis: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Equations 1 and 2: round(127 x / absmax), and the factor back."""
    amax = np.abs(x).max(axis=axis, keepdims=True)
    return np.rint(127 * x.astype(np.float64) / amax).astype(np.int64), amax / 127


def test_switchback_is_algorithm_1():
    recipe = names_of("switchback")["switchback"]
    x, w, g = (
        np.asarray(normal(*s, seed=i))
        for i, s in enumerate([(48, 64), (64, 32), (48, 32)])
    )
    x = x * np.float32(2) ** np.arange(-12, 12, 0.5, dtype="f")[:, None]

    def product(w, x):
        return x @ w

    quantized = mpx.autocast(product, "float32", recipe=recipe)
    y, pull = jax.vjp(quantized, jnp.asarray(w), jnp.asarray(x))
    dw, dx = pull(jnp.asarray(g))
    (x8, to_x), (w8, to_w), (g8, to_g) = int8(x, -1), int8(w, None), int8(g, -1)
    np.testing.assert_allclose(y, x8 @ w8 * (to_x * to_w), rtol=1e-5, atol=0)
    np.testing.assert_allclose(dx, g8 @ w8.T * (to_g * to_w), rtol=1e-5, atol=0)
    exact = x.astype(np.float64).T @ g
    assert np.linalg.norm(dw - exact) < 1e-5 * np.linalg.norm(exact)
    assert np.linalg.norm(y - x @ w, axis=1).max() > 0  # y is rounded, dw is not


def test_rowwise_with_gw_hp_is_that_of_torchao():
    """The six casts of its configuration (`torchao/float8/config.py`)."""
    recipe = names_of("switchback")["rowwise"]
    casts = {
        (role, leg): recipe.quantizer(role, leg=leg)
        for role, leg in [
            (Role.INPUT, Leg.FORWARD),
            (Role.WEIGHT, Leg.FORWARD),
            (Role.GRADIENT, Leg.DGRAD),
            (Role.WEIGHT, Leg.DGRAD),
            (Role.INPUT, Leg.WGRAD),
            (Role.GRADIENT, Leg.WGRAD),
        ]
    }
    formats = [one and one.format for one in casts.values()]
    assert formats == [mpx.Format.E4M3] * 4 + [None] * 2
    along = [one and one.block_dimensions for one in casts.values()]
    assert along == [1, 1, 1, 0, None, None]  # axiswise but for w of dgrad


# --- Written from the page alone ------------------------------------------------------


def deepseek():
    """DeepSeek-V3 (arXiv:2412.19437, 3.3.2), with the E8M0 scales of V3.1."""

    def qfactory(role, leg):
        square = role is Role.WEIGHT
        return Quantizer(mpx.Format.E4M3, 2 if square else 1, 128, scales="e8m0")

    return mpx.CustomRecipe(qfactory)


def jetfire():
    """Jetfire (arXiv:2403.12422): int8 in blocks of 32 x 32, in all three matmuls."""
    return mpx.CustomRecipe(lambda role, leg: Quantizer(mpx.Format.INT8, 2, 32))


@pytest.mark.parametrize(
    ("recipe", "lines", "least"), [(deepseek, 8, 1), (jetfire, 3, 0)]
)
def test_a_recipe_that_is_not_on_the_page(recipe, lines: int, least: int):
    assert len(inspect.getsource(recipe).splitlines()) == lines
    w = np.asarray(normal(256, 128)) / 16
    quantizer = recipe().quantizer(Role.WEIGHT)
    block, largest = quantizer.block, quantizer.format.largest
    blocks = w.astype(np.float64).reshape(256 // block, block, 128 // block, block)
    scales = np.abs(blocks).max(axis=(1, 3)) / largest
    scales = 2 ** np.ceil(np.log2(scales)) if least else scales
    q = quantize(w, quantizer)
    np.testing.assert_allclose(f32(q.inverse_scale), scales, rtol=1e-6)

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    x = normal(64, 256, seed=1)
    exact = jax.grad(loss)(w, x)
    grads = jax.jit(jax.grad(mpx.autocast(loss, recipe=recipe())))(w, x)
    assert 0 < jnp.linalg.norm(grads - exact) < 0.1 * jnp.linalg.norm(exact)
