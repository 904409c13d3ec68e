"""Arithmetic on the bits of float32 numbers: random rounding, upper and lower bits.

The bits of positive floating-point numbers, read as an integer, grow with the number,
and evenly from one power of two to the next. So adding a random integer below $2^n$ and
clearing the lowest $n$ bits rounds a number to one of its two neighbours with fewer
bits, and its mean is the number. Integers are exact on every device, and XLA leaves
no rounding out, as it may do with a pair of casts.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float32, Int16, PyTree, UInt32

from .._jax_compat import manual_axes
from .._quantize import hashed, mixed, places
from .._tree import is_float_leaf, path_text

# The bits of infinity, above which are those of NaN, and of one NaN.
INFINITE, NAN = np.uint32(0x7F800000), np.uint32(0x7FC00000)
_MAGNITUDE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)


def bits_of(x: Float32[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of float32 numbers, as integers."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def number_of(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """The float32 numbers of these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def first_step(weights: PyTree) -> UInt32[Array, ""]:
    """The number of the first step that draws noise: a hash of the weights.

    So members of an ensemble draw their own, if they start from other weights. It is a
    sum of integers, the same however the weights are sharded; in `shard_map`, whose
    shards may be any part of them, the largest of all shards.
    """
    total = np.uint32(0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        if not is_float_leaf(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        # Odd, so that what differs in one leaf differs.
        own = _hash(leaf, np.uint32(zlib.crc32(path_text(path).encode()) | 1))
        # Leaves may lie on other devices each.
        total = total ^ (own if isinstance(own, Tracer) else np.asarray(own))
    axes = tuple(sorted(manual_axes()))
    total = jnp.asarray(total)
    return lax.pmax(total, axes) if axes else total


@jax.jit
def _hash(x: Array, factor: Array) -> UInt32[Array, ""]:
    x = jnp.asarray(x, jnp.float32)
    return jnp.sum(hashed(x, places(x.shape)), dtype=jnp.uint32) * factor


class Noise:
    """Draws for a leaf of a state in one step: a hash of place, step and leaf.

    The place is that in the whole array, so that draws do not depend on how it is
    sharded.

    Args:
        step: The number of the step, an integer.
        leaf: The path of the leaf.
        axes: The axes of `shard_map` on which the array varies. There a place is one in
            a shard, and the number of the shard is hashed, too.
    """

    def __init__(
        self, step: UInt32[Array, ""], leaf: str, axes: frozenset[str] = frozenset()
    ) -> None:
        self._step, self._leaf = step, np.uint32(zlib.crc32(leaf.encode()))
        if axes:
            shard = lax.axis_index(tuple(sorted(axes))).astype(jnp.uint32)
            self._leaf = self._leaf ^ mixed(shard)

    def draws(self, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
        """An integer of 32 random bits for each number of an array."""
        return mixed(mixed(places(shape) ^ self._leaf) + mixed(self._step))

    def uniform(self, shape: tuple[int, ...]) -> Float32[Array, "..."]:
        """A number from [0, 1) for each number of an array, of 23 bits."""
        one_to_two = (self.draws(shape) >> 9) | np.uint32(0x3F800000)
        return number_of(one_to_two) - np.float32(1)


def round_randomly(
    x: Float32[Array, "..."], count: int, noise: Noise
) -> Float32[Array, "..."]:
    """Rounds to numbers whose lowest `count` bits are 0, so that the mean stays.

    Infinities and NaN stay. A finite number does not become infinite: the largest
    ones are rounded towards zero.
    """
    bits, clear = bits_of(x), np.uint32(0xFFFFFFFF << count & 0xFFFFFFFF)
    moved = (bits + (noise.draws(x.shape) >> np.uint32(32 - count))) & clear
    is_safe = (moved & _MAGNITUDE) < INFINITE
    moved = jnp.where(is_safe, moved, bits & clear)
    return number_of(jnp.where((bits & _MAGNITUDE) < INFINITE, moved, bits))


def split(x: Float32[Array, "..."]) -> tuple[Array, Int16[Array, "..."]]:
    r"""Splits float32 into the nearest bfloat16 and the 16 bits that it leaves out.

    $$\operatorname{bits}(x) = 2^{16} \operatorname{bits}(p) + r, \qquad
        -2^{15} \le r < 2^{15}$$

    Ties go away from zero: with ties to even, two numbers would have the same halves.
    NaN becomes one NaN, and its remainder 0.
    """
    bits = bits_of(x)
    is_nan = (bits & _MAGNITUDE) > INFINITE
    bits = jnp.where(is_nan, NAN, bits)
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    low = (bits & np.uint32(0xFFFF)).astype(jnp.uint16)
    weight = lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return weight, lax.bitcast_convert_type(low, jnp.int16)


def joined(weight: Array, low: Int16[Array, "..."]) -> Float32[Array, "..."]:
    """The float32 numbers that `split` took apart.

    The weight may have been changed since. Then the result is less than its distance
    to a neighbour away; zero, infinity and NaN are what they are, whatever is left.
    """
    high = lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.uint32)
    high = high << np.uint32(16)
    rest = lax.convert_element_type(low, jnp.int32)
    bits = high + lax.bitcast_convert_type(rest, jnp.uint32)
    magnitude = high & _MAGNITUDE
    # Subtracting from the bits of zero, or adding to those of infinity, gives NaN.
    is_below = (magnitude == 0) & (rest < 0)
    is_above = (magnitude > INFINITE) | ((magnitude == INFINITE) & (rest > 0))
    return number_of(jnp.where(is_below | is_above, high, bits))
