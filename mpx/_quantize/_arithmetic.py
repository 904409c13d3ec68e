"""What quantizers compute with: the same bits on every device, or as one device does.

`EXACT` is defined by float32 arithmetic in a fixed order. `_casting.CAST` is what a
device that rounds right has for it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from ._format import Format
from ._four_bits import pack
from ._hadamard import hadamard_transform
from ._noise import Key
from ._rounding import largest_magnitude, round_to_format


class Arithmetic(NamedTuple):
    """How a device finds magnitudes, transforms, and rounds.

    Attributes:
        largest: `largest(x, axis)`, like `largest_magnitude`.
        largest_finite: `largest_finite(x)`, the same of all finite numbers. Infinite or
            NaN where there is such a number, if a device cannot leave them out.
        scaled: `scaled(x, scale)`, x times a scale; NaN where x is not finite.
        to_format: `to_format(x, format, key)`, like `round_to_format` to 8 bits, in the
            dtype of the format.
        to_four_bits: `to_four_bits(x, axis, key)`, the same to E2M1, packed along an
            axis.
        rotated: `rotated(x, axis, signs, dtype)`, like `hadamard_transform`, of numbers
            that had this dtype.
        written: `written(array)`, an array that is to be in memory, not computed again
            for each use.
    """

    largest: Callable[..., Array]
    largest_finite: Callable[[Array], Array]
    scaled: Callable[[Array, Array], Array]
    to_format: Callable[[Array, Format, Key | None], Array]
    to_four_bits: Callable[[Array, int, Key | None], Array]
    rotated: Callable[[Array, int, tuple[int, ...] | None, np.dtype], Array]
    written: Callable[[Array], Array]


def _scaled(x: Array, scale: Array) -> Array:
    # Of x: a finite number that a large scale makes infinite saturates.
    return jnp.where(jnp.isfinite(x), x * scale, jnp.nan)


def _to_format(x: Array, format: Format, key: Key | None) -> Array:
    return round_to_format(x, format, key).astype(format.dtype)


def _to_four_bits(
    x: Float32[Array, "..."], axis: int, key: Key | None
) -> UInt8[Array, "..."]:
    return pack(round_to_format(x, Format.E2M1, key), axis)


def _rotated(
    x: Array, axis: int, signs: tuple[int, ...] | None, dtype: np.dtype
) -> Array:
    return hadamard_transform(x, axis=axis, signs=signs)


def _as_it_is(x: Array) -> Array:
    return x


EXACT = Arithmetic(
    largest=largest_magnitude,
    largest_finite=functools.partial(largest_magnitude, only_finite=True),
    scaled=_scaled,
    to_format=_to_format,
    to_four_bits=_to_four_bits,
    rotated=_rotated,
    written=_as_it_is,
)
