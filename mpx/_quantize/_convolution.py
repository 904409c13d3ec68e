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
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax_compat import as_varying, varying_axes
from ._amax import Join, joined_over
from ._operands import Copies, has_blocks
from ._products import Operand, numbers_and_scale, times_scales
from ._recipes import AbstractRecipe, Role
from ._sharding import in_automatic_axes
from ._slots import amax_and_scale, amax_cotangent, check_scales
from ._target import Target

_CALL = "`linear_convolution(product, data, weight, scales)`"
Convolution = Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class ConvolutionProduct:
    """A convolution of data with a weight: all that is known before numbers are.

    Attributes:
        recipe: How operands are quantized, with one scale each.
        window_strides: These are those of `jax.lax.conv_general_dilated`, as tuples.
        padding: Pairs of integers.
        lhs_dilation: Of the data.
        rhs_dilation: Of the weight.
        dimension_numbers: As in the parameters of the primitive.
        feature_group_count: Groups of features.
        batch_group_count: Groups of the batch.
        dtype: The dtype of the result and of the gradient of the data.
        target: The device that it is compiled for.
        manual_axes: As in `LinearProduct`.
        sums_over_devices: As in `LinearProduct`.
        out_sharding: As in `LinearProduct`.

    Raises:
        ValueError: The recipe has blocks.
    """

    recipe: AbstractRecipe
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    dtype: np.dtype
    target: Target
    manual_axes: tuple[str, ...] = ()
    sums_over_devices: bool = False
    out_sharding: Any = None

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
        return Copies(self.recipe, role, self.dtype, self._join(), (-1, -1))

    def _join(self) -> Join:
        return joined_over(self.manual_axes, self.sums_over_devices)

    def _scaled(
        self, role: Role, x: Array, scales: Array | None
    ) -> tuple[Array | None, Array | None]:
        return amax_and_scale(self.recipe, self._join(), role, x, scales)


def linear_convolution(
    product: ConvolutionProduct,
    data: Array,
    weight: Array,
    scales: Array | None = None,
) -> Array:
    """The convolution of a layer.

    Args:
        product: What convolution, and how.
        data: The left operand of `jax.lax.conv_general_dilated`.
        weight: The right operand, best in float32 if that is what it is kept in.
        scales: As in `linear_product`, and so is what comes in the place of their
            gradient.

    Returns:
        The result in `product.dtype`. Gradients come in the dtypes of the operands.

    Raises:
        TypeError: Scales are missing, or given to a recipe that has none.
        ValueError: `jax.vmap` goes over the operands while scales are given once.
    """
    check_scales(_CALL, product.recipe, scales)

    def plain(data: Array, weight: Array) -> Array:
        return product._convolve(
            data.astype(product.dtype), weight.astype(product.dtype)
        )

    f = functools.partial(_linear_convolution, product)
    return in_automatic_axes(f, plain, product.out_sharding, data, weight, scales)


def _linear_convolution(
    product: ConvolutionProduct, data: Array, weight: Array, scales: Array | None
) -> Array:
    everywhere = varying_axes(data) | varying_axes(weight)
    data, weight = as_varying(data, everywhere), as_varying(weight, everywhere)
    return _product(product, data, weight, scales)


class _Kept(eqx.Module):
    """What the backward pass needs; see `linear_product`."""

    data: Operand
    weight: Operand
    scales: Array | None
    amaxes: tuple[Array | None, Array | None]
    data_dtype: np.dtype = eqx.field(static=True)
    weight_dtype: np.dtype = eqx.field(static=True)


def _forward(
    product: ConvolutionProduct, data: Array, weight: Array, scales: Array | None
) -> tuple[Array, _Kept]:
    data_amax, data_scale = product._scaled(Role.INPUT, data, scales)
    weight_amax, weight_scale = product._scaled(Role.WEIGHT, weight, scales)
    of_data, of_weight = product._copies(Role.INPUT), product._copies(Role.WEIGHT)
    x, w = of_data.first(data, data_scale), of_weight.first(weight, weight_scale)
    y = _on_target(product, product._convolve, x, w, product.dtype)
    kept = _Kept(
        of_data.second(data, x, data_scale),
        of_weight.second(weight, w, weight_scale),
        scales,
        (data_amax, weight_amax),
        data.dtype,
        weight.dtype,
    )
    return y, kept


def _primal(
    product: ConvolutionProduct, data: Array, weight: Array, scales: Array | None
) -> Array:
    return _forward(product, data, weight, scales)[0]


_product = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _backward_rule(
    product: ConvolutionProduct, kept: _Kept, g: Array
) -> tuple[Array, Array, Array | None]:
    amax, scale = product._scaled(Role.GRADIENT, g, kept.scales)
    of_gradient = product._copies(Role.GRADIENT)
    for_data = of_gradient.first(g, scale)
    for_weight = of_gradient.second(g, for_data, scale)

    def data_gradient(g: Array, w: Array, precision: Any) -> Array:
        data = _zeros_like(kept.data, g)
        convolve = functools.partial(product._convolve, weight=w, precision=precision)
        return jax.linear_transpose(convolve, data)(g)[0]

    def weight_gradient(x: Array, g: Array, precision: Any) -> Array:
        weight = _zeros_like(kept.weight, g)
        convolve = functools.partial(product._convolve, x, precision=precision)
        return jax.linear_transpose(convolve, weight)(g)[0]

    dx = _on_target(product, data_gradient, for_data, kept.weight, product.dtype)
    dw = _on_target(product, weight_gradient, kept.data, for_weight, jnp.float32)
    axes = product.manual_axes if product.sums_over_devices else ()
    amaxes = amax_cotangent(kept.amaxes, amax, kept.scales, axes)
    return dx.astype(kept.data_dtype), dw.astype(kept.weight_dtype), amaxes


_product.defvjp(_forward, _backward_rule)


def _zeros_like(operand: Operand, g: Array) -> Array:
    """What a transpose is by, with g's dtype and where g varies. No number is read."""
    return as_varying(jnp.zeros(operand.shape, g.dtype), varying_axes(g))


def _on_target(
    product: ConvolutionProduct,
    convolve: Convolution,
    left: Operand,
    right: Operand,
    dtype: Any,
) -> Array:
    def computed(inner: Any, precision: Any, left: Operand, right: Operand) -> Array:
        left, left_scale = numbers_and_scale(left)
        right, right_scale = numbers_and_scale(right)
        y = convolve(left.astype(inner), right.astype(inner), precision)
        return times_scales(y, left_scale, right_scale).astype(dtype)

    emulated = functools.partial(computed, jnp.float32, lax.Precision.HIGHEST)
    platform = product.target.platform
    if platform not in ("cuda", "rocm", "tpu"):
        return emulated(left, right)
    fast = functools.partial(computed, jnp.bfloat16, None)
    return lax.platform_dependent(left, right, **{platform: fast}, default=emulated)
