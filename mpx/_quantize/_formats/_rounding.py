"""Rounding of float32 to a format, on the float32 grid.

A number is rounded by arithmetic, not by a cast: divided by the distance of two
neighbours of the format (a power of two, from the exponent bits), rounded to an
integer, multiplied back. Every step is exact, so that the result is right on every
device, and the cast that follows changes nothing. That matters twice: XLA may drop a
pair of casts (float32 to float8 and back) inside of `jax.jit`, and a cast from float32
to float8 by way of float16, which some compilers make of it, rounds twice.
"""

import functools
import zlib
from collections.abc import Callable
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8, UInt32

from ..._base.jax_compat import as_varying, varying_axes
from ..._base.typing import Shape
from ._format import Format

# ----------------------------------------------------------------------------
# E2M1 numbers as codes of 4 bits, two in a byte.
#
# JAX has a dtype for them (`float4_e2m1fn`) that takes a whole byte for each number on
# the CPU and that few operations know. So they are kept in uint8: of two neighbours
# along the packed axis the first is in the low half, as `jax.lax.bitcast_convert_type`
# has it.


def pack(x: Float32[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Codes of E2M1 numbers, two in a byte.

    Args:
        x: Numbers that E2M1 has. A NaN, which it has not, becomes 0.
        axis: The axis to pack, of even length, negative.

    Returns:
        Bytes, half as many along the axis.
    """
    codes = jnp.moveaxis(encode(x), axis, -1)
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return jnp.moveaxis(pairs[..., 0] | (pairs[..., 1] << 4), -1, axis)


def unpack(packed: UInt8[Array, "..."], axis: int) -> Float32[Array, "..."]:
    """The float32 numbers of packed codes; the inverse of `pack`."""
    packed = jnp.moveaxis(packed, axis, -1)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1)
    codes = codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    return jnp.moveaxis(_decode(codes), -1, axis)


def encode(x: Float32[Array, "..."]) -> UInt8[Array, "..."]:
    """Codes of E2M1 numbers, each in a byte; 0 of a NaN."""
    magnitude = jnp.where(jnp.isnan(x), 0.0, jnp.abs(x))
    # A float32 from 1 on holds the code in its bits: exponent and first mantissa bit.
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    normal = (bits >> 22).astype(jnp.int32) - (126 << 1)
    code = jnp.where(magnitude < 1, (magnitude * 2).astype(jnp.int32), normal)
    negative = jnp.signbit(x) & ~jnp.isnan(x)
    return (code + 8 * negative.astype(jnp.int32)).astype(jnp.uint8)


def _decode(codes: Array) -> Array:
    code = (codes & 7).astype(jnp.uint32)
    normal = lax.bitcast_convert_type((code + (126 << 1)) << 22, jnp.float32)
    magnitude = jnp.where(code < 2, code.astype(jnp.float32) * 0.5, normal)
    return jnp.where(codes > 7, -magnitude, magnitude)


# ----------------------------------------------------------------------------
# The noise of stochastic rounding, from the numbers that are rounded and the step.
#
# A backward pass has no key at hand, and one in the state of training would have to be
# split at every product. So the noise is keyed by a hash of the gradient and by the
# number of the training step: within a step the same gradient is rounded the same way,
# in a rematerialized pass too, and another one another way; in the next step both are
# rounded anew, so that what rounding adds to a gradient that stays as it is averages
# out. The hash is a sum of integers, which no order of summation changes: a sharded
# array has the hash of the whole.
#
# What is drawn for a number is a hash of its place: 18 operations on integers.
# Threefry's 20 rounds are more than 100, of which a kernel that rounds an array to 4
# bits would do each for every two bytes that it reads. No GPU has measured what that
# saves.


class Noise(eqx.Module):
    """What determines draws: 64 bits, in two halves.

    Attributes:
        first: From the numbers that are rounded.
        second: From the step.
    """

    first: UInt32[Array, ""]
    second: UInt32[Array, ""]

    @property
    def halves(self) -> UInt32[Array, "2"]:
        """Both, for a kernel."""
        return jnp.stack([self.first, self.second])

    def uniform(self, shape: Shape) -> Float32[Array, "..."]:
        """A draw from [0, 1) for each number of an array, of 23 bits."""
        return uniform(self.first, self.second, places(shape))


# A PRNG key of JAX, which a user gives, or noise.
Key: TypeAlias = Array | Noise


def uniform(first: Array, second: Array, place: Array) -> Array:
    """The draws of noise for places; see `Noise`."""
    bits = mixed(mixed(place ^ first) + second)
    one_to_two = (bits >> 9) | np.uint32(0x3F800000)
    return lax.bitcast_convert_type(one_to_two, jnp.float32) - 1.0


def mixed(x: Array) -> Array:
    """A permutation of the integers of 32 bits without a visible order.

    Each bit of the result changes for half of the changes of one bit of `x`.

    Source: Chris Wellons, Prospecting for Hash Functions (2018), `lowbias32`.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def noise_from(x: Float32[Array, "..."], salt: int, step: Array | None = None) -> Noise:
    """The noise that the numbers, their places and the step determine.

    Args:
        x: The numbers.
        salt: A constant, so that two copies of the same numbers get two noises.
        step: The number of the step, an integer; None if nobody knows it.
    """
    total = jnp.sum(hashed(x, places(x.shape)), dtype=jnp.uint32)
    return noise_of_hash(total, x.shape, salt, step)


def places(shape: Shape) -> Array:
    """The place of each number in the flattened array, in 32 bits."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * _as_number(length) + index
    return place


def hashed(x: Float32[Array, "..."], place: Array) -> Array:
    """Integers whose sum is the hash of an array.

    Args:
        x: The numbers.
        place: The place of each in the flattened array, in 32 bits.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Odd factors, so that a change of one number always changes the sum. Numbers of
    # bfloat16 differ in their upper bits only, which a product moves nowhere: mix them
    # down first.
    mixed = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    mixed = mixed ^ (mixed >> 15)
    return mixed * (2 * place + 1)


def noise_of_hash(
    total: UInt32[Array, ""], shape: Shape, salt: int, step: Array | None
) -> Noise:
    """The noise of an array whose hash is known."""
    seed = zlib.crc32(repr((salt, shape)).encode())
    second = jnp.zeros((), jnp.uint32) if step is None else step.astype(jnp.uint32)
    second = mixed(second + np.uint32(seed))
    return Noise(mixed(total), as_varying(second, varying_axes(total)))


def _as_number(dimension: object) -> Array:
    """A dimension in 32 bits; in an exported program perhaps one of the call."""
    if isinstance(dimension, int):
        return jnp.uint32(dimension & 0xFFFFFFFF)
    return jnp.asarray(dimension).astype(jnp.uint32)


# ----------------------------------------------------------------------------

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
