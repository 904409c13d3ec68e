r"""`linear_product`: the product of a linear layer, quantized in both directions.

$$y = Q(x)\,Q(w) \qquad dx = Q(g)\,Q(w)^T \qquad dw = Q(x)^T\,Q(g)$$

A `jax.custom_vjp`. What it keeps for the backward pass are quantized operands only: the
copies that dx and dw contract. Forward mode (`jax.jvp`) has no rule, and JAX says so;
the derivative of a derivative has none either (see `_second_derivative`).

Scales of delayed scaling are an argument, float32[3] in the order of `Role`. What comes
back in the place of their gradient is no gradient: the three *amaxes* of this step, for
`DelayedScaling.update`. A slot of its own for every product keeps JAX from adding
two of them.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from .._jax_compat import as_varying, varying_axes
from .._typing import Shape
from ._abstract_product import AbstractProduct
from ._contraction import (
    DimensionNumbers,
    LinearContractions,
    as_matrices,
    contractions,
    product_shape,
)
from ._operands import Copies, has_blocks
from ._products import Operand, has_units, multiply, stored
from ._recipes import Role
from ._second_derivative import differentiated_once
from ._sharding import in_automatic_axes
from ._slots import amax_cotangent, check_scales

_CALL = "`linear_product(product, left, right, scales)`"
_FLOAT32 = np.dtype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProduct(AbstractProduct):
    """A product of data and a weight: all that is known of it before numbers are.

    Attributes:
        dimension_numbers: Those of `jax.lax.dot_general`, as tuples.
        is_weight_first: Whether the left operand is the weight.
    """

    dimension_numbers: DimensionNumbers
    is_weight_first: bool

    def _copies(self, role: Role) -> Copies:
        axes = {
            "left": (-1, -2),
            "right": (-2, -1),
            # dx first: of the left operand it contracts columns, of the right one rows.
            "result": (-2, -1) if self.is_weight_first else (-1, -2),
        }[self._place(role)]
        return Copies(self.recipe, role, self.dtype, self._join(), axes)

    def _place(self, role: Role) -> str:
        if role is Role.GRADIENT:
            return "result"
        return "left" if (role is Role.WEIGHT) == self.is_weight_first else "right"

    def _ordered(self, data: Any, weight: Any) -> tuple[Any, Any]:
        """Two things as (left, right), or (left, right) as (data, weight)."""
        return (weight, data) if self.is_weight_first else (data, weight)


def linear_product(
    product: LinearProduct,
    left: Array,
    right: Array,
    scales: Array | None = None,
    step: Array | None = None,
) -> Array:
    """The product of a linear layer.

    Args:
        product: What product, and how.
        left: The left operand of `jax.lax.dot_general`, floating. The weight is best
            given in float32, if that is what it is kept in: it is quantized from what
            comes.
        right: The right operand.
        scales: float32[3], the scales of input, weight and gradient, for
            `DelayedScaling` and for no other recipe. Where one is 0, it is computed
            from the array at hand if the recipe has a `warm_start`, and else 1.
        step: The number of the training step, an integer, for stochastic rounding.

    Returns:
        The product in `product.dtype`. Its gradients come in the dtypes of the
        operands: that of the data rounded to `product.dtype` first, that of the weight
        straight from float32. The "gradient" of `scales` are the amaxes of input,
        weight and gradient; they may be infinite or NaN.

    Raises:
        TypeError: Scales are missing, or given to a recipe that has none.
        ValueError: `jax.vmap` goes over the operands while scales are given once.
    """
    check_scales(_CALL, product.recipe, scales)

    def plain(left: Array, right: Array) -> Array:
        left, right = left.astype(product.dtype), right.astype(product.dtype)
        return jax.lax.dot_general(left, right, product.dimension_numbers)

    f = functools.partial(_linear_product, product)
    return in_automatic_axes(
        f, plain, product.out_sharding, (scales, step), left, right
    )


def _linear_product(
    product: LinearProduct,
    besides: tuple[Array | None, Array | None],
    left: Array,
    right: Array,
) -> Array:
    everywhere = varying_axes(left) | varying_axes(right)
    left, right = as_varying(left, everywhere), as_varying(right, everywhere)
    if not has_blocks(product.recipe):
        return _product(product, left, right, *besides)
    left, right, matrices, shape = as_matrices(product.dimension_numbers, left, right)
    product = dataclasses.replace(product, dimension_numbers=matrices)
    return _product(product, left, right, *besides).reshape(shape)


class _Kept(eqx.Module):
    """What the backward pass needs.

    Attributes:
        data: The copy that dw contracts.
        weight: The copy that dx contracts.
        scales: The scales of delayed scaling.
        step: The number of the training step.
        amaxes: The amaxes of input and weight, with scales.
        left: Shape and dtype of the left operand.
        right: The same of the right one.
    """

    data: Operand
    weight: Operand
    scales: Array | None
    step: Array | None
    amaxes: tuple[Array | None, Array | None]
    left: jax.ShapeDtypeStruct = eqx.field(static=True)
    right: jax.ShapeDtypeStruct = eqx.field(static=True)

    def contractions(self, product: LinearProduct) -> LinearContractions:
        """The products that are left to compute."""
        ranks = len(self.left.shape), len(self.right.shape)
        return contractions(product.dimension_numbers, *ranks)


def _forward(
    product: LinearProduct,
    left: Array,
    right: Array,
    scales: Array | None,
    step: Array | None,
    *,
    is_differentiated: bool,
) -> tuple[Array, _Kept | None]:
    data, weight = product._ordered(left, right)
    data_amax, data_scale = product._scaled(Role.INPUT, data, scales)
    weight_amax, weight_scale = product._scaled(Role.WEIGHT, weight, scales)
    of_data = product._copies_at(step, Role.INPUT)
    of_weight = product._copies_at(step, Role.WEIGHT)
    x, w = of_data.first(data, data_scale), of_weight.first(weight, weight_scale)
    numbers = contractions(product.dimension_numbers, left.ndim, right.ndim)
    y = multiply(
        *product._ordered(x, w),
        numbers.forward,
        product.dtype,
        product.target,
        product.dtype,
        is_backward=False,
    )
    # Square blocks pad what is not contracted, too.
    y = _cut(y, product_shape(product.dimension_numbers, left.shape, right.shape))
    if not is_differentiated:
        return y, None
    kept_data = of_data.second(data, x, data_scale)
    kept_weight = of_weight.second(weight, w, weight_scale)
    if not has_units(*product._ordered(x, w), numbers.forward, product.target):
        y, kept_data, kept_weight = stored(y, kept_data, kept_weight)
    kept = _Kept(
        kept_data,
        kept_weight,
        scales,
        step,
        (data_amax, weight_amax),
        jax.ShapeDtypeStruct(left.shape, left.dtype),
        jax.ShapeDtypeStruct(right.shape, right.dtype),
    )
    return y, kept


def _cut(x: Array, shape: Shape) -> Array:
    return x if x.shape == shape else x[tuple(map(slice, shape))]


def _primal(
    product: LinearProduct,
    left: Array,
    right: Array,
    scales: Array | None,
    step: Array | None,
) -> Array:
    return _forward(product, left, right, scales, step, is_differentiated=False)[0]


_product = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _forward_rule(
    product: LinearProduct,
    left: Array,
    right: Array,
    scales: Array | None,
    step: Array | None,
) -> tuple[Array, _Kept | None]:
    left, right, scales = differentiated_once((left, right, scales))
    return _forward(product, left, right, scales, step, is_differentiated=True)


def _backward_rule(
    product: LinearProduct, kept: _Kept, g: Array
) -> tuple[Array, Array, Array | None, None]:
    g = differentiated_once(g)
    amax, scale = product._scaled(Role.GRADIENT, g, kept.scales)
    of_gradient = product._copies_at(kept.step, Role.GRADIENT)
    for_data = of_gradient.first(g, scale)
    for_weight = of_gradient.second(g, for_data, scale)
    numbers = kept.contractions(product)
    left, right = product._ordered(kept.data, kept.weight)
    for_left, for_right = product._ordered(for_data, for_weight)
    if not has_units(for_left, right, numbers.for_left, product.target):
        for_left, for_right = stored(for_left, for_right)
    left_dtype, right_dtype = product._ordered(product.dtype, _FLOAT32)
    target, half = product.target, product.dtype
    left_gradient = multiply(
        for_left, right, numbers.for_left, left_dtype, target, half, is_backward=True
    )
    right_gradient = multiply(
        left, for_right, numbers.for_right, right_dtype, target, half, is_backward=True
    )
    left_gradient = _cut(left_gradient, kept.left.shape).astype(kept.left.dtype)
    right_gradient = _cut(right_gradient, kept.right.shape).astype(kept.right.dtype)
    amaxes = amax_cotangent(kept.amaxes, amax, kept.scales, product._summed_axes())
    return left_gradient, right_gradient, amaxes, None


_product.defvjp(_forward_rule, _backward_rule)
