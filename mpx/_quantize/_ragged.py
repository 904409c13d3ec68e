r"""`linear_ragged_product`: the products of experts, quantized in both directions.

`jax.lax.ragged_dot`: rows of the data come in groups, one after the other, and each
group has a matrix of its own.

$$y_i = Q(x_i)\,Q(w_{e(i)}) \qquad dx_i = Q(g_i)\,Q(w_{e(i)})^T \qquad
    dw_e = \sum_{i: e(i) = e} Q(x_i)^T\,Q(g_i)$$

All recipes have it. One scale is that of all data, or of the stack of all weights.
Blocks of dw lie along the rows; rows of two groups in one block share a scale and
nothing else. Rows after the last group are in no product and count for no amax.

No device has an FP8 form of it in XLA: on GPUs and TPUs it is the product of half
precision. What is gained are the bytes kept for the backward pass, not speed.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._dequantized_product import AbstractDequantizedProduct, Multiply
from ._operands import Copies
from ._product import quantized_product
from ._recipes import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(AbstractDequantizedProduct):
    """A ragged product of data and weights: all that is known before numbers are.

    Attributes:
        dimension_numbers: Those of `jax.lax.ragged_dot_general`, see `has_ragged_form`.
    """

    plural: ClassVar[str] = "ragged products"
    dimension_numbers: lax.RaggedDotDimensionNumbers

    def _copies(self, role: Role) -> Copies:
        axes = (-2, -1) if role is Role.WEIGHT else (-1, -2)
        return Copies(self.recipe, role, self.dtype, self.target, self._join(), axes)

    def _read(self, x: Array, extra: tuple[Array, ...]) -> Array:
        (sizes,) = extra
        rows = lax.broadcasted_iota(sizes.dtype, x.shape, x.ndim - 2)
        count = jnp.sum(sizes, axis=-1)[..., None, None]
        return jnp.where(rows < count, x, jnp.zeros_like(x))

    def _multiply(self, extra: tuple[Array, ...]) -> Multiply:
        return lambda x, w, precision: _multiply(x, w, extra, -2, precision)

    def _for_data(self, extra: tuple[Array, ...], data: object) -> Multiply:
        return lambda g, w, precision: _multiply(g, w, extra, -1, precision)

    def _for_weight(self, extra: tuple[Array, ...], weight: object) -> Multiply:
        return lambda x, g, precision: _sum_by_group(x, g, extra, precision)


def linear_ragged_product(
    product: RaggedProduct,
    data: Array,
    weight: Array,
    group_sizes: Array | np.ndarray,
    scales: Array | None = None,
    step: Array | None = None,
) -> Array:
    """The ragged product of a layer of experts; see `quantized_product`.

    Args:
        product: What product, and how.
        data: The left operand of `jax.lax.ragged_dot_general`.
        weight: The right operand.
        group_sizes: How many rows each group has: [*batch, groups], or [groups] for
            all of the batch.
        scales: The scales of delayed scaling.
        step: The number of the training step, for stochastic rounding.

    Returns:
        Of shape [*batch, rows, columns]; zero in rows after the last group.
    """
    call = "`linear_ragged_product(product, data, weight, group_sizes, scales)`"
    numbers = product.dimension_numbers
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    data = data.transpose(*left_batch, *numbers.lhs_ragged_dimensions, *left)
    groups = (*right_batch, *numbers.rhs_group_dimensions, *right)
    rest = (axis for axis in range(weight.ndim) if axis not in groups)
    weight = weight.transpose(*groups, *rest)
    # In fewer bits the sums of sizes would wrap around.
    sizes = jnp.asarray(group_sizes, jnp.int32)
    return quantized_product(call, product, data, weight, scales, step, (sizes,))


def has_ragged_form(
    numbers: lax.RaggedDotDimensionNumbers, left_rank: int, right_rank: int
) -> bool:
    """Whether a ragged product is of rows in groups and a matrix for each group."""
    (left, _), (batch, _) = numbers.dot_dimension_numbers
    ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    is_sum_whole = not set(ragged) & {*left, *batch}
    ranks = (left_rank - len(batch), right_rank - len(batch))
    parts = (len(left), len(ragged), len(groups))
    return is_sum_whole and ranks == (2, 3) and parts == (1, 1, 1)


def _multiply(
    left: Array, weight: Array, extra: tuple[Array, ...], axis: int, precision: object
) -> Array:
    """Rows times the matrix of their group, along one of its axes, in float32."""
    batch = tuple(range(left.ndim - 2))
    numbers = lax.RaggedDotDimensionNumbers(
        (((left.ndim - 1,), (weight.ndim + axis,)), (batch, batch)),
        lhs_ragged_dimensions=[left.ndim - 2],
        rhs_group_dimensions=[len(batch)],
    )
    return _ragged(left, weight, extra, numbers, precision)


def _sum_by_group(
    left: Array, right: Array, extra: tuple[Array, ...], precision: object
) -> Array:
    """The sum over the rows of each group, in float32: [*batch, groups, ...]."""
    batch = tuple(range(left.ndim - 2))
    rows = left.ndim - 2
    numbers = lax.RaggedDotDimensionNumbers(
        (((rows,), (rows,)), (batch, batch)),
        lhs_ragged_dimensions=[rows],
        rhs_group_dimensions=[],
    )
    y = _ragged(left, right, extra, numbers, precision)
    return jnp.moveaxis(y, 0, len(batch))


def _ragged(
    left: Array,
    right: Array,
    extra: tuple[Array, ...],
    numbers: lax.RaggedDotDimensionNumbers,
    precision: Any,
) -> Array:
    (sizes,) = extra
    return lax.ragged_dot_general(
        left,
        right,
        sizes,
        numbers,
        precision=precision,
        preferred_element_type=jnp.dtype("float32"),
    )
