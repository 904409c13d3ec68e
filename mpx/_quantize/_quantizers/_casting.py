"""One scale for an array, and the device's own cast where that is known to round right.

`round_to_format` rounds by arithmetic, the same on every device. On CUDA with FP8 units
the cast does as well, and moves fewer bytes: it rounds a float32 number once, to the
nearest, ties to even (PTX `cvt.rn.satfinite.e4m3x2.f32`), and a maximum keeps NaN
(`max.NaN.f32`; jax 0.10.2, CUDA 12.9, compiled for sm_90, November 2026).

So an array is scaled, clipped and cast there, and nothing in it is masked: where two
layouts of an array are wanted, XLA writes each mask out for the transposed one. Without
the masks a weight of 16384 x 4096 moves 671 MB instead of 1,610 on its way to FP8. What
they are for, arithmetic does: x * 0 is added, which is zero, or NaN of an infinity and
of a NaN. So nothing waits for an amax that no scale is made of: that of delayed
scaling's weights joins the optimizer's kernel, which reads them anyway.

One thing differs from rounding by arithmetic, which all other devices keep: numbers
below 2^-126 are not flushed to zero, where a scale brings them into range.
"""

import functools
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from .._formats._arithmetic import EXACT, Arithmetic, arithmetic_of
from .._formats._blocks import Axes, split
from .._formats._format import Format
from .._formats._hadamard import BLOCK, rotation
from .._formats._rounding import Key, flushed, round_finite, to_integers
from .._formats._target import Target
from ._array import QuantizedArray
from ._kinds import AbstractQuantizer, Asked, NVFP4Quantizer

Copy = TypeVar("Copy")

_INFINITY, _SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)


def is_cast(quantizer: AbstractQuantizer, target: Target) -> bool:
    """Whether a device casts what this quantizer rounds."""
    if isinstance(quantizer, NVFP4Quantizer):
        return target.has_block_units
    return target.rounds_to_fp8 and not quantizer.stochastic_rounding


def amax_of(target: Target, x: Array, axes: Axes | None = None) -> Array:
    """The maximum of |x| in float32; NaN where there is a NaN, 0 of nothing.

    Args:
        target: The device.
        x: The numbers; what is subnormal in float32 counts as zero.
        axes: Those to take the maximum over; all if left out.
    """
    x = x.astype(jnp.float32)
    exact = functools.partial(arithmetic_of(target).largest, axis=axes)
    if not target.rounds_to_fp8:
        return flushed(exact(x))
    here = functools.partial(CAST.largest, axis=axes)
    branches = {target.platform: here}
    return flushed(lax.platform_dependent(x, **branches, default=exact))


def quantize_by_cast(
    quantizer: AbstractQuantizer, target: Target, x: Float32[Array, "..."], to: Asked
) -> QuantizedArray:
    """Quantizes an array on a device that casts; by arithmetic where it runs elsewhere.

    Args:
        quantizer: How, with which scales.
        target: The device.
        x: The numbers.
        to: What is asked of the quantizer, by `CAST` or `CAST_OF_WEIGHT`.
    """

    def here(x: Array, key: Key | None, scale: Array | None) -> QuantizedArray:
        return quantizer._quantize(x, to._replace(key=key, scale=scale))

    def elsewhere(x: Array, key: Key | None, scale: Array | None) -> QuantizedArray:
        exact = to._replace(key=key, scale=scale, by=EXACT)
        return quantizer._quantize(flushed(x), exact)

    branches = {target.platform: here}
    return lax.platform_dependent(x, to.key, to.scale, **branches, default=elsewhere)


def beside_amax(target: Target, copy: Copy, amax: Array | None) -> Copy:
    """FP8 numbers that are made by the kernel that takes their amax.

    Products in FP8 on Hopper want the contracted axis of both operands last, so one of
    the two products of an array has it transposed. XLA fuses the transpose with the
    cast, and takes no maximum into such a kernel: the amax is a pass of its own, over
    numbers of 16 bits. Behind a barrier it transposes those of 8. A step of two layers
    of 4096 x 16384 moves 1.2 of 19.9 GB less. On Blackwell nothing is transposed, and
    XLA would write what is cast (jax 0.10.2, compiled for sm_90 and sm_100, November
    2026).

    The amax stays in front of the barrier. Behind it, whatever uses the numbers would
    wait for it, and devices could not join all amaxes of a step at once.

    Args:
        target: The device.
        copy: What an array became.
        amax: The amax of the array, if nothing else needs it first.

    Returns:
        The numbers as they came.
    """
    if amax is None or not target.transposes_fp8:
        return copy
    return lax.optimization_barrier(copy)


class _Cast(Arithmetic):
    """What a device does that casts right: no masks, and barriers where they pay."""

    def largest(self, x: Array, axis: tuple[int, ...] | None = None) -> Array:
        return jnp.max(jnp.abs(x), axis=axis, initial=0)

    def largest_finite(self, x: Array) -> Array:
        return self.largest(x)

    def scaled(self, x: Array, scale: Array) -> Array:
        # 0 * inf is NaN, which neither XLA nor LLVM simplify without flags for fast
        # math.
        return x * scale + x * 0.0

    def to_format(self, x: Array, format: Format, key: Key | None) -> Array:
        # A NaN stays one. A cast alone would make NaN of what is too large for E4M3.
        return jnp.clip(x, -format.largest, format.largest).astype(format.dtype)

    def to_four_bits(self, x: Array, axis: int, key: Key | None) -> Array:
        # Where two codes lie in a byte already, nothing is computed: unlike in `pack`,
        # whose slices XLA makes of one array after the other.
        numbers = jnp.moveaxis(_to_e2m1(x, key), axis, -1)
        pairs = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // 2, 2)
        return jnp.moveaxis(lax.bitcast_convert_type(pairs, jnp.uint8), -1, axis)

    def rotated(
        self, x: Array, axis: int, signs: tuple[int, ...] | None, dtype: np.dtype
    ) -> Array:
        """By one sum, in bfloat16 if that is what it is of."""
        blocks = split(x, (axis,), BLOCK)
        inner = blocks.ndim + axis  # where a block's numbers lie
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
    """The same for weights, whose scaling reads them once.

    Where a weight is read twice, XLA writes a transposed float32 copy of it: 2.3 of 80
    GB in a Llama of 542 M. Data it reads once all the same; but a kernel that computes
    a norm takes no bits, and would write float32 (jax 0.10.2, compiled for sm_90,
    November 2026).
    """

    def scaled(self, x: Array, scale: Array) -> Array:
        """By the bits of x.

        Counted on from +infinity, all bits that are larger are those of numbers: a
        maximum makes a NaN of it. Then the same from -infinity.
        """
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        bits = jnp.maximum(bits - _INFINITY, 1)  # +infinity is 0
        bits = jnp.maximum(bits - _SIGN, 1)  # -infinity is
        bits = bits + (_INFINITY + _SIGN)
        return lax.bitcast_convert_type(bits, jnp.float32) * scale


CAST, CAST_OF_WEIGHT = _Cast(), _CastOfWeight()


def _to_e2m1(x: Array, key: Key | None) -> Array:
    # By arithmetic: XLA casts by way of float16, and rounds twice (jax 0.10.2, November
    # 2026). A NaN is in the scales: see `NVFP4Quantizer`.
    return round_finite(x, Format.E2M1, to_integers(key)).astype(jnp.float4_e2m1fn)
