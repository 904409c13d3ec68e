"""Blocks of an array, their scales, and amaxes over devices.

A block is cut along one axis, or a pair of axes, into pieces of equal length. Axes are
negative, so they keep their meaning when a vmap or a stack of layers adds an axis in
front.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from ..._base.jax_compat import as_varying, varying_axes
from ..._base.typing import Shape
from ._format import Format
from ._rounding import (
    SMALLEST_FLOAT32,
    biased_exponent,
    largest_magnitude,
    power_of_two,
    round_to_format,
)

Axes = tuple[int, ...]


def resolve_axes(
    shape: Shape, axis: int | Sequence[int], block: int, dimensions: int, caller: str
) -> Axes:
    """Returns the axes that blocks are along, negative and ascending.

    Args:
        shape: The shape of the array.
        axis: One axis, or the two of square blocks. One axis for square blocks means
            itself and the last of the others.
        block: The length of a block.
        dimensions: 1, or 2 for square blocks.
        caller: The public call to name in an error.

    Returns:
        As many axes as blocks have dimensions.

    Raises:
        TypeError: An axis is not an integer.
        ValueError: An axis does not exist or does not divide into blocks, or there are
            too few or too many.
    """
    given = [axis] if isinstance(axis, int) else axis
    wrong_kind = not isinstance(given, tuple | list) or not all(
        isinstance(one, int) and not isinstance(one, bool) for one in given
    )
    if wrong_kind:
        raise TypeError(
            f"`axis` of {caller} must be an integer or a pair; got {axis!r}."
        )
    rank = len(shape)
    if rank < dimensions:
        raise ValueError(
            f"{caller} with blocks of {_size(block, dimensions)} needs an array of "
            f"at least {dimensions} axes; got shape {shape}. Reshape it, or use "
            "`mpx.quantization.TensorQuantizer`."
        )
    for one in given:
        if not -rank <= one < rank:
            raise ValueError(
                f"`axis` of {caller} must be an axis of the array; got {axis} for "
                f"shape {shape}."
            )
    axes = {one if one < 0 else one - rank for one in given}
    if len(axes) == 1 and dimensions == 2:
        axes |= {max({-1, -2} - axes)}
    if len(axes) != dimensions:
        raise ValueError(
            f"`axis` of {caller} with blocks of {_size(block, dimensions)} must name "
            f"at most {dimensions} different axes; got {axis!r}."
        )
    for one in sorted(axes):
        if shape[one] % block:
            missing = -shape[one] % block
            raise ValueError(
                f"{caller} needs axes divisible into blocks of "
                f"{_size(block, dimensions)}; got shape {shape}, whose axis {one} "
                f"has length {shape[one]}. Pad that axis with {missing} zeros "
                "(`jnp.pad`), choose another `axis`, or use "
                "`mpx.quantization.TensorQuantizer`."
            )
    return tuple(sorted(axes))


def split(x: Array, axes: Axes, block: int) -> Array:
    """Splits each axis of length n in two, of lengths n / block and block."""
    shape: list[int] = []
    for index, length in enumerate(x.shape):
        shape += [length // block, block] if index - x.ndim in axes else [length]
    return x.reshape(shape)


def inner_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Returns the positions of the axes inside of blocks in the result of `split`."""
    firsts = sorted(axis + rank for axis in axes)
    return tuple(first + 1 + index for index, first in enumerate(firsts))


def block_maximum(
    x: Array, axes: Axes, block: int, largest: Callable[..., Array] = largest_magnitude
) -> Array:
    """Returns each block's largest magnitude; NaN if it has a NaN, 0 if empty.

    A block of length 0 has all numbers along the axis, of which one is left.
    """
    if not block:
        return jnp.expand_dims(largest(x, axes), axes)
    return largest(split(x, axes, block), inner_axes(x.ndim, axes))


