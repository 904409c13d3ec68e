"""E2M1 numbers as codes of 4 bits, two in a byte.

JAX has a dtype for them (`float4_e2m1fn`) that takes a whole byte for each number on
the CPU and that few operations know. So they are kept in uint8: of two neighbours along
the packed axis the first is in the low half, as `jax.lax.bitcast_convert_type` has it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt8


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
