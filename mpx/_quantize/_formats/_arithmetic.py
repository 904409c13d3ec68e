"""The arithmetic of quantizers: the same bits on every device, or a device's own.

`EXACT` is float32 arithmetic in a fixed order; a CPU computes the same bits faster.
`_quantizers/_casting.py` has `CAST`, for a device whose casts round correctly.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from ..._base.jax_compat import WIDENS_STACKS
from ._format import Format
from ._hadamard import hadamard_transform
from ._rounding import Key, flushed, largest_magnitude, pack, round_to_format
from ._target import Target


class Arithmetic:
    """Finds magnitudes, transforms, and rounds."""

    def largest(self, x: Array, axis: tuple[int, ...] | None = None) -> Array:
        """Returns the largest magnitudes, as `largest_magnitude`."""
        return largest_magnitude(x, axis)

    def largest_finite(self, x: Array) -> Array:
        """Returns the largest finite magnitude.

        On devices that do not skip them, infinite or NaN if there is such a value.
        """
        return largest_magnitude(x, only_finite=True)

    def scaled(self, x: Array, scale: Array) -> Array:
        """Multiplies values by a scale; infinities and NaN become NaN."""
        # Tests x: a finite value that the scale makes infinite saturates.
        return jnp.where(jnp.isfinite(x), x * scale, jnp.nan)

    def to_format(self, x: Array, format: Format, key: Key | None) -> Array:
        """Rounds values to 8 bits, in the dtype of the format."""
        return round_to_format(x, format, key).astype(format.dtype)

    def to_four_bits(self, x: Array, axis: int, key: Key | None) -> Array:
        """Rounds values to E2M1 and packs them along an axis."""
        return pack(round_to_format(x, Format.E2M1, key), axis)

    def rotated(
        self, x: Array, axis: int, signs: tuple[int, ...] | None, dtype: np.dtype
    ) -> Array:
        """Returns the Hadamard transform of values; `dtype` is their original dtype."""
        return hadamard_transform(x, axis=axis, signs=signs)

    def written(self, x: Array) -> Array:
        """Makes the compiler write an array once, not recompute it for each use."""
        return x


EXACT = Arithmetic()


# --- On a CPU: the bits of `EXACT`, without the slow operations of XLA's compiler -----
#
# * Its cast to 8 bits takes three quarters of the time of quantizing an array. So
#   integer arithmetic makes the bits.
# * A maximum of integers takes three times that of floats, for which it has a library;
#   but the latter loses NaN. So the bits are reinterpreted as other floats, in the same
#   order and without NaN.
# * It widens arrays of 8-bit floats that are only moved: a loop that writes one into a
#   stack widens and narrows the whole stack in each iteration. So residuals are saved
#   as integer bits; bfloat16 as well, with jaxlib 0.10.
#
# Measured with jaxlib 0.10.2 and 0.12.0.1, November 2026.

_INFINITY, _SIGN = 0x7F800000, np.int32(-(2**31))
# Bits of magnitudes from 2 up become those of positive floats from 2**-126 up, smaller
# ones those of negative floats.
_TWO, _SMALLEST_NORMAL = 0x40000000, 0x00800000
_ZERO = np.float32(-3.9999998)  # 0 becomes this: -(_TWO - 1 + _SMALLEST_NORMAL)


class _OnCpu(Arithmetic):
    """Computes the bits of `EXACT` on a CPU."""

    def largest(self, x: Array, axis: tuple[int, ...] | None = None) -> Array:
        return _maximum(_magnitude_bits(x), axis)

    def largest_finite(self, x: Array) -> Array:
        bits = _magnitude_bits(x)
        return flushed(_maximum(jnp.where(bits < _INFINITY, bits, 0), None))

    def scaled(self, x: Array, scale: Array) -> Array:
        # Subnormals become zero here; flushing them first would write another array.
        bits = _magnitude_bits(x)
        factor = jnp.where(bits < _SMALLEST_NORMAL, 0, scale)
        return x * jnp.where(bits < _INFINITY, factor, jnp.nan)

    def to_format(self, x: Array, format: Format, key: Key | None) -> Array:
        if key is not None:
            x = round_to_format(x, format, key)
        return lax.bitcast_convert_type(_codes(x, format), format.dtype)


ON_CPU = _OnCpu()


def arithmetic_of(target: Target) -> Arithmetic:
    """Returns the arithmetic of a device whose cast is not known to round correctly."""
    return ON_CPU if target.platform == "cpu" else EXACT


def _magnitude_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _maximum(bits: Array, axis: tuple[int, ...] | None) -> Array:
    """Returns the float32 number with the largest bits, by a maximum of floats."""
    above = bits - (_TWO - _SMALLEST_NORMAL)
    below = (_TWO - 1 + _SMALLEST_NORMAL - bits) | _SIGN
    ordered = jnp.where(bits >= _TWO, above, below)
    ordered = lax.bitcast_convert_type(ordered, jnp.float32)
    found = jnp.max(ordered, axis=axis, initial=_ZERO)
    found = lax.bitcast_convert_type(found, jnp.int32)
    above = found + (_TWO - _SMALLEST_NORMAL)
    below = _TWO - 1 + _SMALLEST_NORMAL - (found & ~_SIGN)
    return lax.bitcast_convert_type(jnp.where(found > 0, above, below), jnp.float32)


def _codes(x: Array, format: Format) -> Array:
    """Returns the bits of the nearest 8-bit numbers, ties to even, as uint8."""
    info = format._info
    lost = 23 - info.nmant
    magnitude = jnp.minimum(jnp.abs(x), format.largest)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    # A carry out of the mantissa correctly increments the exponent.
    nearest = (bits + (2 ** (lost - 1) - 1) + ((bits >> lost) & 1)) >> lost
    normal = nearest - ((126 + info.minexp) << info.nmant)
    # Below the smallest normal number a code is the number of steps: float32 numbers
    # from `first` up are that far apart. Not by floats alone: XLA simplifies (x +
    # first) - first (jaxlib 0.10.2).
    first = np.float32(2.0 ** (23 + info.minexp - info.nmant))
    small = lax.bitcast_convert_type(magnitude + first, jnp.int32)
    small = small - first.view(np.int32)
    code = jnp.where(magnitude < format.smallest_normal, small, normal)
    code = code | ((lax.bitcast_convert_type(x, jnp.int32) >> 24) & 0x80)
    nan = int(np.array(np.nan, format.dtype).view(np.uint8))
    return jnp.where(jnp.isnan(x), nan, code).astype(jnp.uint8)


class Bits(eqx.Module):
    """Floating values as integers.

    Attributes:
        bits: The integers.
        dtype: The dtype of the values.
    """

    bits: Array
    dtype: np.dtype = eqx.field(static=True)


def as_bits(tree: PyTree) -> PyTree:
    """Replaces floating arrays that a loop on a CPU would widen by `Bits`."""

    def convert(x: Array) -> Array | Bits:
        is_narrow = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
        if not is_narrow and not (WIDENS_STACKS and x.dtype == jnp.bfloat16):
            return x
        unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
        return Bits(lax.bitcast_convert_type(x, unsigned), x.dtype)

    return jax.tree.map(convert, tree)


def as_numbers(tree: PyTree) -> PyTree:
    """Inverts `as_bits`."""

    def convert(x: Array | Bits) -> Array:
        if isinstance(x, Bits):
            return lax.bitcast_convert_type(x.bits, x.dtype)
        return x

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, Bits))
