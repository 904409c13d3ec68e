"""Stochastic rounding: only neighbours, without bias, a pure function of the key."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._rounding import round_to_format
from tests import helpers
from tests.quantize.cases import DATA, KINDS, QUANTIZERS, codes_of, scales_of
from tests.reference import low_precision as reference
from tests.registries import FORMATS

each_format = pytest.mark.parametrize("format", FORMATS.values())


def draws(x: np.ndarray, format: mpx.Format, count: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(7), count)
    one = lambda key: round_to_format(jnp.asarray(x), format, key)  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


@each_format
def test_representable_numbers_stay(format: mpx.Format):
    numbers = reference.finite_numbers(reference.FORMATS[format.name])
    numbers = np.concatenate([numbers, -numbers]).astype(np.float32)
    found = draws(numbers, format, 500)
    assert (found == numbers).all()
    assert (np.signbit(found) == np.signbit(numbers)).all()


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


@each_format
def test_what_is_too_large_saturates_and_nan_stays(format: mpx.Format):
    x = np.array([format.largest * 1.2, -np.inf, np.nan, 0.0, -0.0], np.float32)
    found = draws(x, format, 50)
    expected = np.array([format.largest, -format.largest, np.nan, 0, 0])
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_small_numbers_do_not_vanish_on_average():
    """Half of the smallest number and less: to the nearest they would all be zero."""
    x = jnp.full(100_000, 0.1 * mpx.Format.E5M2.smallest)
    nearest = mpx.quantization.TensorQuantizer(mpx.Format.E5M2)
    random = dataclasses.replace(nearest, stochastic_rounding=True)
    key = jax.random.key(0)

    @jax.jit
    def means(x, key):
        zero = mpx.quantization.quantize_dequantize(x, nearest, scale=1.0).sum()
        found = mpx.quantization.quantize_dequantize(
            x, random, scale=1.0, key=key
        ).mean()
        return zero, found / x[0]

    zero, mean = means(x, key)
    assert zero == 0 and abs(float(mean) - 1) < 0.05


@pytest.mark.parametrize("name", KINDS)
def test_every_quantizer_rounds_stochastically(name: str):
    """Scales stay; codes are at most one step away; the key decides, under jit too."""
    nearest, _ = QUANTIZERS[name]
    quantizer = dataclasses.replace(nearest, stochastic_rounding=True)
    x = jnp.asarray(DATA["normal"]())

    @jax.jit
    def run(x, key):
        q = mpx.quantization.quantize(x, quantizer, key=key)
        return q, q.dequantize(), mpx.quantization.quantize(x, nearest)

    first, values, expected = run(x, jax.random.key(0))
    helpers.assert_same_bits(first, run(x, jax.random.key(0))[0])
    if name in ("tensor e4m3", "nvfp4 1x16"):
        eager = mpx.quantization.quantize(x, quantizer, key=jax.random.key(0))
        helpers.assert_same_bits(first, eager)
    other, *_ = run(x, jax.random.key(1))
    assert (codes_of(first) != codes_of(other)).mean() > 0.1
    np.testing.assert_array_equal(scales_of(first), scales_of(expected))
    sign = reference.FORMATS[first.format.name].sign
    step = np.abs(codes_of(first) % sign - codes_of(expected) % sign)
    assert step.max() == 1
    error = np.asarray(values, np.float64) - np.asarray(x)
    assert abs(error.mean()) < 6 * error.std() / np.sqrt(error.size)
