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
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._typing import DTypeLike, Shape
from ._product import AbstractProduct, Residuals, without_padding
from ._products import Operand, numbers_and_scale, stored, times_scales

Multiply = Callable[[Array, Array, lax.PrecisionLike], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractDequantizedProduct(AbstractProduct):
    """A product that is computed of dequantized numbers on every device.

    Attributes:
        plural: What such products are called.
    """

    plural: ClassVar[str]

    @abc.abstractmethod
    def _multiply(self, extra: tuple[Array, ...]) -> Multiply:
        """`(data, weight, precision) -> result`."""

    @abc.abstractmethod
    def _for_data(self, extra: tuple[Array, ...], data: object) -> Multiply:
        """`(gradient, weight, precision) -> gradient of data`, of the form of data."""

    @abc.abstractmethod
    def _for_weight(self, extra: tuple[Array, ...], weight: object) -> Multiply:
        """`(data, gradient, precision) -> gradient of weight`, of the weight's form."""

    def _plain(self, data: Array, weight: Array, extra: tuple[Array, ...]) -> Array:
        return self._multiply(extra)(data, weight, None)

    def _forward(
        self,
        x: Operand,
        w: Operand,
        extra: tuple[Array, ...],
        shapes: tuple[Shape, Shape],
    ) -> Array:
        left, right = zip((x, w), shapes, strict=True)
        return _multiplied(self, self._multiply(extra), left, right, self.dtype)

    def _backward(
        self, kept: Residuals, for_data: Operand, for_weight: Operand, shape: Shape
    ) -> tuple[Array, Array]:
        for_data, for_weight = stored(for_data, for_weight)
        data, weight = kept.like_data, kept.like_weight
        dx = _multiplied(
            self,
            self._for_data(kept.extra, data),
            (for_data, shape),
            (kept.weight, weight.shape),
            self.dtype,
        )
        dw = _multiplied(
            self,
            self._for_weight(kept.extra, weight),
            (kept.data, data.shape),
            (for_weight, shape),
            self.weight_gradient_dtype,
        )
        return dx, dw


def _multiplied(
    product: AbstractDequantizedProduct,
    multiply: Multiply,
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
