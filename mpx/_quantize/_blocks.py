"""Arrays as blocks: one axis, or a pair of axes, cut into pieces of equal length.

Axes are kept as negative numbers, so that they still name the same axes when a vmap or
a stack of layers puts an axis in front.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from .._typing import Shape
from ._rounding import largest_magnitude

Axes = tuple[int, ...]


def resolve_axes(
    shape: Shape,
    axis: int | Sequence[int],
    block: int,
    dimensions: int,
    caller: str,
) -> Axes:
    """The axes that blocks lie along, negative and ascending.

    Args:
        shape: The shape of the array.
        axis: One axis, or the two of square blocks. One axis for square blocks stands
            for itself and the last of the others.
        block: The length of a block.
        dimensions: 1, or 2 for square blocks.
        caller: The public call to name in an error.

    Returns:
        As many axes as blocks have dimensions.

    Raises:
        TypeError: An axis is no integer.
        ValueError: An axis does not exist or does not divide into blocks, or there are
            too few or too many.
    """
    given = [axis] if isinstance(axis, int) else axis
    wrong_kind = not isinstance(given, tuple | list) or not all(
        isinstance(one, int) and not isinstance(one, bool) for one in given
    )
    if wrong_kind:
        raise TypeError(
            f"`axis` of {caller} must be an integer or a pair; got {axis!r}."
        )
    rank = len(shape)
    if rank < dimensions:
        raise ValueError(
            f"{caller} with blocks of {_size(block, dimensions)} needs an array of "
            f"at least {dimensions} axes; got shape {shape}. Reshape it, or use "
            "`mpx.quantization.TensorQuantizer`."
        )
    for one in given:
        if not -rank <= one < rank:
            raise ValueError(
                f"`axis` of {caller} must be an axis of the array; got {axis} for "
                f"shape {shape}."
            )
    axes = {one if one < 0 else one - rank for one in given}
    if len(axes) == 1 and dimensions == 2:
        axes |= {max({-1, -2} - axes)}
    if len(axes) != dimensions:
        raise ValueError(
            f"`axis` of {caller} with blocks of {_size(block, dimensions)} must name "
            f"at most {dimensions} different axes; got {axis!r}."
        )
    for one in sorted(axes):
        if shape[one] % block:
            missing = -shape[one] % block
            raise ValueError(
                f"{caller} needs axes divisible into blocks of "
                f"{_size(block, dimensions)}; got shape {shape}, whose axis {one} "
                f"has length {shape[one]}. Pad that axis with {missing} zeros "
                "(`jnp.pad`), choose another `axis`, or use "
                "`mpx.quantization.TensorQuantizer`."
            )
    return tuple(sorted(axes))


def split(x: Array, axes: Axes, block: int) -> Array:
    """Each axis of length n as two, of lengths n / block and block."""
    shape: list[int] = []
    for index, length in enumerate(x.shape):
        cut = index - x.ndim in axes
        shape += [length // block, block] if cut else [length]
    return x.reshape(shape)


def inner_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Where the axes inside of blocks are in what `split` returns."""
    firsts = sorted(axis + rank for axis in axes)
    return tuple(first + 1 + index for index, first in enumerate(firsts))


def block_maximum(
    x: Array,
    axes: Axes,
    block: int,
    largest: Callable[..., Array] = largest_magnitude,
) -> Array:
    """The largest magnitude of each block; NaN where there is a NaN, 0 if empty."""
    blocks = split(x, axes, block)
    return largest(blocks, inner_axes(x.ndim, axes))


def multiply_blocks(x: Array, factors: Array, axes: Axes, block: int) -> Array:
    """Multiplies each block by its own factor, in the shape of `x`."""
    factors = jnp.expand_dims(factors, inner_axes(x.ndim, axes))
    return (split(x, axes, block) * factors).reshape(x.shape)


def _size(block: int, dimensions: int) -> str:
    return f"{block if dimensions == 2 else 1}x{block}"
