"""Rounding to the numbers of a format: to the nearest, or to a random neighbour.

To the nearest: midpoints, neighbours, and every half. Stochastically: only neighbours,
without bias, a pure function of the key, or of the gradient in products in NVFP4.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._rounding import (
    Noise,
    noise_from,
    noise_of_hash,
    round_to_format,
)
from mpx.quantization import TensorQuantizer, quantize, quantize_dequantize
from tests import helpers
from tests.quantize.cases import DATA, KINDS, QUANTIZERS, codes_of, scales_of
from tests.quantize.linear_cases import matrix_product, result_and_gradients
from tests.reference import low_precision as reference
from tests.registries import FORMATS

each_format = pytest.mark.parametrize("format", FORMATS.values())


def hard_numbers(bits: reference.Bits) -> np.ndarray:
    """Every number and every midpoint with both float32 neighbours, both signs."""
    numbers = reference.finite_numbers(bits)
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = np.concatenate([numbers, middles]).astype(np.float32)
    assert (np.sort(exact[exact > 0]) == np.unique(exact[exact > 0])).all()
    above = np.nextafter(exact, np.float32(np.inf))
    below = np.nextafter(exact[1:], np.float32(0))
    top = bits.largest * np.array([1 + 2**-4, 1.0357, 1.0358, 1.25, 2, 1e9], "f4")
    rest = np.array([1e-30, 3e38, np.inf, np.nan], np.float32)
    positive = np.concatenate([exact, above, below, top, rest])
    return np.concatenate([positive, -positive])


def rounded(x: jax.Array, format: mpx.Format) -> jax.Array:
    return round_to_format(x.astype(jnp.float32), format)


def check(x: np.ndarray, format: mpx.Format) -> None:
    bits = reference.FORMATS[format.name]
    codes = reference.encode(reference.flush(x), bits)
    expected = reference.decode(np.where(codes < 0, 0, codes), bits)
    expected[codes < 0] = np.nan
    for transform in (lambda f: f, jax.jit):
        found = np.asarray(transform(lambda x: rounded(x, format))(jnp.asarray(x)))
        np.testing.assert_array_equal(found, expected)
        real = ~np.isnan(expected)
        assert (np.signbit(found) == np.signbit(expected))[real].all()


@each_format
def test_midpoints_and_their_neighbours(format: mpx.Format):
    x = hard_numbers(reference.FORMATS[format.name])
    assert len(x) > 30
    check(x, format)


@each_format
@pytest.mark.parametrize("dtype", helpers.HALF)
def test_every_number_of_half_precision(format: mpx.Format, dtype: str):
    check(helpers.all_codes(jnp.dtype(dtype)), format)


@pytest.mark.parametrize(
    ("format", "dtype"), [(FORMATS["E4M3"], "float16"), (FORMATS["E5M2"], "bfloat16")]
)
def test_every_number_of_half_precision_as_payload(format: mpx.Format, dtype: str):
    x = helpers.all_codes(jnp.dtype(dtype))
    bits = reference.FORMATS[format.name]
    expected = reference.encode(reference.flush(x), bits)
    expected[np.isinf(x.astype(np.float32))] = -1  # NaN: only finite numbers saturate
    run = lambda x: quantize(x, TensorQuantizer(format), scale=1.0).payload  # noqa: E731
    for transform in (lambda f: f, jax.jit):
        found = np.asarray(transform(run)(jnp.asarray(x))).view(np.uint8)
        np.testing.assert_array_equal(reference.without_nan(found, bits), expected)


def test_the_cast_of_numpy_agrees_where_it_saturates_itself():
    """E2M1 saturates in ml_dtypes, too: a second witness for the oracle."""
    x = hard_numbers(reference.E2M1)
    x = x[~np.isnan(x)]
    expected = x.astype(mpx.Format.E2M1.dtype).astype(np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(x), mpx.Format.E2M1), expected)


def test_narrow_numbers_survive_jit():
    """A pair of casts may be dropped under jit; what was rounded stays rounded."""
    x = jnp.linspace(-3, 3, 1000, dtype=jnp.float32)
    rounded = lambda x: quantize_dequantize(x, TensorQuantizer())  # noqa: E731
    jitted = jax.jit(rounded)(x)
    helpers.assert_same_bits(rounded(x), jitted)
    assert len(np.unique(jitted)) < 256


# --- Stochastic rounding --------------------------------------------------------------


def draws(x: np.ndarray, format: mpx.Format, count: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(7), count)
    one = lambda key: round_to_format(jnp.asarray(x), format, key)  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


@each_format
def test_representable_numbers_stay_and_others_saturate(format: mpx.Format):
    numbers = reference.finite_numbers(reference.FORMATS[format.name])
    numbers = np.concatenate([numbers, -numbers]).astype(np.float32)
    found = draws(numbers, format, 500)
    assert (found == numbers).all()
    assert (np.signbit(found) == np.signbit(numbers)).all()
    found = draws(np.float32([format.largest * 1.2, -np.inf, np.nan]), format, 50)
    expected = np.array([format.largest, -format.largest, np.nan])
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@each_format
def test_only_neighbours_come_out_and_their_mean_is_the_number(format: mpx.Format):
    numbers = reference.finite_numbers(reference.FORMATS[format.name])
    fractions = np.array([0.03, 0.25, 0.5, 0.8, 0.99])
    lower, upper = numbers[:-1, None], numbers[1:, None]
    x = (lower + (upper - lower) * fractions).astype(np.float32)
    count = 20_000 // fractions.size
    found = draws(x, format, count)
    assert ((found == lower) | (found == upper)).all()
    # Pooled over the numbers: the share of upper neighbours is the fraction. Five
    # standard deviations of a binomial distribution.
    share = (found == upper).mean(axis=(0, 1))
    allowed = 5 * np.sqrt(fractions * (1 - fractions) / (count * lower.size))
    assert (np.abs(share - fractions) <= allowed + 1e-6).all()
    # A tie is not always rounded the same way for any single number.
    assert (np.ptp(found[:, :, 2], axis=0) > 0).all()


def test_small_numbers_do_not_vanish_on_average():
    """Half of the smallest number and less: to the nearest they would all be zero."""
    x = jnp.full(100_000, 0.1 * mpx.Format.E5M2.smallest)
    nearest = TensorQuantizer(mpx.Format.E5M2)
    random = dataclasses.replace(nearest, stochastic_rounding=True)

    @jax.jit
    def means(x, key):
        zero = quantize_dequantize(x, nearest, scale=1.0).sum()
        found = quantize_dequantize(x, random, scale=1.0, key=key).mean()
        return zero, found / x[0]

    zero, mean = means(x, jax.random.key(0))
    assert zero == 0 and abs(float(mean) - 1) < 0.05


@pytest.mark.parametrize("name", KINDS)
def test_every_quantizer_rounds_stochastically(name: str):
    """Scales stay; codes are at most one step away; the key decides, under jit too."""
    nearest, _ = QUANTIZERS[name]
    quantizer = dataclasses.replace(nearest, stochastic_rounding=True)
    x = jnp.asarray(DATA["normal"]())

    @jax.jit
    def run(x, key):
        q = quantize(x, quantizer, key=key)
        return q, q.dequantize(), quantize(x, nearest)

    first, values, expected = run(x, jax.random.key(0))
    helpers.assert_same_bits(first, run(x, jax.random.key(0))[0])
    if name in ("tensor e4m3", "nvfp4 1x16"):
        eager = quantize(x, quantizer, key=jax.random.key(0))
        helpers.assert_same_bits(first, eager)
    other, *_ = run(x, jax.random.key(1))
    assert (codes_of(first) != codes_of(other)).mean() > 0.1
    np.testing.assert_array_equal(scales_of(first), scales_of(expected))
    sign = reference.FORMATS[first.format.name].sign
    step = np.abs(codes_of(first) % sign - codes_of(expected) % sign)
    assert step.max() == 1
    error = np.asarray(values, np.float64) - np.asarray(x)
    assert abs(error.mean()) < 6 * error.std() / np.sqrt(error.size)


# --- The noise of products in NVFP4, which is made of the gradient --------------------

PRODUCT = matrix_product(mpx.NVFP4BlockScaling())
X, W, G = (
    np.random.default_rng(seed).standard_normal(shape, np.float32)
    for seed, shape in enumerate(((16, 32), (32, 48), (16, 48)))
)


def test_the_same_gradient_is_rounded_the_same_way_and_another_another_way():
    first, again = (result_and_gradients(PRODUCT, X, W, G) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    # The change is too small to be seen but for the draws.
    changed = G.copy()
    changed[0, 0] *= np.float32(1 + 1e-6)
    _, dx, dw, _ = map(np.asarray, result_and_gradients(PRODUCT, X, W, changed))
    first = [np.asarray(one) for one in first]
    assert (dx != first[1]).mean() > 0.5 and (dw != first[2]).mean() > 0.5
    assert (dx[1:] != first[1][1:]).any()


@pytest.mark.slow
def test_the_mean_over_many_gradients_is_close():
    count = 400
    near = G * (1 + 1e-6 * np.arange(count)).reshape(-1, 1, 1).astype(np.float32)
    many = jax.vmap(lambda g: result_and_gradients(PRODUCT, X, W, g)[1])(near)
    half = mpx.NVFP4BlockScaling(backward_override="dequantized")
    plain = mpx.NVFP4BlockScaling(disable_stochastic_rounding=True)
    products = matrix_product(half), matrix_product(plain)
    exact, nearest = (result_and_gradients(one, X, W, G)[1] for one in products)

    def error(found) -> float:
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    # Without bias the error of a mean falls as 1 / sqrt(count); rounding to the
    # nearest has one that no mean removes.
    assert error(many.mean(0)) < 0.1 * error(many[0])
    assert error(many.mean(0)) < 0.3 * error(nearest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_is_of_the_numbers_and_their_places(dtype: str):
    x = G.astype(jnp.dtype(dtype)).astype("float32")
    turned = x.copy()
    turned[3, 3] *= -1
    noise = jax.jit(noise_from, static_argnums=1)
    # The salt, the order, the shape, a sign, the size: each makes another noise.
    inputs = [x[::-1], x.reshape(48, 16), turned, 2 * x, 0 * x]
    itself, salted = noise(x, 0), noise(x, 1)
    found = [itself, salted, *(noise(x, 0) for x in inputs)]
    keys = [tuple(map(int, jax.tree.leaves(one))) for one in found]
    assert len(set(keys)) == len(keys)
    eager = jax.tree.leaves(noise_from(jnp.asarray(x), 0))
    assert tuple(map(int, eager)) == keys[0]


def draws_of(hashes, steps, shape=(64, 128)):
    """Draws by hash and step: [hashes, steps, *shape]."""

    def draw(total, step):
        return noise_of_hash(total, shape, 0, step).uniform(shape)

    hashes, steps = (jnp.asarray(x, jnp.uint32) for x in (hashes, steps))
    by_step = jax.vmap(draw, (None, 0))
    return np.asarray(jax.vmap(by_step, (0, None))(hashes, steps))


# Sums of gradients and numbers of steps that follow one another are the worst keys.
DRAWS = draws_of([0, 1, 2, 2**31, 2**32 - 1], [0, 1, 2, 3, 10**6])


def test_draws_are_uniform():
    flat = DRAWS.ravel()
    assert flat.min() >= 0 and flat.max() < 1
    for parts in (2, 16, 256):
        found = np.bincount((flat * parts).astype(int), minlength=parts)
        wanted = flat.size / parts
        # Chi-squared, which has the variance 2 (parts - 1).
        distance = ((found - wanted) ** 2 / wanted).sum() - (parts - 1)
        assert abs(distance) < 5 * np.sqrt(2 * (parts - 1))
    # All 23 bits, and none leans to a side.
    bits = (flat * 2**23).astype(int)
    for one in range(23):
        assert abs(((bits >> one) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(flat.size)


def test_draws_know_nothing_of_one_another():
    """Neither along an axis, nor those of two gradients, nor those of two steps."""
    centred = DRAWS - 0.5
    pairs = {
        "columns": (centred[..., 1:], centred[..., :-1]),
        "rows": (centred[..., 1:, :], centred[..., :-1, :]),
        "halves": (centred[..., 64:], centred[..., :64]),
        "hashes": (centred[1:], centred[:-1]),
        "steps": (centred[:, 1:], centred[:, :-1]),
    }
    for name, (one, other) in pairs.items():
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 5 / np.sqrt(one.size), name


def test_a_step_draws_anew_and_an_equal_one_the_same():
    first = draws_of([7], [3])
    np.testing.assert_array_equal(first, draws_of([7], [3]))
    assert (first != draws_of([7], [4])).mean() > 0.999
    assert (first != draws_of([8], [3])).mean() > 0.999
    assert isinstance(noise_of_hash(jnp.uint32(7), (4, 4), 0, None), Noise)
