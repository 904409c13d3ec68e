"""Arrays of an optimizer's state in 8 or 16 bits: bits, codes and `CompressedArray`.

Orbax casts restored arrays to the dtype of a template, and would so turn 8-bit codes
into 16-bit ones. So the name of the codes contains their dtype (`codes_int8`): the
names of a template with another code do not fit the file.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float32, Int16, PyTree, UInt32

from .._base.dtypes import is_half
from .._base.errors import describe
from .._base.jax_compat import manual_axes, varying_axes
from .._base.tree import Whole, is_float_leaf, path_text
from .._quantize import hashed, mixed, places
from .._settings import cast_leaf


def is_half_leaf(leaf: Any) -> bool:
    """Returns whether a leaf is an array of float16 or bfloat16."""
    return is_float_leaf(leaf) and is_half(leaf.dtype)


def widened(leaf: Any) -> Any:
    """Casts arrays of float16 and bfloat16 to float32; returns others unchanged."""
    return cast_leaf(leaf, np.dtype(np.float32)) if is_half_leaf(leaf) else leaf


# --- Bits of float32 ------------------------------------------------------------------
#
# The bits of positive floating-point numbers, read as an integer, grow with the number,
# and evenly from one power of two to the next. So adding a random integer below $2^n$
# and clearing the lowest $n$ bits rounds a number to one of its two neighbours with
# fewer bits, and the mean of the result is the number. Integer arithmetic is exact on
# every device, and XLA removes no rounding, as it may with a pair of casts.

# The bits of infinity (those of NaN are larger), and of one NaN.
INFINITE, NAN = np.uint32(0x7F800000), np.uint32(0x7FC00000)
_MAGNITUDE, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)


def bits_of(x: Float32[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns the bits of float32 numbers as integers."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def number_of(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the float32 numbers that have these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def first_step(weights: PyTree) -> UInt32[Array, ""]:
    """Returns the number of the first step that draws noise: a hash of the weights.

    So members of an ensemble that start from other weights draw other noise. The hash
    is a sum of integers, so it does not depend on the sharding of the weights. Inside
    `shard_map` the shards may be any part of the weights: the maximum over all shards.
    """
    total = np.uint32(0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        if not is_float_leaf(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        # The factor is odd, so a change of one leaf changes the sum.
        own = _hash(leaf, np.uint32(zlib.crc32(path_text(path).encode()) | 1))
        # Each leaf may be on other devices.
        total = total ^ (own if isinstance(own, Tracer) else np.asarray(own))
    axes = tuple(sorted(manual_axes()))
    total = jnp.asarray(total)
    return lax.pmax(total, axes) if axes else total


@jax.jit
def _hash(x: Array, factor: Array) -> UInt32[Array, ""]:
    x = jnp.asarray(x, jnp.float32)
    return jnp.sum(hashed(x, places(x.shape)), dtype=jnp.uint32) * factor


class Noise:
    """Draws random integers for a leaf in one step: a hash of index, step and leaf.

    The index is that in the whole array, so draws do not depend on the sharding.

    Args:
        step: The number of the step, an integer.
        leaf: The path of the leaf.
        axes: The axes of `shard_map` on which the array varies. With any, the index is
            that in the shard, and the number of the shard is hashed, too.
    """

    def __init__(
        self, step: UInt32[Array, ""], leaf: str, axes: frozenset[str] = frozenset()
    ) -> None:
        self._step, self._leaf = step, np.uint32(zlib.crc32(leaf.encode()))
        if axes:
            shard = lax.axis_index(tuple(sorted(axes))).astype(jnp.uint32)
            self._leaf = self._leaf ^ mixed(shard)

    def draws(self, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
        """Returns an integer of 32 random bits for each number of an array."""
        return mixed(mixed(places(shape) ^ self._leaf) + mixed(self._step))

    def uniform(self, shape: tuple[int, ...]) -> Float32[Array, "..."]:
        """Returns a number from [0, 1), of 23 bits, for each number of an array."""
        one_to_two = (self.draws(shape) >> 9) | np.uint32(0x3F800000)
        return number_of(one_to_two) - np.float32(1)


def round_randomly(
    x: Float32[Array, "..."], count: int, noise: Noise
) -> Float32[Array, "..."]:
    """Rounds to numbers whose lowest `count` bits are 0, without changing the mean.

    Infinities and NaN are unchanged. A finite number does not become infinite: the
    largest ones are rounded towards zero.
    """
    bits, clear = bits_of(x), np.uint32(0xFFFFFFFF << count & 0xFFFFFFFF)
    moved = (bits + (noise.draws(x.shape) >> np.uint32(32 - count))) & clear
    is_safe = (moved & _MAGNITUDE) < INFINITE
    moved = jnp.where(is_safe, moved, bits & clear)
    return number_of(jnp.where((bits & _MAGNITUDE) < INFINITE, moved, bits))


def split(x: Float32[Array, "..."]) -> tuple[Array, Int16[Array, "..."]]:
    r"""Splits float32 into the nearest bfloat16 and the 16 bits that it omits.

    $$\operatorname{bits}(x) = 2^{16} \operatorname{bits}(p) + r, \qquad
        -2^{15} \le r < 2^{15}$$

    Ties are rounded away from zero: with ties to even, two numbers would have the same
    halves. Every NaN becomes one NaN, with the remainder 0.
    """
    bits = bits_of(x)
    is_nan = (bits & _MAGNITUDE) > INFINITE
    bits = jnp.where(is_nan, NAN, bits)
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    low = (bits & np.uint32(0xFFFF)).astype(jnp.uint16)
    weight = lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return weight, lax.bitcast_convert_type(low, jnp.int16)


def joined(weight: Array, low: Int16[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the float32 numbers that `split` took apart.

    If the weight was changed since, the result differs from it by less than its
    distance to a neighbour. A weight of zero, infinity or NaN is returned unchanged.
    """
    high = lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.uint32)
    high = high << np.uint32(16)
    rest = lax.convert_element_type(low, jnp.int32)
    bits = high + lax.bitcast_convert_type(rest, jnp.uint32)
    magnitude = high & _MAGNITUDE
    # Subtracting from the bits of zero or adding to those of infinity would give NaN.
    is_below = (magnitude == 0) & (rest < 0)
    is_above = (magnitude > INFINITE) | ((magnitude == INFINITE) & (rest > 0))
    return number_of(jnp.where(is_below | is_above, high, bits))


