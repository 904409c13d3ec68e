"""Scales: what numbers are multiplied by before they are rounded.

`scale` multiplies on the way into low precision, `inverse_scale` on the way out; amax
is the largest magnitude of what shares a scale, MAX the largest number of the format.
All of it is float32 arithmetic and bit shifts, each operation rounded once, in a fixed
order. Both a scale and its inverse stay normal float32 numbers: what is below
may be flushed to zero, and a division by it would be lost.

The scale of an amax that is not finite is NaN. E2M1 has neither infinity nor NaN, so
its numbers could not show an overflow: it would saturate, and training would go on with
a wrong gradient. The amax has seen all numbers, so nothing is read again for it.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from ._format import Format
from ._rounding import (
    SMALLEST_FLOAT32,
    biased_exponent,
    power_of_two,
    round_to_format,
)

LARGEST_SCALE = 2.0**126
# Of NVFP4: the inverse is multiplied by the smallest E4M3 number, 2^-9, and inverted.
_LARGEST_NVFP4_SCALE = 2.0**100
_LARGEST_FLOAT32 = 3.4028234663852886e38


def scale_from_amax(
    amax: Float32[Array, "..."],
    largest: float,
    *,
    power_of_two_scales: bool = False,
    limit: float = LARGEST_SCALE,
) -> Float32[Array, "..."]:
    """MAX / amax; NaN of an infinity or a NaN, 1 of zero (or what is subnormal).

    Args:
        amax: The largest magnitudes.
        largest: MAX.
        power_of_two_scales: Round down to a power of two, by zeroing the mantissa.
        limit: The largest scale.

    Returns:
        Scales between 2^-126 and the limit, or NaN.
    """
    usable = (amax >= SMALLEST_FLOAT32) & (amax < jnp.inf)
    scale = largest / jnp.where(usable, amax, 1.0)
    scale = jnp.clip(scale, SMALLEST_FLOAT32, limit)
    if power_of_two_scales:
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        scale = lax.bitcast_convert_type((bits >> 23) << 23, jnp.float32)
    scale = jnp.where(usable, scale, 1.0)
    return jnp.where(amax < jnp.inf, scale, jnp.nan)


def e8m0_code(amax: Float32[Array, "..."], format: Format) -> Array:
    """The exponent of amax / MAX rounded up, as int32 with a bias of 127.

    MAX is 1.75 times a power of two in E4M3 and in E5M2. So the quotient is above the
    power of two of its exponents exactly where the mantissa of amax is above 1.75: no
    division is needed, and none can round.

    Args:
        amax: The largest magnitudes.
        format: E4M3 or E5M2.

    Returns:
        Codes from 1 to 253, whose inverses are normal numbers too; zero has 1. Infinity
        and NaN have 255, which is NaN in E8M0.
    """
    mantissa = lax.bitcast_convert_type(amax, jnp.uint32) & 0x7FFFFF
    largest_exponent = {Format.E4M3: 8, Format.E5M2: 15}[format]
    above = (mantissa > 0x600000).astype(jnp.int32)
    code = biased_exponent(amax) - largest_exponent + above
    return jnp.where(amax < jnp.inf, jnp.clip(code, 1, 253), 255)


def e8m0_from_code(code: Array) -> Array:
    """The array of `float8_e8m0fnu` with these codes."""
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)


def float32_from_e8m0(scales: Array) -> Array:
    """The powers of two that E8M0 numbers are, in float32, exactly."""
    code = lax.bitcast_convert_type(scales, jnp.uint8)
    return jnp.where(code == 255, jnp.nan, power_of_two(code))


def e8m0_scale(code: Array) -> Float32[Array, "..."]:
    """What to multiply by: the inverse of the E8M0 number with this code."""
    return jnp.where(code == 255, jnp.nan, power_of_two(254 - jnp.minimum(code, 253)))


def nvfp4_tensor_scale(amax: Float32[Array, ""]) -> Float32[Array, ""]:
    """The scale that brings the largest block scale to 448: 448 * 6 / amax."""
    largest = Format.E4M3.largest * Format.E2M1.largest
    return scale_from_amax(amax, largest, limit=_LARGEST_NVFP4_SCALE)


def nvfp4_block_inverse_scale(
    block_amax: Float32[Array, "..."], tensor_scale: Float32[Array, ""]
) -> Float32[Array, "..."]:
    """The inverse scales of blocks: numbers of E4M3, in units of the tensor's.

    In the order of Transformer Engine, without a division by 6: XLA makes a product
    with the rounded 1/6 of one under `jax.jit` (jax 0.10.2, November 2026), and codes
    would be others than those of the same operations one by one.
    """
    wanted = block_amax * (tensor_scale * np.float32(1 / Format.E2M1.largest))
    return round_to_format(wanted, Format.E4M3)


def nvfp4_scale(
    block_inverse_scale: Float32[Array, "..."], tensor_inverse_scale: Array
) -> Float32[Array, "..."]:
    """What to multiply the numbers of a block by; finite also where a scale is 0."""
    inverse = block_inverse_scale * tensor_inverse_scale
    return jnp.minimum(1 / inverse, _LARGEST_FLOAT32)
