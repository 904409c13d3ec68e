"""`LinearProduct`: the matrix product of a linear layer, quantized in both directions.

On devices with units of low precision the three products are computed with the bits of
their operands; see `_products`.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
from jaxtyping import Array

from .._typing import AnyArray, Shape
from ._contraction import (
    DimensionNumbers,
    LinearContractions,
    as_matrices,
    contractions,
    product_shape,
)
from ._operands import has_blocks
from ._product import AbstractProduct, Extra, Residuals, without_padding
from ._products import Operand, apart, has_units, multiply, stored
from ._recipes import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProduct(AbstractProduct):
    """A matrix product of data and a weight.

    Attributes:
        dimension_numbers: Those of `jax.lax.dot_general`, as tuples.
        is_weight_first: Whether the left operand is the weight.
    """

    dimension_numbers: DimensionNumbers
    is_weight_first: bool

    def _axes(self, role: Role) -> tuple[int, int]:
        if role is Role.GRADIENT:
            # dx first: of the left operand it contracts columns, of the right one rows.
            return (-2, -1) if self.is_weight_first else (-1, -2)
        is_left = (role is Role.WEIGHT) == self.is_weight_first
        return (-1, -2) if is_left else (-2, -1)

    def _arranged(
        self, left: Array, right: Array, *extra: AnyArray
    ) -> tuple[Array, Array, Extra]:
        return *self._ordered(left, right), extra

    def _ordered(self, data: object, weight: object) -> tuple[Any, Any]:
        """Two things as (left, right), or (left, right) as (data, weight)."""
        return (weight, data) if self.is_weight_first else (data, weight)

    def _plain(self, data: Array, weight: Array, extra: Extra) -> Array:
        left, right = self._ordered(data, weight)
        return jax.lax.dot_general(left, right, self.dimension_numbers)

    def _prepared(
        self, data: Array, weight: Array
    ) -> tuple[Self, Array, Array, Shape | None]:
        if not has_blocks(self.recipe):
            return self, data, weight, None
        left, right, matrices, shape = as_matrices(
            self.dimension_numbers, *self._ordered(data, weight)
        )
        product = dataclasses.replace(self, dimension_numbers=matrices)
        return product, *self._ordered(left, right), shape

    def _contractions(self, ranks: tuple[int, int]) -> LinearContractions:
        """The contractions of data and weight of so many axes, and the gradients'."""
        return contractions(self.dimension_numbers, *self._ordered(*ranks))

    def _has_units(self, x: Operand, w: Operand) -> bool:
        numbers = self._contractions((x.ndim, w.ndim))
        return has_units(*self._ordered(x, w), numbers.forward, self.target)

    def _forward(
        self,
        x: Operand,
        w: Operand,
        extra: Extra,
        shapes: tuple[Shape, Shape],
    ) -> Array:
        forward = self._contractions((x.ndim, w.ndim)).forward
        contracted, _ = self._ordered(*forward.dimension_numbers[0])
        x = apart(x, w, contracted, self.target)
        product = functools.partial(multiply, target=self.target, half=self.dtype)
        y = product(*self._ordered(x, w), forward, self.dtype, is_backward=False)
        # Square blocks pad what is not contracted, too.
        shape = product_shape(self.dimension_numbers, *self._ordered(*shapes))
        return without_padding(y, shape)

    def _backward(
        self, kept: Residuals, for_data: Operand, for_weight: Operand, shape: Shape
    ) -> tuple[Array, Array]:
        likes = kept.like_data, kept.like_weight
        numbers = self._contractions((len(likes[0].shape), len(likes[1].shape)))
        left, right = self._ordered(kept.data, kept.weight)
        for_left, for_right = self._ordered(for_data, for_weight)
        if not has_units(for_left, right, numbers.for_left, self.target):
            for_left, for_right = stored(for_left, for_right)
        product = functools.partial(
            multiply, target=self.target, half=self.dtype, is_backward=True
        )
        is_summed = self.reduce_dtype is not None
        gives = (self.dtype, False), (self.weight_gradient_dtype, is_summed)
        left_gives, right_gives = self._ordered(*gives)
        dx, dw = self._ordered(
            product(for_left, right, numbers.for_left, *left_gives),
            product(left, for_right, numbers.for_right, *right_gives),
        )
        return without_padding(dx, likes[0].shape), without_padding(dw, likes[1].shape)
