"""The three matmuls of a linear layer as `jax.lax.dot_general`s, and blocks in groups.

`left` and `right` are the operands, in any layout of `dot_general`: batch axes,
contracted axes and free axes in any order. Its result has the batch axes, then left's
free axes, then right's. The gradient of either operand is again a matmul: of the
result's gradient and the other operand, contracted over that operand's free axes. Its
result has another order of axes than the operand, hence the permutation.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from ..._base.typing import Length, Shape
from .._formats._format import Format
from .._formats._rounding import largest_magnitude
from .._quantizers._array import QuantizedArray

Axes = tuple[int, ...]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class Contraction(NamedTuple):
    """A matmul of two arrays.

    Attributes:
        dimension_numbers: Those of `jax.lax.dot_general`.
        permutation: The order in which to take the axes of its result.
    """

    dimension_numbers: DimensionNumbers
    permutation: Axes

    def sizes(self, left: Shape, right: Shape) -> tuple[Length, Length, Length]:
        """Returns the numbers of rows, columns and contracted elements.

        Args:
            left: The shape of the left operand.
            right: The shape of the right operand.
        """
        (lc, rc), (lb, rb) = self.dimension_numbers
        return (
            math.prod(left[axis] for axis in _free(len(left), lc, lb)),
            math.prod(right[axis] for axis in _free(len(right), rc, rb)),
            math.prod(left[axis] for axis in lc),
        )

    def swapped(self, left_rank: int, right_rank: int) -> "Contraction":
        """Returns the same matmul with its operands in the other order."""
        (lc, rc), (lb, rb) = self.dimension_numbers
        batch = len(lb)
        left, right = left_rank - batch - len(lc), right_rank - batch - len(rc)
        order = [*range(batch), *range(batch + right, batch + right + left)]
        order += range(batch, batch + right)
        permutation = tuple(order[axis] for axis in self.permutation)
        return Contraction(((rc, lc), (rb, lb)), permutation)

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        """The axes of left and of right that are summed."""
        return self.dimension_numbers[0]

    def placed(self, scale: Array, side: int, ranks: tuple[int, int]) -> Array:
        """Returns an operand's scale in the axes of the result, not permuted.

        Args:
            scale: A scalar, or of length 1 along contracted axes.
            side: 0 for the left operand, 1 for the right one.
            ranks: The ranks of both.
        """
        if not scale.ndim:
            return scale
        contracted, batch = (pair[side] for pair in self.dimension_numbers)
        free = _free(ranks[side], contracted, batch)
        others = ranks[1 - side] - len(contracted) - len(batch)
        lengths = [scale.shape[axis] for axis in batch]
        here = [scale.shape[axis] for axis in free]
        parts = [here, [1] * others] if side == 0 else [[1] * others, here]
        return scale.transpose(*batch, *free, *contracted).reshape(
            *lengths, *parts[0], *parts[1]
        )

    @property
    def is_ordered(self) -> bool:
        """Whether the permutation is the identity."""
        return self.permutation == tuple(range(len(self.permutation)))


class LinearContractions(NamedTuple):
    """The matmuls of a linear layer, with their operands.

    Attributes:
        forward: left, right -> result.
        for_left: gradient, right -> gradient of left.
        for_right: left, gradient -> gradient of right.
    """

    forward: Contraction
    for_left: Contraction
    for_right: Contraction


def contractions(
    dimension_numbers: DimensionNumbers, left_rank: int, right_rank: int
) -> LinearContractions:
    """Returns the matmul of these dimension numbers and those of its derivatives."""
    (lc, rc), (lb, rb) = dimension_numbers
    left_free = _free(left_rank, lc, lb)
    right_free = _free(right_rank, rc, rb)
    batch = tuple(range(len(lb)))
    first = len(lb) + len(left_free)  # of right's free axes, in the result
    rank = first + len(right_free)
    left_part = tuple(range(len(lb), first))
    right_part = tuple(range(first, rank))
    forward = Contraction(dimension_numbers, tuple(range(rank)))
    # An operand's contracted axes come from the other operand, in its order.
    left_rest = [axis for _, axis in sorted(zip(rc, lc, strict=True))]
    right_rest = [axis for _, axis in sorted(zip(lc, rc, strict=True))]
    for_left = Contraction(
        ((right_part, right_free), (batch, rb)), _order([*lb, *left_free, *left_rest])
    )
    for_right = Contraction(
        ((left_free, left_part), (lb, batch)), _order([*rb, *right_rest, *right_free])
    )
    return LinearContractions(forward, for_left, for_right)


def product_shape(
    dimension_numbers: DimensionNumbers, left: Shape, right: Shape
) -> Shape:
    """Returns the shape of the product of arrays of these shapes."""
    (lc, rc), (lb, rb) = dimension_numbers
    batch = tuple(left[axis] for axis in lb)
    rows = tuple(left[axis] for axis in _free(len(left), lc, lb))
    return batch + rows + tuple(right[axis] for axis in _free(len(right), rc, rb))


def as_matrices(
    dimension_numbers: DimensionNumbers, left: Array, right: Array
) -> tuple[Array, Array, DimensionNumbers, Shape]:
    """Brings operands into the layout in which blocks are along one axis.

    Args:
        dimension_numbers: Those of a matmul.
        left: Its left operand.
        right: Its right operand.

    Returns:
        The operands as [*batch, rows, contracted] and [*batch, contracted, columns],
        the dimension numbers of their matmul, and the shape of the requested product,
        whose elements are in the same order.
    """
    (lc, rc), (lb, rb) = dimension_numbers
    left_free = _free(left.ndim, lc, lb)
    right_free = _free(right.ndim, rc, rb)
    shape = product_shape(dimension_numbers, left.shape, right.shape)
    batch = shape[: len(lb)]
    rows = math.prod(shape[len(lb) : len(lb) + len(left_free)])
    columns = math.prod(shape[len(lb) + len(left_free) :])
    depth = math.prod(left.shape[axis] for axis in lc)
    left = left.transpose(*lb, *left_free, *lc)
    left = left.reshape(*batch, rows, depth)
    right = right.transpose(*rb, *rc, *right_free)
    right = right.reshape(*batch, depth, columns)
    first = tuple(range(len(batch)))
    matrix = (((len(batch) + 1,), (len(batch),)), (first, first))
    return left, right, matrix, shape


def padded(x: Array, axis: int, length: Length) -> Array:
    """Pads an axis with zeros at its end, up to a length."""
    missing = length - x.shape[axis]
    # A dimension that is symbolic (`jax.export`) cannot be compared.
    if isinstance(missing, int) and missing <= 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def _free(rank: int, contracted: Axes, batch: Axes) -> Axes:
    taken = {*contracted, *batch}
    return tuple(axis for axis in range(rank) if axis not in taken)


def _order(destinations: list[int]) -> Axes:
    """Returns the permutation that brings axis i to `destinations[i]`."""
    return tuple(sorted(range(len(destinations)), key=destinations.__getitem__))


# --- Rows in groups: no block has rows of two groups ----------------------------------
#
# In the gradient of an expert's weight, blocks are along the rows, and the next
# expert's rows may be a thousand times larger. One scale for both would turn the small
# ones into noise, which a Hadamard transform spreads over all rows of the block.
#
# So if a group begins inside a block, its rows in that block are quantized separately:
# `whole` has zeros in their place, and `starts` has them followed by zeros, as if they
# were the last rows of an array.
#
#     rows     a a a a a b b c | c c c c c c c c
#     whole    a a a a a 0 0 0 | c c c c c c c c     blocks as without groups
#     starts   b b 0 0 0 0 0 0   c 0 0 0 0 0 0 0     one for each group but the first
#
# If all groups are whole blocks, no row moves and the bits are those of the array in
# blocks. Rows sharded over devices stay on their device, except for one block of each
# group.

Sizes = Int[Array, "*batch groups"]


class GroupedArray(eqx.Module):
    """Rows of groups in low precision; see the section comment above.

    Attributes:
        whole: The blocks as without groups. With 8 bits its payload has all values.
        starts: The blocks of groups that begin inside a block; with 8 bits only their
            scales. 4-bit values share bytes with their neighbours, and may be
            transformed together with more rows than a group has there.
        sizes: The number of rows of each group.
    """

    whole: QuantizedArray
    starts: QuantizedArray | Array
    sizes: Sizes

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.whole.ndim

    def _factors(self, *, rotated: bool) -> tuple[Array, Array | None]:
        """Returns the values and their common factor; see `QuantizedArray`."""
        starts, block = self.starts, self.whole.block
        if not isinstance(starts, QuantizedArray):
            starts = _with_payload(self.whole, starts, self.sizes)
        x, scale = self.whole._factors(rotated=rotated)
        others, scale_there = starts._factors(rotated=rotated)
        if scale is not None and scale_there is not None:
            ends = jnp.cumsum(self.sizes, axis=-1)
            scale_there = jnp.where((ends % block > 0).any(), scale_there, 0)
            # The larger one, so that the values of both stay in range.
            here, there, scale = scale, scale_there, jnp.maximum(scale, scale_there)
            x, others = x * (here / scale), others * (there / scale)
        return _with_starts(x, others, self.sizes, block), scale


def quantized_in_groups(
    quantize: Callable[[Array], QuantizedArray], x: Array, sizes: Sizes, block: int
) -> QuantizedArray | GroupedArray:
    """Quantizes rows so that no block has rows of two groups.

    Args:
        quantize: Quantizes an array in blocks along its rows.
        x: Rows, [*batch, rows, columns].
        sizes: The number of rows of each group, [*batch, groups] or [groups].
        block: The length of a block.
    """
    if sizes.shape[-1] < 2:
        return quantize(x)
    blocks = (x.shape[-2] + block - 1) // block
    x = padded(x, -2, blocks * block)
    is_late, _ = _late_rows(sizes, x.shape[-2], block)
    whole = quantize(jnp.where(_beside(is_late, x), jnp.zeros_like(x), x))
    starts = quantize(_starts_of(x, sizes, block))
    if whole.format is Format.E2M1:
        return GroupedArray(whole, starts, sizes)
    payload = _with_starts(whole.payload, starts.payload, sizes, block)
    whole = dataclasses.replace(whole, payload=payload)
    return GroupedArray(whole, starts.inverse_scale, sizes)


def amax_of_groups(sizes: Sizes, amax: Array) -> Array:
    """Returns for each row the largest amax of its group.

    Args:
        sizes: The number of rows of each group, [*batch, groups] or [groups].
        amax: The amax of each row, [*batch, rows, 1].
    """
    ends = jnp.expand_dims(jnp.cumsum(sizes, axis=-1), -2)
    row = lax.broadcasted_iota(jnp.int32, (amax.shape[-2], 1), 0)
    is_in = (row < ends) & (row >= ends - jnp.expand_dims(sizes, -2))
    of_groups = largest_magnitude(jnp.where(is_in, amax, 0), (amax.ndim - 2,))
    found = jnp.where(is_in, jnp.expand_dims(of_groups, -2), 0)
    return largest_magnitude(found, (found.ndim - 1,))[..., None]


def _late_rows(sizes: Sizes, rows: Length, block: int) -> tuple[Array, Array]:
    """Returns which rows are of a group that begins in their block, and their place.

    Two arrays [*batch, rows]; the place is the index into the result of `_starts_of`.
    """
    ends = jnp.expand_dims(jnp.cumsum(sizes, axis=-1), -2)
    shape = (*sizes.shape[:-1], rows, sizes.shape[-1])
    row = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2)
    is_past = ends <= row
    group = is_past.sum(axis=-1)  # the group of each row
    start = jnp.max(jnp.where(is_past, ends, 0), axis=-1)
    row = row[..., 0]
    is_late = (start % block > 0) & (start // block == row // block)
    is_late &= group < sizes.shape[-1]
    return is_late, (group - 1) * block + row - start


def _starts_of(x: Array, sizes: Sizes, block: int) -> Array:
    """Returns a block for each group but the first: its rows in its first block.

    All other rows are zeros, also of a group that begins at a block boundary.
    """
    ends = jnp.cumsum(sizes, axis=-1)[..., None]
    start, end = ends[..., :-1, :], ends[..., 1:, :]
    shape = (*start.shape[:-1], block)
    row = start + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    is_here = (row < end) & (row // block == start // block) & (start % block > 0)
    flat = (*shape[:-2], shape[-2] * block)
    found = _rows_of(x, row.reshape(flat))
    return jnp.where(_beside(is_here.reshape(flat), x), found, jnp.zeros_like(found))


def _with_starts(x: Array, starts: Array, sizes: Sizes, block: int) -> Array:
    """Puts the rows of groups that begin inside of blocks in their places."""
    is_late, place = _late_rows(sizes, x.shape[-2], block)
    return jnp.where(_beside(is_late, x), _rows_of(starts, place), x)


def _with_payload(whole: QuantizedArray, scales: Array, sizes: Sizes) -> QuantizedArray:
    """Returns the blocks with these scales and the payload of `whole`."""
    # As bits, which devices that share the rows can exchange on every platform.
    bits = lax.bitcast_convert_type(whole.payload, jnp.uint8)
    bits = _starts_of(bits, sizes, whole.block)
    payload = lax.bitcast_convert_type(bits, whole.payload.dtype)
    return dataclasses.replace(whole, payload=payload, inverse_scale=scales)


def _rows_of(x: Array, places: Array) -> Array:
    return jnp.take_along_axis(x, _beside(places, x), axis=-2, mode="clip")


def _beside(by_row: Array, x: Array) -> Array:
    """Reshapes one value per row to the rank of the rows."""
    batch = x.ndim - 1 - by_row.ndim
    return by_row.reshape((1,) * batch + by_row.shape + (1,))
