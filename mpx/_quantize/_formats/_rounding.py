"""Rounds float32 to a format, on the float32 grid; noise and packing of 4-bit codes.

Rounding is arithmetic, not a cast: a value is divided by the distance of two neighbours
of the format (a power of two, from the exponent bits), rounded to an integer, and
multiplied back. Every step is exact, so every device gets the correct result, and the
cast that follows changes nothing. This matters for two reasons: XLA may remove a pair
of casts (float32 to float8 and back) inside `jax.jit`, and some compilers cast from
float32 to float8 through float16, which rounds twice.
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

# --- E2M1 numbers as codes of 4 bits, two in a byte -----------------------------------
#
# JAX's dtype for them (`float4_e2m1fn`) takes a whole byte per number on the CPU, and
# few operations support it. So they are stored in uint8: of two neighbours along the
# packed axis the first is in the low half, as in `jax.lax.bitcast_convert_type`.


def pack(x: Float32[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Packs the codes of E2M1 numbers, two in a byte.

    Args:
        x: Values that E2M1 represents. A NaN, which it does not, becomes 0.
        axis: The axis to pack, of even length, negative.

    Returns:
        Bytes, half as many along the axis.
    """
    codes = jnp.moveaxis(encode(x), axis, -1)
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return jnp.moveaxis(pairs[..., 0] | (pairs[..., 1] << 4), -1, axis)


def unpack(packed: UInt8[Array, "..."], axis: int) -> Float32[Array, "..."]:
    """Returns the float32 values of packed codes; the inverse of `pack`."""
    packed = jnp.moveaxis(packed, axis, -1)
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1)
    codes = codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    return jnp.moveaxis(_decode(codes), -1, axis)


def encode(x: Float32[Array, "..."]) -> UInt8[Array, "..."]:
    """Returns the codes of E2M1 numbers, one per byte; 0 for NaN."""
    magnitude = jnp.where(jnp.isnan(x), 0.0, jnp.abs(x))
    # The bits of a float32 from 1 up contain the code: exponent and first mantissa bit.
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


# --- The noise of stochastic rounding, from the rounded values and the step -----------
#
# A backward pass has no PRNG key, and a key in the training state would have to be
# split at every product. So the noise is keyed by a hash of the gradient and by the
# number of the training step. Within a step, equal gradients are rounded alike, in a
# rematerialized pass too, and different gradients differently; the next step draws
# again, so the rounding errors of a constant gradient average out. The hash is a sum of
# integers, which is independent of the order of summation: a sharded array has the hash
# of the whole.
#
# The draw for a value is a hash of its position: 18 integer operations. Threefry's 20
# rounds are more than 100, and a kernel that rounds an array to 4 bits would run them
# for every two bytes that it reads. The gain has not been measured on a GPU.


class Noise(eqx.Module):
    """The seed of draws: 64 bits, in two halves.

    Attributes:
        first: From the rounded values.
        second: From the step.
    """

    first: UInt32[Array, ""]
    second: UInt32[Array, ""]

    @property
    def halves(self) -> UInt32[Array, "2"]:
        """Both halves, for a kernel."""
        return jnp.stack([self.first, self.second])

    def uniform(self, shape: Shape) -> Float32[Array, "..."]:
        """Draws from [0, 1) for each element of an array, with 23 bits."""
        return uniform(self.first, self.second, places(shape))


# A PRNG key of JAX, which a user passes, or noise.
Key: TypeAlias = Array | Noise


def uniform(first: Array, second: Array, place: Array) -> Array:
    """Returns the draws of noise at these positions; see `Noise`."""
    bits = mixed(mixed(place ^ first) + second)
    one_to_two = (bits >> 9) | np.uint32(0x3F800000)
    return lax.bitcast_convert_type(one_to_two, jnp.float32) - 1.0


def mixed(x: Array) -> Array:
    """Permutes the 32-bit integers without a visible order.

    Changing one bit of `x` changes each bit of the result in half of the cases.

    Source: Chris Wellons, Prospecting for Hash Functions (2018), `lowbias32`.
    """
    x = lax.mul(_folded(x, 16), np.uint32(0x7FEB352D))
    x = lax.mul(_folded(x, 15), np.uint32(0x846CA68B))
    return _folded(x, 16)


def _folded(x: Array, shift: int) -> Array:
    """Returns x ^ (x >> shift); by `lax`: its operations are traced faster."""
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift)))


def noise_from(x: Float32[Array, "..."], salt: int, step: Array | None = None) -> Noise:
    """Returns the noise that the values, their positions and the step determine.

    Args:
        x: The values.
        salt: A constant, so that two copies of the same values get different noise.
        step: The number of the step, an integer; None if unknown.
    """
    total = jnp.sum(hashed(x, places(x.shape)), dtype=jnp.uint32)
    return noise_of_hash(total, x.shape, salt, step)


def places(shape: Shape) -> Array:
    """Returns each element's position in the flattened array, in 32 bits."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * _as_number(length) + index
    return place


def hashed(x: Float32[Array, "..."], place: Array) -> Array:
    """Returns integers whose sum is the hash of an array.

    Args:
        x: The values.
        place: The position of each in the flattened array, in 32 bits.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Odd factors, so that changing one value always changes the sum. bfloat16 values
    # differ only in their upper bits, which a multiplication leaves there: mix them
    # down first.
    mixed = _folded(lax.mul(_folded(bits, 16), np.uint32(0x7FEB352D)), 15)
    return mixed * (2 * place + 1)


