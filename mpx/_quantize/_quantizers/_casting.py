"""Quantizes by the device's own cast, if that is known to round correctly, or a kernel.

`round_to_format` rounds by arithmetic, the same on every device. On CUDA with FP8 units
the cast gives the same result, with less memory traffic: it rounds a float32 number
once, to nearest, ties to even (PTX `cvt.rn.satfinite.e4m3x2.f32`), and a maximum keeps
NaN (`max.NaN.f32`; jax 0.10.2, CUDA 12.9, compiled for sm_90, November 2026).

So an array is scaled, clipped and cast there, without masks: if two layouts of an array
are needed, XLA writes each mask to memory for the transposed one. Without the masks a
weight of 16384 x 4096 moves 671 MB instead of 1,610 on its way to FP8. Arithmetic
replaces them: x * 0 is added, which is zero, or NaN if x is infinite or NaN. So no
operation waits for an amax that is not used for a scale: the amax of delayed scaling's
weights is fused into the optimizer's kernel, which reads them anyway.

One result differs from rounding by arithmetic, which all other devices use: values
below 2^-126 are not flushed to zero if a scale brings them into range.
"""

import abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from ..._base.typing import Shape
from .._formats._arithmetic import Arithmetic, arithmetic_of
from .._formats._blocks import Axes, Join, split
from .._formats._format import Format
from .._formats._hadamard import BLOCK, rotation
from .._formats._rounding import Key, flushed, round_finite, to_integers
from .._formats._target import Target, on_target
from ._array import QuantizedArray
from ._kinds import Quantizer

_INFINITY, _SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)


def is_cast(quantizer: Quantizer, target: Target) -> bool:
    """Returns whether a device casts where this quantizer rounds."""
    if target.is_met is False:
        return False
    if quantizer.format.bits == 4:
        return target.has_block_units
    return target.rounds_to_fp8 and not quantizer.stochastic_rounding


def amax_of(target: Target, x: Array, axes: Axes | None = None) -> Array:
    """Returns the maximum of |x| in float32; NaN if there is a NaN, 0 if empty.

    Args:
        target: The device.
        x: The values; those subnormal in float32 count as zero.
        axes: The axes to reduce; all if omitted.
    """
    if target.rounds_to_fp8:
        return on_target(target, _amax, x, axes=axes)
    return _amax(target, x, axes)


def _amax(target: Target, x: Array, axes: Axes | None) -> Array:
    return flushed(_largest(target, x, axes))


def _largest(target: Target, x: Array, axes: Axes | None) -> Array:
    is_exact = not target.rounds_to_fp8 or target.is_met is False
    by = arithmetic_of(target) if is_exact else CAST
    return by.largest(x.astype(jnp.float32), axes)


# So many parts at least, for GPUs with as many units; and the longest part of which XLA
# takes the maximum in one kernel (jax 0.10.2, November 2026).
_PARTS, _LONGEST = 1024, 16384


def amax_in_parts(
    target: Target, x: Array, count: int, by_columns: bool = False
) -> Float32[Array, " parts"]:
    """Returns maxima of parts of |x|, whose maximum, flushed, is the amax.

    They are `count` or fewer.

    Args:
        target: The device.
        x: The values.
        count: The most parts.
        by_columns: Whether parts are of columns (the last axis) and not of rows: for
            a matrix that is read transposed.
    """
    return on_target(target, _in_parts, x, length=count, by_columns=by_columns)


