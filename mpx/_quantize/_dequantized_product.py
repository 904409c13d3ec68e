"""Products for which no device has units of low precision: of dequantized operands.

What is gained are the bytes kept for the backward pass, and, on a laptop, the numerics.
Every such product is a function of data and weight, with two gradients; quantizing them
is the same for all, and here. On a GPU or a TPU the numbers are multiplied in half
precision, in which all numbers of 8 bits are exact, elsewhere in float32.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._typing import DTypeLike, Shape
from ._product import AbstractProduct, Extra, Residuals, without_padding
from ._products import Operand, numbers_and_scale, stored, times_scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractDequantizedProduct(AbstractProduct):
    """A product that is computed of dequantized numbers on every device.

    Attributes:
        plural: What such products are called.
    """

    plural: ClassVar[str]

    @abc.abstractmethod
    def _multiply(
        self, extra: Extra, data: Array, weight: Array, precision: Any = None
    ) -> Array:
        """The product."""

    @abc.abstractmethod
    def _for_data(self, kept: Residuals, g: Array, w: Array, precision: Any) -> Array:
        """The gradient of the data, in its form."""

    @abc.abstractmethod
    def _for_weight(self, kept: Residuals, x: Array, g: Array, precision: Any) -> Array:
        """The gradient of the weight, in its form."""

    def _plain(self, data: Array, weight: Array, extra: Extra) -> Array:
        return self._multiply(extra, data, weight)

    def _forward(
        self, x: Operand, w: Operand, extra: Extra, shapes: tuple[Shape, Shape]
    ) -> Array:
        left, right = zip((x, w), shapes, strict=True)
        multiply = functools.partial(self._multiply, extra)
        return _multiplied(self, multiply, left, right, self.dtype)

    def _backward(
        self, kept: Residuals, for_data: Operand, for_weight: Operand, shape: Shape
    ) -> tuple[Array, Array]:
        for_data, for_weight = stored(for_data, for_weight)
        data = kept.data, kept.like_data.shape
        weight = kept.weight, kept.like_weight.shape
        to_data = functools.partial(self._for_data, kept)
        to_weight = functools.partial(self._for_weight, kept)
        dtypes = self.dtype, self.weight_gradient_dtype
        dx = _multiplied(self, to_data, (for_data, shape), weight, dtypes[0])
        dw = _multiplied(self, to_weight, data, (for_weight, shape), dtypes[1])
        return dx, dw


def _multiplied(
    product: AbstractDequantizedProduct,
    multiply: Callable[[Array, Array, lax.PrecisionLike], Array],
    left: tuple[Operand, Shape],
    right: tuple[Operand, Shape],
    dtype: np.dtype,
) -> Array:
    """A product of two operands, each given with its shape before it was padded."""

    def computed(
        inner: DTypeLike, precision: lax.PrecisionLike, one: Operand, other: Operand
    ) -> Array:
        one, one_scale = numbers_and_scale(one)
        other, other_scale = numbers_and_scale(other)
        one, other = without_padding(one, left[1]), without_padding(other, right[1])
        y = multiply(one.astype(inner), other.astype(inner), precision)
        return times_scales(y, one_scale, other_scale).astype(dtype)

    emulated = functools.partial(computed, jnp.float32, lax.Precision.HIGHEST)
    platform = product.target.platform
    if platform not in ("cuda", "rocm", "tpu"):
        return emulated(left[0], right[0])
    fast = functools.partial(computed, jnp.bfloat16, None)
    branches = {platform: fast}
    return lax.platform_dependent(left[0], right[0], **branches, default=emulated)
