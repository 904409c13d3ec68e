r"""How a number of a state is stored in 8 or 16 bits: blocks with a scale, and a code.

A block is up to 128 numbers in a row along one axis, and its scale $s$ the largest
magnitude among them, in float32. An integer $k$ is read as

$$x = \pm s (k / L)^2 \quad\text{(signed)} \qquad
    x = s (k / L)^4 \quad\text{(not negative)}$$

with $L$ = 127 and 255 in 8 bits, 32,767 and 65,535 in 16. A power spends codes on small
numbers: in 8 bits the smallest one is $6 \cdot 10^{-5}$ of the largest of a block, or
$2 \cdot 10^{-10}$ of it for second moments, whose root is what divides.

- A number between two codes is rounded to one of them randomly, so that the mean is the
  number. To the nearest, the code of 0.9 m would be that of m for small m, and an
  average that decays, or follows slowly, would stand still.
- A signed number may become zero. One that may not be negative does not: many
  optimizers divide by its root.
- The largest number of a block is exact, so that what is read and stored again keeps
  its bits.
- NaN or an infinity in a block, or a negative number where none may be, makes the block
  NaN: its scale says so to all who look for NaN.
"""

import dataclasses
import functools
import math
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from ._bits import INFINITE, NAN, Noise, bits_of, number_of, round_randomly

LONGEST_BLOCK = 128
# A shorter block spends an eighth of a byte on its scale.
_SHORTEST_BLOCK = 32
_TINY = np.float32(2.0**-126)

Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Code:
    """How the numbers of an array are stored.

    Attributes:
        bits: 8 or 16.
        signed: Whether they may be negative.
        blocks: Whether they are stored in blocks; else as bfloat16.
    """

    bits: int = 8
    signed: bool = True
    blocks: bool = True

    @property
    def dtype(self) -> np.dtype:
        """The dtype of what is stored."""
        if not self.blocks:
            return np.dtype(jnp.bfloat16)
        return np.dtype(f"{'' if self.signed else 'u'}int{self.bits}")

    @property
    def name(self) -> str:
        """That of the codes among the arrays of a state."""
        return f"codes_{self.dtype}"

    @property
    def levels(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - self.signed) - 1

    def __str__(self) -> str:
        if not self.blocks:
            return "bfloat16"
        return f"{self.bits} bits, {'signed' if self.signed else 'not negative'}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array is cut into blocks.

    Attributes:
        axis: Along which.
        size: How many numbers a block has.
        count: How many blocks; the last one may be shorter.
        is_even: Whether it is not.
    """

    axis: int
    size: int
    count: int
    is_even: bool = True

    def scales_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of an array of this shape."""
        return self._with_axis(shape, self.count)

    def in_blocks(self, x: Array) -> Array:
        """An array with the axis as two: blocks, and the numbers of each."""
        missing = self.size * self.count - x.shape[self.axis]
        if missing:
            x = jnp.pad(x, [(0, missing * (i == self.axis)) for i in range(x.ndim)])
        return x.reshape(self._with_axis(x.shape, self.count, self.size))

    def spread(self, scales: Array, shape: Shape) -> Array:
        """The scale of each number of an array of this shape."""
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
    """Blocks along the last axis; along the longest one if the last is short.

    They are equal if the axis has a divisor from 32 to 128. If not, they are of 128
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
    """The integers that stand for numbers, given their scales; or the bfloat16s."""
    if scales is None:
        return round_randomly(x, 16, noise).astype(jnp.bfloat16)
    layout = layout_of(x.shape)
    # XLA multiplies by inverses where it sees that many numbers have one divisor, which
    # it does not in every shard. That of a scale above 2^126 is taken for zero.
    factor = jnp.where(scales > 1, np.float32(0.25), np.float32(1))
    inverse = layout.spread(1 / (scales * factor), x.shape)
    part = jnp.abs(x) * layout.spread(factor, x.shape) * inverse
    levels = np.float32(code.levels)
    steps = lax.round(_root(part, code) * levels, lax.RoundingMethod.TO_NEAREST_EVEN)
    # The largest number may be computed again with another last bit.
    part = jnp.where(part > np.float32(1 - 2**-20), np.float32(1), part)
    below = jnp.where(_power(steps, code) > part, steps - 1, steps)
    start, end = _power(below, code), _power(below + 1, code)
    is_up = noise.uniform(x.shape) < (part - start) / (end - start)
    steps = jnp.where(is_up, below + 1, below)
    if not code.signed:
        steps = jnp.where((x != 0) & (steps < 1), np.float32(1), steps)
    # What is not a number has a scale that is none, and any code.
    steps = jnp.where(steps <= levels, steps, levels)
    if code.signed:
        steps = jnp.where(x < 0, -steps, steps)
    return steps.astype(code.dtype)


def decode(codes: Array, scales: Array | None, code: Code) -> Float32[Array, "..."]:
    """The numbers that integers and scales stand for."""
    if scales is None:
        return codes.astype(jnp.float32)
    spread = layout_of(codes.shape).spread(scales, codes.shape)
    steps = codes.astype(jnp.float32)
    magnitude = _power(jnp.abs(steps), code) * spread
    if code.signed:
        return jnp.where(steps < 0, -magnitude, magnitude)
    # A device may take what is below the smallest normal number for zero.
    return jnp.where((steps != 0) & (magnitude < _TINY), _TINY, magnitude)


def _root(part: Array, code: Code) -> Array:
    return jnp.sqrt(part) if code.signed else jnp.sqrt(jnp.sqrt(part))


def _power(steps: Array, code: Code) -> Array:
    """The part of the scale that a code stands for: exactly 1 for the largest one.

    By multiplications alone, which every compiler does in the same way.
    """
    part = steps * np.float32(1 / code.levels)
    part = part * part
    return part if code.signed else part * part


def scales_of(x: Float32[Array, "..."], code: Code) -> Array | None:
    """The largest magnitude of each block; NaN for a block that has none.

    By the bits, whose order is that of the magnitudes. The maximum is what is stored:
    arithmetic after it would be one more kernel.
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
