"""Codes of 8 and 16 bits: what a number becomes, and how far it is from it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx._memory._codes import (
    Code,
    CompressedArray,
    Noise,
    compressed,
    decode,
    encode,
    joined,
    layout_of,
    round_randomly,
    split,
)

CODES = [Code(*each) for each in itertools.product((8, 16), (True, False))]
each_code = pytest.mark.parametrize("code", CODES, ids=str)
NOISE = Noise(jnp.uint32(0), "test")


@functools.partial(jax.jit, static_argnums=1)
def stored_once(x, code):
    array = compressed(x, code, NOISE)
    return array, array.full()


def stored(x, code):
    array, full = stored_once(jnp.asarray(x, jnp.float32), code)
    return array, np.asarray(full)


@each_code
@pytest.mark.parametrize("scale", [1.0, 3.3e38, 1.7e-15, 0.1, 7e-5])
def test_what_is_read_and_stored_again_keeps_its_bits(code, scale):
    """All codes of a format. So steps that change nothing change no bit."""
    codes = np.arange(-code.levels if code.signed else 0, code.levels + 1)
    codes = np.resize(codes, (-(-codes.size // 127), 127))
    largest = np.full((len(codes), 1), code.levels)  # what makes the scale
    codes = jnp.asarray(np.concatenate([codes, largest], 1).astype(code.dtype))
    scales = jnp.full((len(codes), 1), scale, jnp.float32)
    before = CompressedArray(codes, scales, code)
    x = jax.jit(decode, static_argnums=2)(codes, scales, code)
    found = jax.jit(lambda x: compressed(x, code, NOISE, before))(x)
    assert np.array_equal(found.scales, scales) and np.array_equal(found.codes, codes)
    # Without what was stored before, the last bit of a quotient may count.
    alone = jax.jit(lambda x, s: encode(x, s, code, NOISE))(x, scales)
    assert np.abs(np.subtract(alone, codes, dtype=int)).max() <= 1
    assert np.mean(alone != codes) < 1e-3


SHAPES = [
    *((1,), (3,), (129,), (131, 2), (500, 1), (500, 3), (7, 131), (3, 3, 64, 128)),
    *((2, 3), (0,), (4, 0), (0, 256)),
]


@pytest.mark.parametrize(("shape", "code"), [*zip(SHAPES, itertools.cycle(CODES[:3]))])
def test_every_shape_is_near(shape, code):
    x = np.float32(np.random.default_rng(0).normal(size=shape))
    x = x if code.signed else x * x
    array, full = stored(x, code)
    assert array.shape == shape and array.codes.dtype == code.dtype
    largest = np.max(np.abs(x), initial=0)
    limit = 1.02 * (2 if code.signed else 4) * largest / code.levels
    assert np.all(np.abs(full - x) <= limit)
    assert layout_of(shape).size <= 128 and np.all(full * x >= 0)
    assert code.signed or np.all((full == 0) == (x == 0))


LAYOUTS = {(64, 4096): (1, 128, 32), (300,): (0, 100, 3), (131,): (0, 128, 2)}
LAYOUTS |= {(4096, 3): (0, 128, 32), (3, 3, 64, 32): (2, 64, 1)}


def test_layouts():
    for shape, wanted in LAYOUTS.items():
        layout = layout_of(shape)
        assert (layout.axis, layout.size, layout.count) == wanted, shape


@pytest.mark.slow
def test_subnormal_numbers_and_a_wide_range():
    for code in CODES:
        _, full = stored(np.float32([1e-42, 0, 3e-39]), code)
        assert np.all(np.abs(full) <= 2.0**-126)
        _, full = stored([1e-30, 1e30], code)
        assert full[1] == np.float32(1e30) and 0 <= full[0] <= 7e-5 * 1e30


@each_code
def test_only_a_signed_number_may_become_zero(code):
    sizes = np.float32(2.0) ** np.arange(-126, 2, dtype=np.float32)
    _, full = stored(np.concatenate([sizes, [0.0, -0.0]]), code)
    assert np.all(full[-2:] == 0)
    assert np.all(full[:-2] > 0) != code.signed and np.all(full >= 0)
    if code.signed:
        assert np.all(stored(-sizes, code)[1] <= 0)


@each_code
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_block(code, bad):
    x = np.ones((2, 256), np.float32)
    x[1, 3] = bad
    array, full = stored(x, code)
    is_nan = np.isnan(full)
    assert is_nan[1, :128].all() and is_nan.sum() == 128
    assert np.isnan(np.asarray(array.scales)).sum() == 1


@pytest.mark.parametrize("code", [c for c in CODES if not c.signed], ids=str)
def test_a_negative_number_where_none_may_be_is_no_number(code):
    """What was proved is looked at again: hyperparameters may be changed."""
    assert np.isnan(stored([1.0, -1e-20, 2.0], code)[1]).all()
    assert not np.isnan(stored([1.0, -0.0, 2.0], code)[1]).any()


@pytest.mark.parametrize("exponent", [-20, -24, -30])
def test_second_moments_of_small_gradients(exponent):
    """A scale in float16 loses those of gradients below 2^-20."""
    g = np.random.default_rng(1).normal(size=4096) * 2.0**exponent
    full = np.float64(stored(g * g, Code(8, False))[1])
    errors = np.sqrt(full) / np.abs(g) - 1
    assert np.sqrt(np.mean(errors**2)) < 0.05 and abs(np.mean(errors)) < 0.005


@each_code
def test_the_mean_of_random_rounding_is_the_number(code):
    """4,096 times, within four standard errors, of which 4 in 65,000 are further."""
    x = np.float32(np.random.default_rng(2).normal(size=(2, 128)))
    x = x if code.signed else x * x
    once = lambda i: compressed(jnp.asarray(x), code, Noise(i, "w")).full()  # noqa: E731
    found = np.float64(jax.jit(jax.vmap(once))(jnp.arange(4096, dtype=jnp.uint32)))
    spread = found.std(0)
    is_random = spread > 1e-6 * np.abs(x)
    assert is_random.sum() > 240
    errors = (found.mean(0) - x)[is_random] / (spread[is_random] / 64)
    assert np.abs(errors).max() < 4 and 0.8 < np.mean(errors**2) < 1.25


def test_an_unchanged_number_keeps_its_code():
    x = jnp.asarray(np.random.default_rng(3).normal(size=4096), jnp.float32)
    code = Code(16)
    before, full = stored(x, code)
    noise = Noise(jnp.uint32(7), "w")
    again = jax.jit(lambda x: compressed(x, code, noise, before))
    assert np.array_equal(again(full).codes, before.codes)
    changed = np.concatenate([1.5 * full[:128], full[128:]])
    after = again(changed)
    assert np.array_equal(after.codes[128:], before.codes[128:])
    np.testing.assert_allclose(after.full(), changed, rtol=2e-3, atol=1e-6)


def all_kinds_of_bits():
    random = np.random.default_rng(4).integers(0, 2**32, 500_000, dtype=np.uint32)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7F7FFFFF, 0x7F800000, 0x00800000]
    edges = np.uint32(edges)
    ties = np.arange(2**16, dtype=np.uint32) << 16 | 0x8000
    return np.concatenate([edges, edges | 0x80000000, ties, random])


def test_a_float32_is_a_bfloat16_and_16_bits():
    bits = all_kinds_of_bits()
    x = bits.view(np.float32)
    weight, low = jax.jit(split)(x)
    found = np.asarray(jax.jit(joined)(weight, low))
    is_nan = np.isnan(x)
    assert np.array_equal(found[~is_nan].view(np.uint32), bits[~is_nan])
    assert np.isnan(found[is_nan]).all() and np.isnan(np.float32(weight)[is_nan]).all()
    with np.errstate(all="ignore"):
        nearest = x.astype(jnp.bfloat16)
    is_tie = (bits & 0xFFFF) == 0x8000
    same = np.asarray(weight).view(np.uint16) == nearest.view(np.uint16)
    assert same[~is_tie & ~is_nan].all()


@pytest.mark.parametrize("weight", [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.0])
def test_a_weight_from_outside_is_taken_as_it_is(weight):
    low = jnp.asarray([-32768, -5, 0, 5, 32767], jnp.int16)
    weights = jnp.full(5, weight, jnp.bfloat16)
    found = np.asarray(joined(weights, low), np.float64)
    if np.isnan(weight):
        assert np.isnan(found).all()
    elif weight == 0:
        assert np.all(np.abs(found) < 1e-39)
    elif np.isinf(weight):
        assert np.all(np.abs(found) >= 3.3e38) and not np.isnan(found).any()
    else:
        np.testing.assert_allclose(found, weight, rtol=2**-8)


@pytest.mark.parametrize("count", [8, 16])
def test_rounding_randomly_gives_a_neighbour(count):
    x = all_kinds_of_bits().view(np.float32)
    found = np.asarray(round_randomly(jnp.asarray(x), count, NOISE))
    finite = np.isfinite(x)
    assert np.array_equal(np.isnan(found), np.isnan(x))
    assert np.array_equal(found[np.isinf(x)], x[np.isinf(x)])
    assert np.isfinite(found[finite]).all()
    moved = found[finite].view(np.uint32).astype(np.int64)
    moved -= x[finite].view(np.uint32)
    assert np.all(np.abs(moved) < 2**count)
    assert not np.any(found[finite].view(np.uint32) & (2**count - 1))