# --- Codes and blocks -----------------------------------------------------------------
#
# A block is up to 128 consecutive numbers along one axis, and its scale $s$ the largest
# magnitude among them, in float32. An integer $k$ is decoded as
#
# $$x = \pm s (k / L)^2 \quad\text{(signed)} \qquad
#     x = s (k / L)^4 \quad\text{(not negative)}$$
#
# with $L$ = 127 and 255 in 8 bits, 32,767 and 65,535 in 16. A power has more codes for
# small numbers: in 8 bits the smallest one is $6 \cdot 10^{-5}$ of the largest of a
# block, or $2 \cdot 10^{-10}$ of it for second moments, by whose root updates divide.
#
# - A number between two codes is rounded to one of them randomly, so the mean is the
#   number. Rounded to the nearest, 0.9 m would have the code of m for small m, and an
#   average that decays or follows slowly would not change.
# - A signed number may become zero. A never-negative one does not: many optimizers
#   divide by its root.
# - The largest number of a block is exact, so decoding and encoding keeps its bits.
# - NaN, an infinity, or a negative number in an unsigned code makes the block NaN: its
#   scale is NaN, which checks for NaN detect.

# unsure: no training compared lengths of blocks
LONGEST_BLOCK = 128
# The scale of a shorter block would cost over an eighth of a byte per number.
_SHORTEST_BLOCK = 32
_TINY = np.float32(2.0**-126)

Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Code:
    """The format of an array's numbers.

    Attributes:
        bits: 8 or 16.
        signed: Whether numbers may be negative.
        blocks: Whether numbers are stored in blocks; if not, as bfloat16.
    """

    bits: int = 8
    signed: bool = True
    blocks: bool = True

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the codes."""
        if not self.blocks:
            return np.dtype(jnp.bfloat16)
        return np.dtype(f"{'' if self.signed else 'u'}int{self.bits}")

    @property
    def name(self) -> str:
        """The name of the codes among the arrays of a `CompressedArray`."""
        return f"codes_{self.dtype}"

    @property
    def levels(self) -> int:
        """The largest code, $L$."""
        return 2 ** (self.bits - self.signed) - 1

    def __str__(self) -> str:
        if not self.blocks:
            return "bfloat16"
        return f"{self.bits} bits, {'signed' if self.signed else 'not negative'}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The blocks of an array.

    Attributes:
        axis: The axis along which it is divided.
        size: The numbers of a block.
        count: The number of blocks; the last one may be shorter.
        is_even: Whether the last one is as long as the others.
    """

    axis: int
    size: int
    count: int
    is_even: bool = True

    def scales_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the scales of an array of this shape."""
        return self._with_axis(shape, self.count)

    def in_blocks(self, x: Array) -> Array:
        """Returns the array with its axis split in two: blocks, and their numbers."""
        missing = self.size * self.count - x.shape[self.axis]
        if missing:
            x = jnp.pad(x, [(0, missing * (i == self.axis)) for i in range(x.ndim)])
        return x.reshape(self._with_axis(x.shape, self.count, self.size))

    def spread(self, scales: Array, shape: Shape) -> Array:
        """Returns the scale of each number of an array of this shape."""
        blocks = jnp.broadcast_to(
            jnp.expand_dims(scales, self.axis + 1),
            self._with_axis(shape, self.count, self.size),
        )
        whole = blocks.reshape(self._with_axis(shape, self.count * self.size))
        return lax.slice_in_dim(whole, 0, shape[self.axis], axis=self.axis)

    def _with_axis(self, shape: Shape, *lengths: int) -> Shape:
        return (*shape[: self.axis], *lengths, *shape[self.axis + 1 :])


@functools.lru_cache(maxsize=1024)
def layout_of(shape: Shape) -> Layout:
    """Returns blocks along the last axis, or along the longest one if that is short.

    They are equal if the axis has a divisor from 32 to 128. If not, they have 128
    numbers, and the last one is shorter.
    """
    axis = len(shape) - 1
    if shape[axis] < LONGEST_BLOCK:
        axis = max(range(len(shape)), key=lambda i: (shape[i], i))
    length = shape[axis]
    if length <= LONGEST_BLOCK:
        return Layout(axis, max(length, 1), 1)
    for size in range(LONGEST_BLOCK, _SHORTEST_BLOCK - 1, -1):
        if length % size == 0:
            return Layout(axis, size, length // size)
    return Layout(axis, LONGEST_BLOCK, math.ceil(length / LONGEST_BLOCK), False)


def encode(
    x: Float32[Array, "..."],
    scales: Float32[Array, "..."] | None,
    code: Code,
    noise: Noise,
) -> Array:
    """Returns the codes of numbers, given the scales of their blocks; or bfloat16."""
    if scales is None:
        return round_randomly(x, 16, noise).astype(jnp.bfloat16)
    layout = layout_of(x.shape)
    # XLA multiplies by the inverse where it detects that many numbers have one divisor,
    # which it does not in every shard. The inverse of a scale above 2^126 becomes zero.
    factor = jnp.where(scales > 1, np.float32(0.25), np.float32(1))
    inverse = layout.spread(1 / (scales * factor), x.shape)
    part = jnp.abs(x) * layout.spread(factor, x.shape) * inverse
    levels = np.float32(code.levels)
    steps = lax.round(_root(part, code) * levels, lax.RoundingMethod.TO_NEAREST_EVEN)
    # The largest number may be recomputed with another last bit.
    part = jnp.where(part > np.float32(1 - 2**-20), np.float32(1), part)
    below = jnp.where(_power(steps, code) > part, steps - 1, steps)
    start, end = _power(below, code), _power(below + 1, code)
    is_up = noise.uniform(x.shape) < (part - start) / (end - start)
    steps = jnp.where(is_up, below + 1, below)
    if not code.signed:
        steps = jnp.where((x != 0) & (steps < 1), np.float32(1), steps)
    # NaN and infinity: the block's scale is NaN, so the code does not matter.
    steps = jnp.where(steps <= levels, steps, levels)
    if code.signed:
        steps = jnp.where(x < 0, -steps, steps)
    return steps.astype(code.dtype)


def decode(codes: Array, scales: Array | None, code: Code) -> Float32[Array, "..."]:
    """Returns the numbers of codes and scales."""
    if scales is None:
        return codes.astype(jnp.float32)
    spread = layout_of(codes.shape).spread(scales, codes.shape)
    steps = codes.astype(jnp.float32)
    magnitude = _power(jnp.abs(steps), code) * spread
    if code.signed:
        return jnp.where(steps < 0, -magnitude, magnitude)
    # A device may flush numbers below the smallest normal one to zero.
    return jnp.where((steps != 0) & (magnitude < _TINY), _TINY, magnitude)


def _root(part: Array, code: Code) -> Array:
    return jnp.sqrt(part) if code.signed else jnp.sqrt(jnp.sqrt(part))


def _power(steps: Array, code: Code) -> Array:
    """Returns the part of the scale that codes encode: exactly 1 for the largest one.

    It uses multiplications only, which every compiler computes in the same way.
    """
    part = steps * np.float32(1 / code.levels)
    part = part * part
    return part if code.signed else part * part


def scales_of(x: Float32[Array, "..."], code: Code) -> Array | None:
    """Returns the largest magnitude of each block, NaN if a number is invalid.

    It compares the bits, whose order is that of the magnitudes. The maximum is stored
    unchanged: arithmetic after it would be one more kernel. None for bfloat16.
    """
    if not code.blocks:
        return None
    layout = layout_of(x.shape)
    blocks = layout.in_blocks(x)
    bits = bits_of(blocks)
    if code.signed:
        bits = bits & np.uint32(0x7FFFFFFF)
    else:
        bits = jnp.where(blocks == 0, np.uint32(0), bits)  # minus zero
    # Infinity, NaN, and negative numbers with their sign bit.
    bits = jnp.where(bits < INFINITE, bits, NAN)
    return number_of(lax.reduce(bits, _TINY.view("uint32"), lax.max, [layout.axis + 1]))


# --- Arrays ---------------------------------------------------------------------------


class CompressedArray(Whole):
    """An array of an optimizer's state in 8 or 16 bits.

    Attributes:
        arrays: Codes and scales by name. The name of the codes contains their dtype,
            such as `codes_int8`, so that a checkpoint with another code does not load.
        code: The encoding of the numbers.

    It has the `shape` of the array; `full()` returns it in float32. It supports no
    arithmetic, and arithmetic on its arrays, as by `jax.tree.map` over a state, is
    meaningless; moving, stacking, saving and selecting them works.
    """

    arrays: dict[str, Array]
    code: Code = eqx.field(static=True)

    def __init__(self, codes: Array, scales: Array | None, code: Code) -> None:
        self.arrays = {code.name: codes}
        if scales is not None:
            self.arrays["scales"] = scales
        self.code = code

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "arrays" not in state:  # pickled before codes had names
            codes, scales, code = (state[k] for k in ("codes", "scales", "code"))
            state = vars(CompressedArray(codes, scales, code))
        vars(self).update(state)

    @property
    def codes(self) -> Array:
        """Integers of 8 or 16 bits, or bfloat16, of the shape of the array."""
        return self.arrays[self.code.name]

    @property
    def scales(self) -> Array | None:
        """The largest magnitude of each block of up to 128 numbers, in float32.

        NaN for a block that contained NaN or an infinity. None for bfloat16.
        """
        return self.arrays.get("scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.arrays[self.code.name].shape  # also of a type

    @property
    def dtype(self) -> np.dtype:
        """The dtype of `full()`."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        arrays = self.arrays.values()
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

    def _words(self) -> str:
        return (
            f"An array of an optimizer's state, {list(self.shape)} in {self.code}, "
            "does not support arithmetic. Read it: `full()`, or all of a state: "
            "`mpx.full_state(state)`. What was computed becomes a state again by "
            "`init(params, full)` of `mpx.compress_state(optimizer)`."
        )

    def full(self) -> Float32[Array, "..."]:
        """Returns the array in float32.

        Raises:
            ValueError: The arrays do not match this code.
        """
        codes, scales, code = self.codes, self.scales, self.code
        is_whole = getattr(codes, "dtype", None) == code.dtype
        if is_whole and code.blocks:
            layout = layout_of(codes.shape)
            is_whole = getattr(scales, "shape", None) == layout.scales_shape(
                codes.shape
            ) and (layout.is_even or not varying_axes(codes))
        if not is_whole:
            raise ValueError(
                f"A `CompressedArray` in {code} has {code.dtype} and a float32 scale "
                f"for each block; got {describe(codes)} and {describe(scales)}. Its "
                "arrays are meaningless alone: restore them unchanged, with "
                "`optimizer.init(params)` as the template, and compute with "
                "`full()`. In `shard_map`, shards must contain whole blocks; a state "
                "that was made there is read there."
            )
        return decode(codes, scales, code)


def compressed(
    x: Array,
    code: Code,
    noise: Noise,
    before: CompressedArray | None = None,
    scales: Array | None = None,
) -> CompressedArray:
    """Encodes an array.

    Args:
        x: The numbers.
        code: Their format.
        noise: Draws for the rounding.
        before: The array before the step. Unchanged numbers keep their codes: they are
            not rounded again.
        scales: The scales of its blocks, if known.
    """
    x = jnp.asarray(x, jnp.float32)
    scales = scales_of(x, code) if scales is None else scales
    codes = encode(x, scales, code, noise)
    if before is not None:
        is_same = x == before.full()
        if scales is not None and before.scales is not None:
            layout = layout_of(x.shape)
            now, then = (layout.spread(s, x.shape) for s in (scales, before.scales))
            is_same = is_same & (now == then)
        codes = jnp.where(is_same, before.codes, codes)
    return CompressedArray(codes, scales, code)
