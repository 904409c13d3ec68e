"""What quantizers compute with: the same bits on every device, or as one device does.

`EXACT` is defined by float32 arithmetic in a fixed order. `_casting.CAST` is what a
device that rounds right has for it.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._format import Format
from ._four_bits import pack
from ._hadamard import hadamard_transform
from ._noise import Key
from ._rounding import largest_magnitude, round_to_format


class Arithmetic:
    """How a device finds magnitudes, transforms, and rounds."""

    def largest(self, x: Array, axis: tuple[int, ...] | None = None) -> Array:
        """The largest magnitudes, as `largest_magnitude`."""
        return largest_magnitude(x, axis)

    def largest_finite(self, x: Array) -> Array:
        """The same of all finite numbers.

        Infinite or NaN where there is such a number, if a device cannot leave them out.
        """
        return largest_magnitude(x, only_finite=True)

    def scaled(self, x: Array, scale: Array) -> Array:
        """Numbers times a scale; NaN where they are not finite."""
        # Of x: a finite number that a large scale makes infinite saturates.
        return jnp.where(jnp.isfinite(x), x * scale, jnp.nan)

    def to_format(self, x: Array, format: Format, key: Key | None) -> Array:
        """Numbers rounded to 8 bits, in the dtype of the format."""
        return round_to_format(x, format, key).astype(format.dtype)

    def to_four_bits(self, x: Array, axis: int, key: Key | None) -> Array:
        """Numbers rounded to E2M1, packed along an axis."""
        return pack(round_to_format(x, Format.E2M1, key), axis)

    def rotated(
        self, x: Array, axis: int, signs: tuple[int, ...] | None, dtype: np.dtype
    ) -> Array:
        """The Hadamard transform of numbers that had this dtype."""
        return hadamard_transform(x, axis=axis, signs=signs)

    def written(self, x: Array) -> Array:
        """An array that is to be in memory, not computed again for each use."""
        return x


EXACT = Arithmetic()
