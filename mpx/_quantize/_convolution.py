"""`linear_convolution`: a convolution, quantized in both directions.

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
from ._dequantized_product import AbstractDequantizedProduct, Multiply
from ._operands import Copies, has_blocks
from ._product import PrequantizedWeight, quantized_product
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
                "A convolution is quantized with one scale for each array; got "
                f"{self.recipe!r}, which has blocks. Use `mpx.Float8CurrentScaling` or "
                "`mpx.DelayedScaling`, or leave the convolution in high precision."
            )

    def _convolve(self, data: Array, weight: Array, precision: Any = None) -> Array:
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

    def _copies(self, role: Role) -> Copies:
        return Copies(
            self.recipe, role, self.dtype, self.target, self._join(), (-1, -1)
        )

    def _multiply(self, extra: tuple[Array, ...]) -> Multiply:
        return self._convolve

    def _for_data(self, extra: tuple[Array, ...], data: object) -> Multiply:
        def multiply(g: Array, w: Array, precision: object) -> Array:
            convolve = functools.partial(self._convolve, weight=w, precision=precision)
            return jax.linear_transpose(convolve, _zeros(data, g))(g)[0]

        return multiply

    def _for_weight(self, extra: tuple[Array, ...], weight: object) -> Multiply:
        def multiply(x: Array, g: Array, precision: object) -> Array:
            if self.reduce_dtype is not None:  # as the sum over devices, which is here
                x, g = x.astype(self.reduce_dtype), g.astype(self.reduce_dtype)
            convolve = functools.partial(self._convolve, x, precision=precision)
            return jax.linear_transpose(convolve, _zeros(weight, g))(g)[0]

        return multiply


def linear_convolution(
    product: ConvolutionProduct,
    data: Array,
    weight: Array,
    scales: Array | None = None,
    step: Array | None = None,
    ahead: PrequantizedWeight | None = None,
) -> Array:
    """The convolution of a layer; see `quantized_product`.

    Args:
        product: What convolution, and how.
        data: The left operand of `jax.lax.conv_general_dilated`.
        weight: The right operand.
        scales: The scales of delayed scaling.
        step: The number of the training step, for stochastic rounding.
        ahead: The weight, if it was quantized before; see `quantized_product`.
    """
    call = "`linear_convolution(product, data, weight, scales)`"
    return quantized_product(call, product, data, weight, scales, step, ahead=ahead)


def _zeros(like: Any, g: Array) -> Array:
    """What a transpose is by, with g's dtype and where g varies. No number is read."""
    return as_varying(jnp.zeros(like.shape, g.dtype), varying_axes(g))
