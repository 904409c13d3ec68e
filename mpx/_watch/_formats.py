"""Formats that are asked for, and what is left of an array in each.

Rounding is arithmetic, as in the recipes' emulation: a compiler may drop a pair of
casts (float32 to float16 and back).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._dtypes import is_half
from .._errors import describe
from .._quantize import (
    AbstractQuantizer,
    AbstractRecipe,
    Format,
    Role,
    power_of_two,
    quantize_dequantize,
)
from .._typing import DTypeLike

CALL = "`formats` of `mpx.monitor`"

Asked = DTypeLike | Format | AbstractQuantizer | AbstractRecipe


class RoundingLoss(NamedTuple):
    """What a format leaves of each number of an array: 0 or 1, and what is lost."""

    above: Float[Array, "..."]
    """Whether it is beyond the largest number of the format."""
    below: Float[Array, "..."]
    """Whether it is not zero and subnormal in the format: it loses digits."""
    flushed: Float[Array, "..."]
    """Whether it is one of them that become zero."""
    lost: Float[Array, "..."]
    """The magnitude of what is lost."""


@dataclasses.dataclass(frozen=True)
class AskedFormat:
    """A format, as it was asked for.

    Attributes:
        name: What it is called in tables and records.
        bits: How many bits a number has.
        kept: `kept(x, kind, axis)`: what it leaves of an array of float32.
    """

    name: str
    bits: int
    kept: Callable[[Array, Role, int], RoundingLoss]


def asked_formats(formats: object) -> tuple[AskedFormat, ...]:
    """Reads what a user asks for, one format or several."""
    is_several = isinstance(formats, list | tuple)
    found = tuple(map(_asked, formats if is_several else (formats,)))
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{CALL} must be different; got {', '.join(names)}.")
    return found


def _asked(asked: Any) -> AskedFormat:
    if isinstance(asked, AbstractRecipe):
        return _of_quantizer(type(asked).__name__, asked.quantizer)
    if isinstance(asked, AbstractQuantizer):
        return _of_quantizer(type(asked).__name__, lambda _: asked)
    if isinstance(asked, Format):
        return _of_format(asked)
    try:
        dtype = jnp.dtype(asked)
    except TypeError:
        dtype = np.dtype(object)
    if is_half(dtype):
        return _plain(dtype.name, lambda _: dtype)
    single = [f for f in Format if f is not Format.HYBRID and f.dtype == dtype]
    if not single:
        raise TypeError(
            f"{CALL} must be dtypes ('float16', 'bfloat16' and those of "
            "`mpx.Format`), formats such as `mpx.Format.E4M3`, quantizers and "
            f"recipes; got {describe(asked)}."
        )
    return _of_format(single[0])


def _of_format(format: Format) -> AskedFormat:
    def dtype(kind: Role) -> np.dtype:
        return (format.backward if kind is Role.GRADIENT else format.forward).dtype

    return _plain(format.name, dtype)


def _plain(name: str, dtype: Callable[[Role], np.dtype]) -> AskedFormat:
    """Numbers as they are, cast without a scale."""

    def kept(x: Array, kind: Role, axis: int) -> RoundingLoss:
        info = jnp.finfo(dtype(kind))
        size = jnp.abs(x)
        rounded = round_to(size, dtype(kind))
        is_below = (size > 0) & (size < float(info.smallest_normal))
        return RoundingLoss(
            _flag(size > float(info.max)),
            _flag(is_below),
            _flag((size > 0) & (rounded == 0)),
            jnp.abs(size - rounded),
        )

    return AskedFormat(name, jnp.finfo(dtype(Role.INPUT)).bits, kept)


def round_to(size: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    r"""The nearest numbers of a dtype to magnitudes, ties to even, in float32.

    With $d$ the distance of neighbours, the sum $x + 2^{23} d$ has digits down to $d$:
    float32 rounds it as the format would, and the difference is exact.
    Steps of $d$ for all formats would be one way less, and 10 % more traffic of a
    monitored GPT (`python -m benchmarks monitor`). What is too large for a dtype of 16
    bits is infinite, and of fewer the largest number. Subnormal numbers of bfloat16 are
    those of float32, which devices flush.
    """
    info = jnp.finfo(dtype)
    largest = float(info.max)
    bits = lax.bitcast_convert_type(size, jnp.uint32) >> 23
    lowest = max(127 + info.minexp, info.nmant + 1)
    # From this exponent on all are beyond the largest number.
    highest = math.frexp(largest)[1] + 127
    exponent = jnp.clip(bits.astype(jnp.int32), lowest, highest)
    shift = 23 - info.nmant
    if highest + shift < 255:
        large = power_of_two(exponent + shift)
        rounded = (size + large) - large
    else:  # of bfloat16 that would be infinite
        distance_exponent = exponent - info.nmant
        steps = size * power_of_two(254 - distance_exponent)
        steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
        rounded = steps * power_of_two(distance_exponent)
    beyond = jnp.inf if is_half(dtype) else largest
    return jnp.where(rounded > largest, jnp.float32(beyond), rounded)


def _flag(flags: Array) -> Array:
    return flags.astype(jnp.float32)


def _of_quantizer(
    name: str, quantizer: Callable[[Role], AbstractQuantizer | None]
) -> AskedFormat:
    """Numbers with the scales that a quantizer finds for them."""

    def kept(x: Array, kind: Role, axis: int) -> RoundingLoss:
        found = quantizer(kind)
        zero = jnp.zeros_like(x)
        if found is None:  # stays as it is
            return RoundingLoss(zero, zero, zero, zero)
        if found.stochastic_rounding:
            found = dataclasses.replace(found, stochastic_rounding=False)
        padded, axes = _in_blocks(x, found, axis)
        rounded = quantize_dequantize(padded, found, axis=axes)
        # Without the axis that made blocks of a vector, and what filled them up.
        rounded = rounded.reshape(rounded.shape[rounded.ndim - x.ndim :])
        rounded = rounded[tuple(map(slice, x.shape))]
        lost, size = jnp.abs(x - rounded), jnp.abs(x)
        half_step = 2.0 ** -(_mantissa_bits(found) + 1) * 1.01
        is_below = lost > half_step * size
        return RoundingLoss(
            _flag(~jnp.isfinite(rounded)),
            _flag(is_below),
            _flag((size > 0) & (rounded == 0)),
            lost,
        )

    bits = getattr(quantizer(Role.INPUT), "format", Format.E4M3).forward.bits
    return AskedFormat(name, bits, kept)


def _in_blocks(
    x: Array, quantizer: AbstractQuantizer, axis: int
) -> tuple[Array, int | tuple[int, ...]]:
    """An array that divides into blocks, filled up with zeros, and their axes."""
    dimensions = quantizer.block_dimensions
    if not dimensions:
        return x, axis
    # A vector is one row of square blocks.
    x = x.reshape((1,) * (dimensions - x.ndim) + x.shape)
    axes = (axis % x.ndim,) if dimensions == 1 else (x.ndim - 2, x.ndim - 1)
    block: int = getattr(quantizer, "block")  # noqa: B009
    widths = [(0, -n % block if i in axes else 0) for i, n in enumerate(x.shape)]
    padded = jnp.pad(x, widths) if any(more for _, more in widths) else x
    return padded, axes if dimensions == 2 else axes[0]


def _mantissa_bits(quantizer: AbstractQuantizer) -> int:
    return jnp.finfo(getattr(quantizer, "format", Format.E4M3).forward.dtype).nmant
