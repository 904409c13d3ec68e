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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax_compat import as_varying, varying_axes
from .._typing import Shape
from ._abstract_product import AbstractProduct
from ._products import Operand, numbers_and_scale, stored, times_scales
from ._recipes import Role
from ._second_derivative import differentiated_once
from ._sharding import in_automatic_axes
from ._slots import amax_cotangent, check_scales

Multiply = Callable[[Array, Array, Any], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractDequantizedProduct(AbstractProduct):
    """A product that is computed of dequantized numbers on every device.

    Attributes:
        plural: What such products are called.
    """

    plural: ClassVar[str]

    @abc.abstractmethod
    def _forward(self, extra: tuple[Array, ...]) -> Multiply:
        """`(data, weight, precision) -> result`."""

    @abc.abstractmethod
    def _for_data(self, extra: tuple[Array, ...], data: Any) -> Multiply:
        """`(gradient, weight, precision) -> gradient of data`, of the form of data."""

    @abc.abstractmethod
    def _for_weight(self, extra: tuple[Array, ...], weight: Any) -> Multiply:
        """`(data, gradient, precision) -> gradient of weight`, of the weight's form."""

    def _read(self, x: Array, extra: tuple[Array, ...]) -> Array:
        """Data or a gradient, with zeros for what the product leaves out."""
        return x


def dequantized_product(
    call: str,
    product: AbstractDequantizedProduct,
    data: Array,
    weight: Array,
    scales: Array | None = None,
    step: Array | None = None,
    extra: tuple[Array, ...] = (),
) -> Array:
    """A product of data and a weight, quantized in both directions.

    Args:
        call: The call, for errors.
        product: What product, and how.
        data: The data.
        weight: The weight, best in float32 if that is what it is kept in.
        scales: As in `linear_product`, and so is what comes in the place of their
            gradient.
        step: As in `linear_product`.
        extra: More operands, which have no derivative.

    Returns:
        The result in `product.dtype`. Gradients come in the dtypes of the operands.

    Raises:
        TypeError: Scales are missing, or given to a recipe that has none.
        ValueError: `jax.vmap` goes over the operands while scales are given once.
    """
    check_scales(call, product.recipe, scales)

    def plain(data: Array, weight: Array, *extra: Array) -> Array:
        data, weight = data.astype(product.dtype), weight.astype(product.dtype)
        return product._forward(extra)(data, weight, None)

    def quantized(
        besides: tuple[Array | None, Array | None],
        data: Array,
        weight: Array,
        *extra: Array,
    ) -> Array:
        everywhere = varying_axes(data) | varying_axes(weight)
        data, weight = as_varying(data, everywhere), as_varying(weight, everywhere)
        return _product(product, data, weight, extra, *besides)

    operands = (data, weight, *extra)
    besides = scales, step
    return in_automatic_axes(quantized, plain, product.out_sharding, besides, *operands)


class _Kept(eqx.Module):
    """What the backward pass needs; see `linear_product`."""

    data: Operand
    weight: Operand
    extra: tuple[Array, ...]
    scales: Array | None
    step: Array | None
    amaxes: tuple[Array | None, Array | None]
    like_data: jax.ShapeDtypeStruct = eqx.field(static=True)
    like_weight: jax.ShapeDtypeStruct = eqx.field(static=True)


def _forward(
    product: AbstractDequantizedProduct,
    data: Array,
    weight: Array,
    extra: tuple[Array, ...],
    scales: Array | None,
    step: Array | None,
    *,
    is_differentiated: bool,
) -> tuple[Array, _Kept | None]:
    like_data = jax.ShapeDtypeStruct(data.shape, data.dtype)
    like_weight = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    data = product._read(data, extra)
    data_amax, data_scale = product._scaled(Role.INPUT, data, scales)
    weight_amax, weight_scale = product._scaled(Role.WEIGHT, weight, scales)
    of_data = product._copies_at(step, Role.INPUT)
    of_weight = product._copies_at(step, Role.WEIGHT)
    x, w = of_data.first(data, data_scale), of_weight.first(weight, weight_scale)
    forward = product._forward(extra)
    y = _multiplied(product, forward, (x, data.shape), (w, weight.shape), product.dtype)
    if not is_differentiated:
        return y, None
    y, kept_data, kept_weight = stored(
        y,
        of_data.second(data, x, data_scale),
        of_weight.second(weight, w, weight_scale),
    )
    kept = _Kept(
        kept_data,
        kept_weight,
        extra,
        scales,
        step,
        (data_amax, weight_amax),
        like_data,
        like_weight,
    )
    return y, kept


def _primal(
    product: AbstractDequantizedProduct,
    data: Array,
    weight: Array,
    extra: tuple[Array, ...],
    scales: Array | None,
    step: Array | None,
) -> Array:
    return _forward(
        product, data, weight, extra, scales, step, is_differentiated=False
    )[0]


_product = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _forward_rule(
    product: AbstractDequantizedProduct,
    data: Array,
    weight: Array,
    extra: tuple[Array, ...],
    scales: Array | None,
    step: Array | None,
) -> tuple[Array, _Kept | None]:
    data, weight, scales = differentiated_once((data, weight, scales))
    return _forward(product, data, weight, extra, scales, step, is_differentiated=True)


def _backward_rule(
    product: AbstractDequantizedProduct, kept: _Kept, g: Array
) -> tuple[Array, Array, None, Array | None, None]:
    g = product._read(differentiated_once(g), kept.extra)
    amax, scale = product._scaled(Role.GRADIENT, g, kept.scales)
    of_gradient = product._copies_at(kept.step, Role.GRADIENT)
    for_data = of_gradient.first(g, scale)
    for_weight = of_gradient.second(g, for_data, scale)
    for_data, for_weight = stored(for_data, for_weight)
    data, weight = kept.like_data, kept.like_weight
    dx = _multiplied(
        product,
        product._for_data(kept.extra, data),
        (for_data, g.shape),
        (kept.weight, weight.shape),
        product.dtype,
    )
    dw = _multiplied(
        product,
        product._for_weight(kept.extra, weight),
        (kept.data, data.shape),
        (for_weight, g.shape),
        np.dtype("float32"),
    )
    amaxes = amax_cotangent(kept.amaxes, amax, kept.scales, product._summed_axes())
    return dx.astype(data.dtype), dw.astype(weight.dtype), None, amaxes, None


_product.defvjp(_forward_rule, _backward_rule)


def _multiplied(
    product: AbstractDequantizedProduct,
    multiply: Multiply,
    left: tuple[Operand, Shape],
    right: tuple[Operand, Shape],
    dtype: np.dtype,
) -> Array:
    """A product of two operands, each given with its shape before it was padded."""

    def computed(inner: Any, precision: Any, one: Operand, other: Operand) -> Array:
        one, one_scale = numbers_and_scale(one)
        other, other_scale = numbers_and_scale(other)
        one, other = _cut(one, left[1]), _cut(other, right[1])
        y = multiply(one.astype(inner), other.astype(inner), precision)
        return times_scales(y, one_scale, other_scale).astype(dtype)

    emulated = functools.partial(computed, jnp.float32, lax.Precision.HIGHEST)
    platform = product.target.platform
    if platform not in ("cuda", "rocm", "tpu"):
        return emulated(left[0], right[0])
    fast = functools.partial(computed, jnp.bfloat16, None)
    branches = {platform: fast}
    return lax.platform_dependent(left[0], right[0], **branches, default=emulated)


def _cut(x: Array, shape: Shape) -> Array:
    return x if x.shape == shape else x[tuple(map(slice, shape))]
