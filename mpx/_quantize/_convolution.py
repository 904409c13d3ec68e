"""`ConvolutionProduct`: a convolution, quantized in both directions.

With one scale for each array a convolution quantizes like a product: what is computed
are convolutions of low-precision numbers, times two scales. The gradients are those of
the convolution, taken of quantized numbers by `jax.linear_transpose`. Blocks along a
contracted axis have no meaning here, since a window contracts several.

On GPUs and TPUs the convolutions are computed in bfloat16, which has all numbers of 8
bits, with results in bfloat16 too, as such layers have them without quantization. What
is gained are the bytes kept for the backward pass, not speed.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._jax_compat import as_varying, varying_axes
from ._dequantized_product import AbstractDequantizedProduct
from ._operands import has_blocks
from ._product import Extra, Residuals
from ._recipes import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionProduct(AbstractDequantizedProduct):
    """A convolution of data with a weight: all that is known before numbers are.

    Attributes:
        window_strides: These are those of `jax.lax.conv_general_dilated`, as tuples.
        padding: Pairs of integers.
        lhs_dilation: Of the data.
        rhs_dilation: Of the weight.
        dimension_numbers: As in the parameters of the primitive.
        feature_group_count: Groups of features.
        batch_group_count: Groups of the batch.

    Raises:
        ValueError: The recipe has blocks.
    """

    plural: ClassVar[str] = "convolutions"
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int

    def __post_init__(self) -> None:
        if has_blocks(self.recipe):
            raise ValueError(
                "A convolution needs a recipe with one scale per array; got "
                f"{self.recipe!r}, which has blocks. Use `mpx.Float8CurrentScaling` "
                "or `mpx.DelayedScaling`, or keep the convolution in high precision."
            )

    def _axes(self, role: Role) -> tuple[int, int]:
        return -1, -1  # without blocks they have no meaning

    def _multiply(
        self, extra: Extra, data: Array, weight: Array, precision: Any = None
    ) -> Array:
        return lax.conv_general_dilated(
            data,
            weight,
            self.window_strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.dimension_numbers,
            self.feature_group_count,
            self.batch_group_count,
            precision,
        )

    def _for_data(self, kept: Residuals, g: Array, w: Array, precision: Any) -> Array:
        convolve = functools.partial(self._multiply, (), weight=w, precision=precision)
        return jax.linear_transpose(convolve, _zeros(kept.like_data, g))(g)[0]

    def _for_weight(self, kept: Residuals, x: Array, g: Array, precision: Any) -> Array:
        if self.reduce_dtype is not None:  # as the sum over devices, which is here
            x, g = x.astype(self.reduce_dtype), g.astype(self.reduce_dtype)
        convolve = functools.partial(self._multiply, (), x, precision=precision)
        return jax.linear_transpose(convolve, _zeros(kept.like_weight, g))(g)[0]


def _zeros(like: Any, g: Array) -> Array:
    """What a transpose is by, with g's dtype and where g varies. No number is read."""
    return as_varying(jnp.zeros(like.shape, g.dtype), varying_axes(g))