def in_blocks(x: Array, axes: Axes, block: int) -> Array:
    """Returns an array with the numbers of each block along its last axis."""
    if block:
        x, inside = split(x, axes, block), inner_axes(x.ndim, axes)
    else:
        inside = axes or tuple(range(x.ndim))
    x = jnp.moveaxis(x, inside, tuple(range(-len(inside), 0)))
    return x.reshape(*x.shape[: x.ndim - len(inside)], -1)


def multiply_blocks(x: Array, factors: Array, axes: Axes, block: int) -> Array:
    """Multiplies each block by its factor, in the shape of `x`."""
    if not block:
        return x * factors
    factors = jnp.expand_dims(factors, inner_axes(x.ndim, axes))
    return (split(x, axes, block) * factors).reshape(x.shape)


def _size(block: int, dimensions: int) -> str:
    return f"{block if dimensions == 2 else 1}x{block}"


# --- Scales: the factors applied before rounding --------------------------------------
#
# `scale` multiplies on the way into low precision, `inverse_scale` on the way out; amax
# is the largest magnitude among the values that share a scale, MAX the largest value of
# the format. All of it is float32 arithmetic and bit shifts, each operation rounded
# once, in a fixed order. Both a scale and its inverse stay normal float32 numbers:
# smaller ones may be flushed to zero, and a division by zero would lose the values.
#
# The scale of an infinite or NaN amax is NaN. E2M1 has neither, so its values could not
# show an overflow: they would saturate, and training would continue with a wrong
# gradient. The amax has seen all values, so no array is read again for this.

LARGEST_SCALE = 2.0**126
# For NVFP4: the inverse is multiplied by the smallest E4M3 number, 2^-9, and inverted.
_LARGEST_NVFP4_SCALE = 2.0**100
_LARGEST_FLOAT32 = 3.4028234663852886e38


def scale_from_amax(
    amax: Float32[Array, "..."],
    largest: float,
    *,
    power_of_two_scales: bool = False,
    limit: float = LARGEST_SCALE,
) -> Float32[Array, "..."]:
    """Returns MAX / amax; NaN for infinity and NaN, 1 for zero and subnormal amaxes.

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
    """Returns the exponent of amax / MAX rounded up, as int32 with a bias of 127.

    The quotient exceeds the power of two of the exponents' difference exactly if the
    mantissa of amax exceeds that of MAX: without a division, there is no rounding.

    Args:
        amax: The largest magnitudes.
        format: The format, which has MAX.

    Returns:
        Codes from 1 to 253, whose inverses are normal numbers too; 1 for zero. 255 for
        infinity and NaN, which is NaN in E8M0.
    """
    mantissa = lax.bitcast_convert_type(amax, jnp.uint32) & 0x7FFFFF
    largest = int(np.float32(format.largest).view(np.int32))
    above = (mantissa > (largest & 0x7FFFFF)).astype(jnp.int32)
    code = biased_exponent(amax) - ((largest >> 23) - 127) + above
    return jnp.where(amax < jnp.inf, jnp.clip(code, 1, 253), 255)


def e8m0_from_code(code: Array) -> Array:
    """Returns the array of `float8_e8m0fnu` with these codes."""
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)


def float32_from_e8m0(scales: Array) -> Array:
    """Converts E8M0 numbers, which are powers of two, to float32 exactly."""
    code = lax.bitcast_convert_type(scales, jnp.uint8)
    return jnp.where(code == 255, jnp.nan, power_of_two(code))


def e8m0_scale(code: Array) -> Float32[Array, "..."]:
    """Returns the scale of a code: the inverse of its E8M0 number."""
    return jnp.where(code == 255, jnp.nan, power_of_two(254 - jnp.minimum(code, 253)))


def nvfp4_tensor_scale(
    amax: Float32[Array, ""], format: Format = Format.E2M1, largest_scale: float = 448.0
) -> Float32[Array, ""]:
    """Returns the scale that makes the largest block scale 448: 448 * 6 / amax."""
    largest = largest_scale * format.largest
    return scale_from_amax(amax, largest, limit=_LARGEST_NVFP4_SCALE)


def nvfp4_block_inverse_scale(
    block_amax: Float32[Array, "..."],
    tensor_scale: Float32[Array, ""],
    format: Format = Format.E2M1,
) -> Float32[Array, "..."]:
    """Returns the inverse scales of blocks: E4M3 numbers, in units of the tensor's.

    In the order of Transformer Engine, without a division by 6: under `jax.jit` XLA
    turns it into a multiplication by the rounded 1/6 (jax 0.10.2, November 2026), and
    codes would differ from those of eager operations.
    """
    wanted = block_amax * (tensor_scale * np.float32(1 / format.largest))
    return round_to_format(wanted, Format.E4M3)


def nvfp4_scale(
    block_inverse_scale: Float32[Array, "..."], tensor_inverse_scale: Array
) -> Float32[Array, "..."]:
    """Returns the factor of a block's values; finite even if its inverse scale is 0."""
    inverse = block_inverse_scale * tensor_inverse_scale
    return jnp.minimum(1 / inverse, _LARGEST_FLOAT32)