def _in_parts(target: Target, x: Array, length: int, by_columns: bool) -> Array:
    columns = x.shape[-1] if by_columns else x.size
    parts = columns if columns <= length else math.gcd(columns, length)
    while parts > _PARTS and parts % 2 == 0 and 2 * x.size <= _LONGEST * parts:
        parts //= 2
    if parts < 64:
        return _amax(target, x, None)[None]
    if by_columns:
        amaxes = _largest(target, x.reshape(-1, parts, columns // parts), (0, 2))
    else:
        amaxes = _largest(target, x.reshape(parts, -1), (1,))
    # Without a barrier XLA may reduce the whole array only where amaxes are joined.
    return lax.optimization_barrier(amaxes)


def beside_amax(
    target: Target, copy: Any, amax: Array | None, *, is_gradient: bool
) -> tuple[Any, Any]:
    """Makes one kernel both cast an array to FP8 and take its amax.

    FP8 matmuls on Hopper need the contracted axis of both operands last, so one of the
    two matmuls of an array reads it transposed. XLA fuses the transpose with the cast,
    and does not fuse a maximum into such a kernel: the amax would be a separate pass,
    over 16-bit values. After a barrier XLA transposes the 8-bit values instead. A step
    of two layers of 4096 x 16384 moves 1.2 of 19.9 GB less. Blackwell needs no
    transpose, and XLA would write the cast array (jax 0.10.2, compiled for sm_90 and
    sm_100, November 2026).

    A whole amax stays before the barrier. After it, every use of the values would wait
    for the amax, and devices could not join all amaxes of a step at once. Those of
    parts are behind it: otherwise XLA reduces gradients of several layers in one kernel
    if they share an operand, such as rotary positions, and keeps all until then (0.3 of
    the 8.8 GB of a Llama of 8 layers).

    Args:
        target: The device.
        copy: The quantized array.
        amax: The amax of the array, if no other operation needs it first.
        is_gradient: Whether it is one. The scale of data is behind the barrier: in a
            Llama that slices stacked weights XLA would multiply results by it, in
            kernels of their own, 5.6 of 77.9 GB.

    Returns:
        The quantized array and the amax, unchanged in value.
    """
    if amax is None or not (amax.ndim or target.transposes_fp8):
        return copy, amax
    if not is_gradient:
        return lax.optimization_barrier(copy), amax
    if not amax.ndim:
        payload = lax.optimization_barrier(copy.payload)
    else:
        payload, amax = lax.optimization_barrier((copy.payload, amax))
    return dataclasses.replace(copy, payload=payload), amax


class _Cast(Arithmetic):
    """Arithmetic of a device that casts correctly: no masks, some barriers."""

    def largest(self, x: Array, axis: tuple[int, ...] | None = None) -> Array:
        # An initial value is compared with after the kernel that reduces the array.
        initial = 0 if 0 in x.shape else None
        return jnp.max(jnp.abs(x), axis=axis, initial=initial)

    def largest_finite(self, x: Array) -> Array:
        return self.largest(x)

    def scaled(self, x: Array, scale: Array) -> Array:
        # 0 * inf is NaN; XLA and LLVM do not simplify it without fast-math flags.
        return x * scale + x * 0.0

    def to_format(self, x: Array, format: Format, key: Key | None) -> Array:
        # NaN stays NaN. A cast alone would turn values too large for E4M3 into NaN.
        return jnp.clip(x, -format.largest, format.largest).astype(format.dtype)

    def to_four_bits(self, x: Array, axis: int, key: Key | None) -> Array:
        # The dtype already packs two codes in a byte, so no computation is needed. In
        # `pack`, XLA makes one slice of the array after the other.
        numbers = jnp.moveaxis(_to_e2m1(x, key), axis, -1)
        pairs = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // 2, 2)
        return jnp.moveaxis(lax.bitcast_convert_type(pairs, jnp.uint8), -1, axis)

    def rotated(
        self, x: Array, axis: int, signs: tuple[int, ...] | None, dtype: np.dtype
    ) -> Array:
        """Transforms by one sum; in bfloat16 if `dtype` is bfloat16."""
        blocks = split(x, (axis,), BLOCK)
        inner = blocks.ndim + axis  # the axis within a block
        matrix = rotation(signs)
        # [..., 16, 16, ...]: one axis is summed, the other one takes its place.
        matrix = matrix.reshape((1,) * inner + matrix.shape + (1,) * (-1 - axis))
        y = jnp.sum(jnp.expand_dims(blocks, inner + 1) * matrix, axis=inner)
        y = y.reshape(x.shape)
        if dtype == jnp.bfloat16:
            y = y.astype(dtype)
        return lax.optimization_barrier(y).astype(jnp.float32)

    def written(self, x: Array) -> Array:
        return lax.optimization_barrier(x)


class _CastOfWeight(_Cast):
    """The same for weights, but reads them only once to scale them.

    If a weight is read twice, XLA writes a transposed float32 copy of it: 2.3 of 80 GB
    in a Llama of 542 M. Data is read only once anyway; but XLA does not fuse bit
    operations into the kernel of a norm, and would write float32 (jax 0.10.2, compiled
    for sm_90, November 2026).
    """

    def scaled(self, x: Array, scale: Array) -> Array:
        """Scales by the bits of x.

        Less the bits of +infinity (mod 2^32), +infinity is 0, and a maximum with 1
        makes it a NaN; it changes no other bits. Then the same for -infinity.
        """
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        bits = jnp.maximum(bits - _INFINITY, 1)  # +infinity is 0 here
        bits = jnp.maximum(bits - _SIGN, 1)  # -infinity is
        bits = bits + (_INFINITY + _SIGN)
        return lax.bitcast_convert_type(bits, jnp.float32) * scale


CAST, CAST_OF_WEIGHT = _Cast(), _CastOfWeight()


def _to_e2m1(x: Array, key: Key | None) -> Array:
    # By arithmetic: XLA casts through float16, and rounds twice (jax 0.10.2, November
    # 2026). NaN is in the scales: see `Quantizer`.
    return round_finite(x, Format.E2M1, to_integers(key)).astype(jnp.float4_e2m1fn)


# --- Kernels: both copies of an operand at once ---------------------------------------
#
# Only the interface is here. A recipe has a kernel as an object
# (`mpx.contrib.PallasKernel()`), and mpx does not import its implementation.


class AbstractKernel(abc.ABC):
    """Quantizes an operand of a linear layer for both of its products.

    Part of a recipe: hashable, and compared by value.
    """

    @abc.abstractmethod
    def takes(self, shape: Shape) -> bool:
        """Returns whether the kernel supports arrays of this shape."""

    @abc.abstractmethod
    def quantize(
        self,
        x: Array,
        quantizers: tuple[Quantizer, Quantizer],
        dtype: np.dtype,
        axes: tuple[int, int],
        join: Join,
        *,
        step: Array | None = None,
        rounded_to: np.dtype | None = None,
    ) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns both copies, equal to those of the quantizers.

        Square blocks of 4 bits are packed along the axis of their copy.

        Args:
            x: Floating matrices, of a supported shape.
            quantizers: Those of the first copy and of the second. If one has square
                blocks, both are the same.
            dtype: The dtype of the result of `dequantize`.
            axes: The axes of the blocks of the first copy and of the second: -1 and -2
                in any order.
            join: Makes the amax of the whole array from that of `x`.
            step: The number of the training step, from which noise is drawn; None if
                unknown.
            rounded_to: A dtype that the values are rounded to first.
        """
