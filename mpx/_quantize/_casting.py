"""One scale for an array, and the device's own cast where that is known to round right.

`round_to_format` rounds by arithmetic, the same on every device. On CUDA with FP8 units
the cast does as well, and moves fewer bytes: it rounds a float32 number once, to the
nearest, ties to even (PTX `cvt.rn.satfinite.e4m3x2.f32`), and a maximum keeps NaN
(`max.NaN.f32`; jax 0.10.2, CUDA 12.9, compiled for sm_90, November 2026).

So an array is scaled, clipped and cast there, and nothing in it is masked: where two
layouts of an array are wanted, XLA writes each mask out for the transposed one. Without
the masks a weight of 16384 x 4096 moves 671 MB instead of 1,610 on its way to FP8. What
they are for, the amax tells: where it is not finite, the inverse scale is NaN, and with
it the product. Two things differ from the arithmetic, which all other devices keep:

* an infinity or a NaN makes all products of its array NaN, not those of its own row;
* numbers below 2^-126 are not flushed to zero, where a scale brings them into range.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from ._amax import Join, alone
from ._array import QuantizedArray
from ._blocks import Axes
from ._format import Format
from ._quantizers import BlockQuantizer, MXFP8Quantizer, TensorQuantizer
from ._rounding import Arithmetic, flushed, largest_magnitude
from ._target import Target

CastQuantizer = TensorQuantizer | BlockQuantizer | MXFP8Quantizer


def is_cast(quantizer: CastQuantizer, target: Target) -> bool:
    """Whether a device casts what this quantizer rounds."""
    return target.rounds_to_fp8 and not quantizer.stochastic_rounding


def amax_on(
    target: Target, x: Float32[Array, "..."], *, only_finite: bool = False
) -> Float32[Array, ""]:
    """The maximum of |x|; NaN where there is a NaN, 0 of nothing.

    Args:
        target: The device.
        x: The numbers.
        only_finite: Leave out what is not finite, if the device does not cast.
    """
    by_bits = functools.partial(largest_magnitude, only_finite=only_finite)
    if not target.rounds_to_fp8:
        return by_bits(x)
    return lax.platform_dependent(x, **{target.platform: _largest}, default=by_bits)


def quantize_by_cast(
    quantizer: CastQuantizer,
    target: Target,
    x: Float32[Array, "..."],
    dtype: np.dtype,
    axes: Axes,
    amax: Float32[Array, ""] | None,
    scale: Float32[Array, ""] | None,
    join: Join,
) -> QuantizedArray:
    """Quantizes an array on a device that casts; by arithmetic where it runs elsewhere.

    Args:
        quantizer: How, with which scales.
        target: The device.
        x: The numbers.
        dtype: The dtype that `dequantize` is to give.
        axes: Those that blocks lie along.
        amax: The amax of the whole array, known together with a scale.
        scale: A scale from elsewhere; that of the amax if left out.
        join: Makes the amax of the whole array from that of `x`.
    """
    if isinstance(quantizer, TensorQuantizer):
        if amax is None or scale is None:
            amax = join(amax_on(target, x, only_finite=True))
            scale = quantizer._scale(amax)
        here = functools.partial(_cast_tensor, quantizer, dtype)
    else:
        here = functools.partial(_cast_blocks, quantizer, dtype, axes)

    def elsewhere(x: Array, amax: Array | None, scale: Array | None) -> QuantizedArray:
        return quantizer._quantize(flushed(x), dtype, axes, None, scale, alone)

    branches = {target.platform: here}
    return lax.platform_dependent(x, amax, scale, **branches, default=elsewhere)


def _largest(x: Array, axis: tuple[int, ...] | None = None) -> Array:
    return jnp.max(jnp.abs(x), axis=axis, initial=0)


def _to_format(x: Array, format: Format, key: Array | None = None) -> Array:
    # A NaN stays one. A cast alone would make NaN of what is too large for E4M3.
    return jnp.clip(x, -format.largest, format.largest).astype(format.dtype)


CAST = Arithmetic(_largest, _to_format)


def _cast_tensor(
    quantizer: TensorQuantizer, dtype: np.dtype, x: Array, amax: Array, scale: Array
) -> QuantizedArray:
    payload = _to_format(x * scale, quantizer.format)
    inverse_scale = jnp.where(amax < jnp.inf, 1 / scale, jnp.nan)
    return QuantizedArray(payload, inverse_scale, format=quantizer.format, dtype=dtype)


def _cast_blocks(
    quantizer: BlockQuantizer | MXFP8Quantizer,
    dtype: np.dtype,
    axes: Axes,
    x: Array,
    amax: None,
    scale: None,
) -> QuantizedArray:
    return quantizer._quantize(x, dtype, axes, None, None, alone, CAST)