# --- Amaxes of arrays that are sharded, or under `jax.vmap` ---------------------------
#
# The scale of a whole tensor must be the same on all devices that have a shard of it.
# Under `jax.jit` over a mesh it is, because all run one program. Under `shard_map` the
# program sees only a shard, so the maximum must be taken over all of them.

Join = Callable[[Array], Array]


def alone(amax: Array) -> Array:
    """Returns the amax unchanged: the array is not sharded."""
    return amax


def joined_over(axes: tuple[str, ...], all_vary: bool) -> Join:
    """Returns a function that takes the maximum of an amax over axes of `shard_map`.

    Args:
        axes: The axes.
        all_vary: Take it over all axes. Otherwise only over those on which the amax
            varies by its JAX type, if types have this (`check_vma=True`).
    """
    if not axes:
        return alone

    def join(amax: Array) -> Array:
        is_known = bool(varying_axes(lax.axis_index(axes[0])))
        found = varying_axes(amax) if is_known and not all_vary else axes
        names = tuple(axis for axis in axes if axis in found)
        if not names:
            return amax
        # On the bits, as in `largest_magnitude`: a maximum of floats may lose a NaN.
        bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), names)
        return lax.bitcast_convert_type(bits, jnp.float32)

    return join


def as_cotangent(amaxes: Array, scales: Array, summed_axes: tuple[str, ...]) -> Array:
    """Returns amaxes in the form of a cotangent of the scales.

    Args:
        amaxes: The amaxes, equal on all devices.
        scales: The scales.
        summed_axes: The axes of `shard_map(check_vma=False)`, over which JAX sums
            cotangents: only one device contributes, so the sum is the amax.
    """
    for axis in summed_axes:
        amaxes = jnp.where(lax.axis_index(axis) == 0, amaxes, 0.0)
    return as_varying(amaxes, varying_axes(scales))


@jax.custom_batching.custom_vmap
def refuse_batching(amax: Array, scales: Array) -> Array:
    """Returns the amax; raises if a vmap batches it but not the scales."""
    return amax


@refuse_batching.def_vmap
def _refuse_batching_rule(
    axis_size: int, in_batched: Sequence[bool], amax: Array, scales: Array
) -> tuple[Array, bool]:
    if in_batched[0] and not in_batched[1]:
        raise ValueError(
            f"Delayed scaling inside `jax.vmap` would sum the amaxes of {axis_size} "
            "examples instead of taking their maximum. Put `mpx.autocast` outside "
            "vmap: `mpx.autocast(jax.vmap(f))`, not `jax.vmap(mpx.autocast(f))`. "
            "For separate models, as over seeds, make a state for each in a vmap "
            "that returns it: `states = jax.vmap(init)(seeds)`, with "
            "`mpx.init_scaling` in `init`, then `jax.vmap(step)(*states)`."
        )
    return refuse_batching(amax, scales), in_batched[0]
