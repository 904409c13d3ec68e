r"""`RaggedProduct`: the products of experts, quantized in both directions.

`jax.lax.ragged_dot`: rows of the data come in groups, one after the other, and each
group has a matrix of its own.

$$y_i = Q(x_i)\,Q(w_{e(i)}) \qquad dx_i = Q(g_i)\,Q(w_{e(i)})^T \qquad
    dw_e = \sum_{i: e(i) = e} Q(x_i)^T\,Q(g_i)$$

All recipes have it. One scale is that of all data, or of the stack of all weights.
Blocks of dw lie along the rows, of one group each: see `_groups`. Rows after the last
group are in no product and count for no amax.

No device has an FP8 form of it in XLA: on GPUs and TPUs it is the product of half
precision. What is gained are the bytes kept for the backward pass, not speed.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._typing import AnyArray
from ._dequantized_product import AbstractDequantizedProduct
from ._operands import Copies
from ._product import Extra, Residuals
from ._recipes import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(AbstractDequantizedProduct):
    """A ragged product of data and weights: all that is known before numbers are.

    Attributes:
        dimension_numbers: Those of `jax.lax.ragged_dot_general`, see `has_ragged_form`.
    """

    plural: ClassVar[str] = "ragged matmuls"
    dimension_numbers: lax.RaggedDotDimensionNumbers

    def _axes(self, role: Role) -> tuple[int, int]:
        return (-2, -1) if role is Role.WEIGHT else (-1, -2)

    def _arranged(
        self, left: Array, right: Array, *extra: AnyArray
    ) -> tuple[Array, Array, Extra]:
        """Data [*batch, rows, contracted], weights [*batch, groups, contracted, ...].

        And how many rows each group has: [*batch, groups], or [groups] for all of the
        batch.
        """
        numbers, (sizes,) = self.dimension_numbers, extra
        (contracted, summed), (left_batch, batch) = numbers.dot_dimension_numbers
        rows = numbers.lhs_ragged_dimensions
        groups = (*batch, *numbers.rhs_group_dimensions, *summed)
        rest = (axis for axis in range(right.ndim) if axis not in groups)
        data = left.transpose(*left_batch, *rows, *contracted)
        # In fewer bits the sums of sizes would wrap around.
        sizes = jnp.asarray(sizes, jnp.int32)
        return data, right.transpose(*groups, *rest), (sizes,)

    def _copies(
        self, role: Role, step: Array | None = None, extra: Extra = ()
    ) -> Copies:
        copies = super()._copies(role, step, extra)
        if role is Role.WEIGHT:  # blocks lie inside of the matrix of a group
            return copies
        return dataclasses.replace(copies, sizes=extra[0])

    def _read(self, x: Array, extra: Extra) -> Array:
        (sizes,) = extra
        rows = lax.broadcasted_iota(sizes.dtype, x.shape, x.ndim - 2)
        count = jnp.sum(sizes, axis=-1)[..., None, None]
        return jnp.where(rows < count, x, jnp.zeros_like(x))

    def _multiply(
        self, extra: Extra, data: Array, weight: Array, precision: Any = None
    ) -> Array:
        return _times_matrices(data, weight, extra, -2, precision)

    def _for_data(self, kept: Residuals, g: Array, w: Array, precision: Any) -> Array:
        return _times_matrices(g, w, kept.extra, -1, precision)

    def _for_weight(self, kept: Residuals, x: Array, g: Array, precision: Any) -> Array:
        rows = x.ndim - 2
        y = _ragged(x, g, kept.extra, ((rows,), (rows,)), [], precision)
        return jnp.moveaxis(y, 0, rows)  # a sum for each group


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


def _times_matrices(
    left: Array, weight: Array, extra: Extra, axis: int, precision: Any
) -> Array:
    """Rows times the matrix of their group, along one of its axes."""
    contracted = (left.ndim - 1,), (weight.ndim + axis,)
    return _ragged(left, weight, extra, contracted, [left.ndim - 2], precision)


def _ragged(
    left: Array,
    right: Array,
    extra: Extra,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    groups: list[int],
    precision: Any,
) -> Array:
    """A ragged product in float32, of the rows that are the left array's last but one.

    Args:
        left: The rows.
        right: What they are multiplied by.
        extra: How many rows each group has.
        contracted: The axes that are summed.
        groups: The axis of the right array that has one matrix for each group.
        precision: As in JAX.
    """
    (sizes,), batch = extra, tuple(range(left.ndim - 2))
    numbers = lax.RaggedDotDimensionNumbers(
        (contracted, (batch, batch)),
        lhs_ragged_dimensions=[left.ndim - 2],
        rhs_group_dimensions=groups,
    )
    wide = jnp.dtype("float32")
    return lax.ragged_dot_general(
        left, right, sizes, numbers, precision=precision, preferred_element_type=wide
    )
