"""The three products of a linear layer as `jax.lax.dot_general`s.

`left` and `right` are the operands, in any layout that `dot_general` has: batch axes,
contracted axes and free axes in any order. Its result has the batch axes, then left's
free ones, then right's. The gradient of either operand is again a product: of the
result's gradient and the other operand, contracted over the other one's free axes. What
comes out has its axes in another order than the operand, hence the permutation.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from .._typing import Length, Shape

Axes = tuple[int, ...]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class Contraction(NamedTuple):
    """A product of two arrays.

    Attributes:
        dimension_numbers: Those of `jax.lax.dot_general`.
        permutation: The order in which to take the axes of its result.
    """

    dimension_numbers: DimensionNumbers
    permutation: Axes

    def sizes(self, left: Shape, right: Shape) -> tuple[Length, Length, Length]:
        """How many rows, columns and contracted numbers the product has.

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
        """The same product with its operands in the other order."""
        (lc, rc), (lb, rb) = self.dimension_numbers
        batch = len(lb)
        left, right = left_rank - batch - len(lc), right_rank - batch - len(rc)
        order = [*range(batch), *range(batch + right, batch + right + left)]
        order += range(batch, batch + right)
        permutation = tuple(order[axis] for axis in self.permutation)
        return Contraction(((rc, lc), (rb, lb)), permutation)

    @property
    def is_ordered(self) -> bool:
        """Whether the axes of the result are in place."""
        return self.permutation == tuple(range(len(self.permutation)))


class LinearContractions(NamedTuple):
    """The products of a linear layer, with their operands.

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
    """The product of these dimension numbers and the products of its derivatives."""
    (lc, rc), (lb, rb) = dimension_numbers
    left_free = _free(left_rank, lc, lb)
    right_free = _free(right_rank, rc, rb)
    batch = tuple(range(len(lb)))
    first = len(lb) + len(left_free)  # of right's free axes, in the result
    rank = first + len(right_free)
    left_part = tuple(range(len(lb), first))
    right_part = tuple(range(first, rank))
    forward = Contraction(dimension_numbers, tuple(range(rank)))
    # Of an operand the contracted axes stay, in the order that they stand in.
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
    """The shape of the product of arrays of these shapes."""
    (lc, rc), (lb, rb) = dimension_numbers
    batch = tuple(left[axis] for axis in lb)
    rows = tuple(left[axis] for axis in _free(len(left), lc, lb))
    columns = tuple(right[axis] for axis in _free(len(right), rc, rb))
    return batch + rows + columns


def as_matrices(
    dimension_numbers: DimensionNumbers, left: Array, right: Array
) -> tuple[Array, Array, DimensionNumbers, Shape]:
    """Brings operands into the layout in which blocks lie along one axis.

    Args:
        dimension_numbers: Those of a product.
        left: Its left operand.
        right: Its right operand.

    Returns:
        The operands as [*batch, rows, contracted] and [*batch, contracted, columns],
        the dimension numbers of their product, and the shape of the product asked for,
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
    """The array with zeros after the end of an axis, up to a length."""
    missing = length - x.shape[axis]
    # A dimension that only a call knows (`jax.export`) cannot be compared.
    if isinstance(missing, int) and missing <= 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def _free(rank: int, contracted: Axes, batch: Axes) -> Axes:
    taken = {*contracted, *batch}
    return tuple(axis for axis in range(rank) if axis not in taken)


def _order(destinations: list[int]) -> Axes:
    """The permutation that brings axis i to `destinations[i]`."""
    return tuple(sorted(range(len(destinations)), key=destinations.__getitem__))