def noise_of_hash(
    total: UInt32[Array, ""], shape: Shape, salt: int, step: Array | None
) -> Noise:
    """Returns the noise of an array with this hash."""
    seed = zlib.crc32(repr((salt, shape)).encode())
    second = jnp.zeros((), jnp.uint32) if step is None else step.astype(jnp.uint32)
    second = mixed(second + np.uint32(seed))
    return Noise(mixed(total), as_varying(second, varying_axes(total)))


def _as_number(dimension: object) -> Array:
    """Converts a dimension, symbolic in an exported program, to 32 bits."""
    if isinstance(dimension, int):
        return jnp.uint32(dimension & 0xFFFFFFFF)
    return jnp.asarray(dimension).astype(jnp.uint32)


# --- Rounding -------------------------------------------------------------------------

# Below the smallest normal float32 devices differ: some flush to zero, others do not.
SMALLEST_FLOAT32 = 2.0**-126
_SIGN, _MANTISSA = np.uint32(2**31), np.uint32(23)


def power_of_two(biased_exponent: Array) -> Array:
    """Returns the float32 number 2^(e - 127) for integers 1 <= e <= 254, by its bits.

    Not `exp2`: XLA's on the CPU is not exact.
    """
    bits = lax.shift_left(
        lax.convert_element_type(biased_exponent, jnp.uint32), _MANTISSA
    )
    return lax.bitcast_convert_type(bits, jnp.float32)


def biased_exponent(x: Array) -> Array:
    """Returns the 8 exponent bits of float32 values, as int32; 0 for subnormals."""
    bits = lax.shift_right_logical(lax.bitcast_convert_type(x, jnp.uint32), _MANTISSA)
    return lax.convert_element_type(lax.bitwise_and(bits, np.uint32(255)), jnp.int32)


def flushed(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Replaces subnormal float32 values by zeros of their sign."""
    is_subnormal = lax.lt(lax.abs(x), np.float32(SMALLEST_FLOAT32))
    return lax.select(is_subnormal, lax.mul(x, np.float32(0)), x)


def largest_magnitude(
    x: Float32[Array, "..."],
    axis: tuple[int, ...] | None = None,
    *,
    only_finite: bool = False,
) -> Array:
    """Returns the maximum of |x|; NaN if there is a NaN, 0 if empty.

    Computed on the bits, whose order as integers is that of the magnitudes, with
    infinity and then NaN on top. XLA's maximum of floats loses NaNs on the CPU.

    Args:
        x: The values.
        axis: The axes to reduce; None for all.
        only_finite: Leave out infinities and NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    if only_finite:
        bits = jnp.where(bits < 0x7F800000, bits, 0)
    bits = jnp.max(bits, axis=axis, initial=0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def round_to_format(
    x: Float32[Array, "..."], format: Format, key: Key | None = None
) -> Float32[Array, "..."]:
    """Rounds to the nearest values of a format, ties to even; or to random neighbours.

    Args:
        x: Values in float32.
        format: Any format except `HYBRID`.
        key: A PRNG key, or noise, for stochastic rounding: chooses the upper of the two
            neighbours with the probability (x - lower) / (upper - lower).

    Returns:
        Float32 values of the format. Values beyond its largest, infinities too, become
        the largest; NaN stays NaN; zeros keep their sign. An infinity here is a finite
        value times a scale; see `_quantizers/_kinds.py`.
    """
    rounded = round_finite(x, format, to_integers(key))
    return lax.select(lax.ne(x, x), lax.full_like(x, jnp.nan), rounded)


def to_integers(key: Key | None = None) -> Callable[[Array], Array]:
    """Returns a function that rounds to integers: ties to even; randomly with a key."""
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
    """Rounds up with a probability equal to the fraction, else down.

    Not floor(steps + draws): that sum would round 15 + 0.9999999 up to 16.
    """
    return lower + (draws < steps - lower).astype(jnp.float32)


def to_int8(x: Float32[Array, "..."], key: Key | None = None) -> Array:
    """Rounds to integers from -127 to 127, in int8; NaN, which it lacks, becomes 0."""
    rounded = round_finite(x, Format.INT8, to_integers(key))
    return lax.select(lax.eq(x, x), rounded, lax.full_like(x, 0)).astype(jnp.int8)


def round_finite(
    x: Array, format: Format, to_integers: Callable[[Array], Array]
) -> Array:
    """Rounds like `round_to_format`, but does not handle NaN.

    Args:
        x: Values in float32.
        format: Any format except `HYBRID`.
        to_integers: Rounds values to integers.
    """
    if format is Format.INT8:
        return to_integers(lax.clamp(np.float32(-127), x, np.float32(127)))
    info = format._info
    # Operations of `lax`: a trace takes four times as long with those of `jnp`.
    largest, smallest = np.float32(format.largest), np.int32(127 + info.minexp)
    magnitude = lax.min(lax.abs(x), largest)
    # The distance of neighbours is constant below the smallest normal number.
    exponent, nmant = lax.max(biased_exponent(magnitude), smallest), info.nmant
    distance = power_of_two(lax.sub(exponent, np.int32(nmant)))
    inverse = power_of_two(lax.sub(np.int32(254 + nmant), exponent))
    steps = lax.mul(magnitude, inverse)
    rounded = lax.mul(to_integers(steps), distance)
    sign = lax.bitwise_and(lax.bitcast_convert_type(x, jnp.uint32), _SIGN)
    bits = lax.bitwise_or(lax.bitcast_convert_type(rounded, jnp.uint32), sign)
    return lax.bitcast_convert_type(bits, jnp.float32)
