"""Rounding of float32 to a format, on the float32 grid.

A number is rounded by arithmetic, not by a cast: divided by the distance of two
neighbours of the format (a power of two, from the exponent bits), rounded to an
integer, multiplied back. Every step is exact, so that the result is right on every
device, and the cast that follows changes nothing. That matters twice: XLA may drop a
pair of casts (float32 to float8 and back) inside of `jax.jit`, and a cast from float32
to float8 by way of float16, which some compilers make of it, rounds twice.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from ._format import Format
from ._noise import Key, Noise

# Below the smallest normal float32 devices differ: some flush to zero, others do not.
SMALLEST_FLOAT32 = 2.0**-126


def power_of_two(biased_exponent: Array) -> Array:
    """The float32 number 2^(e - 127) for integers 1 <= e <= 254, from its bits.

    `exp2` will not do: XLA's on the CPU is not exact.
    """
    bits = biased_exponent.astype(jnp.uint32) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def biased_exponent(x: Array) -> Array:
    """The 8 bits of exponent of float32 numbers, as int32; 0 for subnormal ones."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits >> 23) & 255).astype(jnp.int32)


def flushed(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Subnormal float32 numbers as zeros of their sign; all others as they are."""
    return jnp.where(jnp.abs(x) < SMALLEST_FLOAT32, x * 0, x)


def largest_magnitude(
    x: Float32[Array, "..."],
    axis: tuple[int, ...] | None = None,
    *,
    only_finite: bool = False,
) -> Array:
    """The maximum of |x|; NaN where there is a NaN, 0 of nothing.

    Taken of the bits, whose order as integers is that of the numbers, with infinity
    and then NaN above. XLA's maximum of floats loses NaNs on the CPU.

    Args:
        x: The numbers.
        axis: The axes to take it over; None for all.
        only_finite: Leave out what is not finite.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    if only_finite:
        bits = jnp.where(bits < 0x7F800000, bits, 0)
    bits = jnp.max(bits, axis=axis, initial=0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def round_to_format(
    x: Float32[Array, "..."], format: Format, key: Key | None = None
) -> Float32[Array, "..."]:
    """The nearest numbers of a format, ties to even; or random neighbours.

    Args:
        x: Numbers in float32.
        format: Any format but `HYBRID`.
        key: A PRNG key, or noise, for stochastic rounding: of the two neighbours the
            upper one with the probability (x - lower) / (upper - lower).

    Returns:
        Float32 numbers that the format has. What is larger than its largest number, an
        infinity too, becomes that number; NaN stays NaN; zeros keep their sign. An
        infinity here is a finite number times a scale; see `_quantizers`.
    """
    rounded = round_finite(x, format, to_integers(key))
    return jnp.where(jnp.isnan(x), jnp.nan, rounded)


def to_integers(key: Key | None = None) -> Callable[[Array], Array]:
    """What rounds numbers to integers: ties to even; or randomly, with a key."""
    if key is None:
        return functools.partial(
            lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN
        )

    def random(steps: Array) -> Array:
        lower = jnp.floor(steps)
        if isinstance(key, Noise):
            draws = key.uniform(steps.shape)
        else:
            draws = jax.random.uniform(key, steps.shape, jnp.float32)
        return up_or_down(steps, lower, draws)

    return random


def up_or_down(steps: Array, lower: Array, draws: Array) -> Array:
    """The integer above with the probability of what is above the one below.

    Not floor(steps + draws): that sum would round 15 + 0.9999999 up to 16.
    """
    return lower + (draws < steps - lower).astype(jnp.float32)


def round_finite(
    x: Array, format: Format, to_integers: Callable[[Array], Array]
) -> Array:
    """The same of numbers among which no NaN matters.

    Args:
        x: Numbers in float32.
        format: Any format but `HYBRID`.
        to_integers: Rounds numbers that are not negative to integers.
    """
    info = format._info
    magnitude = jnp.minimum(jnp.abs(x), format.largest)
    # The distance of neighbours is constant below the smallest normal number.
    exponent = jnp.maximum(biased_exponent(magnitude), 127 + info.minexp)
    distance = power_of_two(exponent - info.nmant)
    steps = magnitude * power_of_two(254 - exponent + info.nmant)
    return jnp.copysign(to_integers(steps) * distance, x)
