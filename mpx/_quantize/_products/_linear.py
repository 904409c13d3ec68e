"""The kinds of quantized products: matmuls, convolutions, ragged matmuls.

`LinearProduct` is the matmul of a linear layer. On devices with FP8 or block units its
three matmuls compute with the bits of their operands; see `_lowering`. The others
multiply dequantized operands on every device.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._base.jax_compat import as_varying, varying_axes
from ..._base.typing import AnyArray, Shape
from ..._program import flat
from .._quantizers._recipes import Leg, Role
from ._contraction import (
    DimensionNumbers,
    LinearContractions,
    as_matrices,
    contractions,
    product_shape,
)
from ._lowering import (
    Operand,
    apart,
    has_units,
    in_leg,
    multiply,
    numbers_and_scale,
    stored,
    times_scales,
)
from ._operands import Copies, folded, has_blocks, kernel_of
from ._product import AbstractProduct, Extra, Factors, Residuals, without_padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProduct(AbstractProduct):
    """A matmul of data and a weight.

    Attributes:
        dimension_numbers: Those of `jax.lax.dot_general`, as tuples.
        is_weight_first: Whether the left operand is the weight.
    """

    dimension_numbers: DimensionNumbers
    is_weight_first: bool

    def _axes(self, role: Role) -> tuple[int, int]:
        if role is Role.GRADIENT:
            # dx comes first: it contracts a left operand's columns, a right one's rows.
            return (-2, -1) if self.is_weight_first else (-1, -2)
        is_left = (role is Role.WEIGHT) == self.is_weight_first
        return (-1, -2) if is_left else (-2, -1)

    @property
    def _is_by_rows(self) -> bool:
        return not any(self.dimension_numbers[1])

    def _arranged(
        self, left: Array, right: Array, *extra: AnyArray
    ) -> tuple[Array, Array, Extra]:
        return *self._ordered(left, right), extra

    def _ordered(self, data: object, weight: object) -> tuple[Any, Any]:
        """Orders (data, weight) as (left, right), or the other way round."""
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
        """Returns the contractions of data and weight of these ranks."""
        return contractions(self.dimension_numbers, *self._ordered(*ranks))

    def _folded(self, kept: Residuals) -> tuple[Residuals, Factors]:
        numbers = self._contractions((kept.data.ndim, kept.weight.ndim))
        # The axes of the right operand in dx or dw of the left one, and vice versa.
        of_left, of_right = (
            numbers.for_right.contracted[0],
            numbers.for_left.contracted[1],
        )
        of_data, of_weight = self._ordered(of_left, of_right)
        quantizer = functools.partial(self.recipe.quantizer, Role.GRADIENT)
        weight, for_data = folded(kept.weight, of_weight, quantizer(leg=Leg.DGRAD))
        data, for_weight = folded(kept.data, of_data, quantizer(leg=Leg.WGRAD))
        kept = dataclasses.replace(kept, data=data, weight=weight)
        return kept, (for_data, for_weight)

    def _has_units(self, x: Operand, w: Operand) -> bool:
        numbers = self._contractions((x.ndim, w.ndim))
        return has_units(*self._ordered(x, w), numbers.forward, self.target)

    def _forward(
        self, x: Operand, w: Operand, extra: Extra, shapes: tuple[Shape, Shape]
    ) -> Array:
        forward = self._contractions((x.ndim, w.ndim)).forward
        contracted, _ = self._ordered(*forward.dimension_numbers[0])
        x = apart(x, w, contracted, self.target)
        product = functools.partial(multiply, target=self.target, half=self.dtype)
        y = product(*self._ordered(x, w), forward, self.dtype, leg=Leg.FORWARD)
        # Square blocks also pad axes that are not contracted.
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
        product = functools.partial(multiply, target=self.target, half=self.dtype)
        to_data = functools.partial(product, dtype=self.dtype, leg=Leg.DGRAD)
        to_weight = functools.partial(
            product,
            dtype=self.weight_gradient_dtype,
            is_summed=self.reduce_dtype is not None,
            leg=Leg.WGRAD,
        )
        to_left, to_right = self._ordered(to_data, to_weight)

        def of_left(operand: Operand) -> Array:
            return to_left(operand, right, numbers.for_left)

        def of_right(operand: Operand) -> Array:
            return to_right(left, operand, numbers.for_right)

        if self._has_copies_for_each_product():
            of_data, of_weight = self._ordered(of_left, of_right)
            for_data, for_weight = self._ordered(for_left, for_right)
            dw, for_data = lax.optimization_barrier((of_weight(for_weight), for_data))
            dx = of_data(for_data)
        else:
            dx, dw = self._ordered(of_left(for_left), of_right(for_right))
        return without_padding(dx, likes[0].shape), without_padding(dw, likes[1].shape)

    def _has_copies_for_each_product(self) -> bool:
        """Returns whether XLA would keep copies for all weights' gradients at once.

        It quantizes along two axes for the two products of a gradient, and computes
        that of the weight at the end of the step: 16.3 instead of 9.7 GB for a Llama of
        8 layers under NVFP4, compiled for a B200 (jaxlib 0.10.2, November 2026). Copies
        with scales of rows are smaller. Their products are scaled in the kernels that
        read them, which a barrier would prevent: 1.1 of the 24 GB of an MLP's step.
        """
        quantizers = self.recipe._quantizers()
        in_blocks = any(x.block_dimensions and not x._is_folded for x in quantizers)
        is_on_gpu = self.target.platform == "cuda" and in_blocks
        return is_on_gpu and kernel_of(self.recipe, self.target) is None


# --- Products without FP8 hardware: of dequantized operands ---------------------------
#
# They save memory for the backward pass, and reproduce the numerics on a laptop. Such a
# product is a function of data and weight with two gradients; quantization is the same
# for all and is done here. GPUs and TPUs multiply in bfloat16, which represents all
# 8-bit values exactly, other devices in float32.


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractDequantizedProduct(AbstractProduct):
    """A product that every device computes from dequantized operands.

    Attributes:
        plural: The name of such products, in the plural.
    """

    plural: ClassVar[str]

    @abc.abstractmethod
    def _multiply(
        self, extra: Extra, data: Array, weight: Array, precision: Any = None
    ) -> Array:
        """Computes the product."""

    @abc.abstractmethod
    def _for_data(self, kept: Residuals, g: Array, w: Array, precision: Any) -> Array:
        """Returns the gradient of the data, in the layout of `data`."""

    @abc.abstractmethod
    def _for_weight(self, kept: Residuals, x: Array, g: Array, precision: Any) -> Array:
        """Returns the gradient of the weight, in the layout of `weight`."""

    def _plain(self, data: Array, weight: Array, extra: Extra) -> Array:
        return self._multiply(extra, data, weight)

    def _forward(
        self, x: Operand, w: Operand, extra: Extra, shapes: tuple[Shape, Shape]
    ) -> Array:
        left, right = zip((x, w), shapes, strict=True)
        multiply = functools.partial(self._multiply, extra)
        of = self, Leg.FORWARD, multiply
        return _multiplied(*of, left, right, self.dtype)[0]

    def _backward(
        self, kept: Residuals, for_data: Operand, for_weight: Operand, shape: Shape
    ) -> tuple[Array, Array]:
        for_data, for_weight = stored(for_data, for_weight)
        data = kept.data, kept.like_data.shape
        weight = kept.weight, kept.like_weight.shape
        to_data = functools.partial(self._for_data, kept)
        to_weight = functools.partial(self._for_weight, kept)
        dtypes = self.dtype, self.weight_gradient_dtype
        of = self, Leg.WGRAD, to_weight
        dw, for_data = _multiplied(*of, data, (for_weight, shape), dtypes[1], for_data)
        of = self, Leg.DGRAD, to_data
        dx, _ = _multiplied(*of, (for_data, shape), weight, dtypes[0])
        return dx, dw


def _multiplied(
    product: AbstractDequantizedProduct,
    leg: Leg,
    multiply: Callable[[Array, Array, lax.PrecisionLike], Array],
    left: tuple[Operand, Shape],
    right: tuple[Operand, Shape],
    dtype: np.dtype,
    later: Any = None,
) -> tuple[Array, Any]:
    """Multiplies two operands, each given with its shape before it was padded.

    On devices `later` is returned when the product is there. A ragged product is one of
    a copy of the rows for each group. So the copies of two gradients are not there at
    once: a step with experts, compiled for an H100, needs 11.7 GB and not 15.7 (jaxlib
    0.10.2, November 2026).
    """
    inner, precision = jnp.float32, lax.Precision.HIGHEST
    if product.target.is_met:  # a GPU or TPU
        inner, precision = jnp.bfloat16, None
    one, other = left[0], right[0]
    one, one_scale = numbers_and_scale(one)
    other, other_scale = numbers_and_scale(other)
    one, other = without_padding(one, left[1]), without_padding(other, right[1])
    with in_leg(leg):
        y = multiply(one.astype(inner), other.astype(inner), precision)
    if later is not None and product.target.is_met:
        y, later = lax.optimization_barrier((y, later))
    return times_scales(y, one_scale, other_scale).astype(dtype), later


# --- Convolutions ---------------------------------------------------------------------
#
# With one scale for each array, a convolution quantizes like a matmul: a convolution of
# low-precision values, times two scales. `jax.linear_transpose` of the convolution of
# quantized values gives the gradients. Blocks along a contracted axis are undefined,
# since a window contracts several axes.
#
# GPUs and TPUs compute in bfloat16, which represents all 8-bit values, and also return
# bfloat16, like convolutions without quantization. The gain is memory saved for the
# backward pass, not speed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionProduct(AbstractDequantizedProduct):
    """A convolution of data with a weight: everything known before its values.

    Attributes:
        window_strides: This and the fields below are the arguments of
            `jax.lax.conv_general_dilated`, here as a tuple.
        padding: Pairs of integers.
        lhs_dilation: The dilation of the data.
        rhs_dilation: The dilation of the weight.
        dimension_numbers: As in the parameters of the primitive.
        feature_group_count: The number of feature groups.
        batch_group_count: The number of batch groups.

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
        return -1, -1  # unused without blocks

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
        if self.reduce_dtype is not None:  # the dtype of the sum over devices
            x, g = x.astype(self.reduce_dtype), g.astype(self.reduce_dtype)
        convolve = functools.partial(self._multiply, (), x, precision=precision)
        dw = jax.linear_transpose(convolve, _zeros(kept.like_weight, g))(g)[0]
        return flat(dw) if self.target.platform == "cuda" else dw


def _zeros(like: Any, g: Array) -> Array:
    """Returns a primal for a transpose, with g's dtype and varying axes; never read."""
    return as_varying(jnp.zeros(like.shape, g.dtype), varying_axes(g))


# --- Ragged matmuls: the matmuls of experts -------------------------------------------
#
# `jax.lax.ragged_dot`: rows of the data come in consecutive groups, and each group has
# a separate matrix.
#
# $$y_i = Q(x_i)\,Q(w_{e(i)}) \qquad dx_i = Q(g_i)\,Q(w_{e(i)})^T \qquad
#     dw_e = \sum_{i: e(i) = e} Q(x_i)^T\,Q(g_i)$$
#
# All recipes support it. A tensor scale is that of all data, or of the stack of all
# weights. Blocks of dw are along the rows, each within one group: see `_contraction`.
# Rows after the last group are in no product and do not count for the amax.
#
# XLA has no FP8 form of it for any device: GPUs and TPUs multiply in half precision.
# The gain is memory saved for the backward pass, not speed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProduct(AbstractDequantizedProduct):
    """A ragged matmul of data and weights: everything known before its values.

    Attributes:
        dimension_numbers: Those of `jax.lax.ragged_dot_general`; see `has_ragged_form`.
    """

    plural: ClassVar[str] = "ragged matmuls"
    dimension_numbers: lax.RaggedDotDimensionNumbers

    def _axes(self, role: Role) -> tuple[int, int]:
        return (-2, -1) if role is Role.WEIGHT else (-1, -2)

    def _arranged(
        self, left: Array, right: Array, *extra: AnyArray
    ) -> tuple[Array, Array, Extra]:
        """Returns [*batch, rows, contracted], [*batch, groups, contracted, ...], sizes.

        Those are data, weights, and the number of rows of each group: [*batch, groups],
        or [groups] for the whole batch.
        """
        numbers, (sizes,) = self.dimension_numbers, extra
        (contracted, summed), (left_batch, batch) = numbers.dot_dimension_numbers
        rows = numbers.lhs_ragged_dimensions
        groups = (*batch, *numbers.rhs_group_dimensions, *summed)
        rest = (axis for axis in range(right.ndim) if axis not in groups)
        data = left.transpose(*left_batch, *rows, *contracted)
        # In fewer bits the sums of sizes would overflow.
        sizes = jnp.asarray(sizes, jnp.int32)
        return data, right.transpose(*groups, *rest), (sizes,)

    def _copies(
        self, role: Role, step: Array | None = None, extra: Extra = ()
    ) -> Copies:
        copies = super()._copies(role, step, extra)
        if role is Role.WEIGHT:  # blocks are within the matrix of a group
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
        return jnp.moveaxis(y, 0, rows)  # one sum for each group


def has_ragged_form(
    numbers: lax.RaggedDotDimensionNumbers, left_rank: int, right_rank: int
) -> bool:
    """Returns whether a ragged product has rows in groups and a matrix per group."""
    (left, _), (batch, _) = numbers.dot_dimension_numbers
    ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    is_sum_whole = not set(ragged) & {*left, *batch}
    ranks = (left_rank - len(batch), right_rank - len(batch))
    parts = (len(left), len(ragged), len(groups))
    return is_sum_whole and ranks == (2, 3) and parts == (1, 1, 1)


def _times_matrices(
    left: Array, weight: Array, extra: Extra, axis: int, precision: Any
) -> Array:
    """Multiplies rows by the matrix of their group, along one of its axes."""
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
    """Computes a ragged matmul; rows are the left array's second-last axis.

    The result has the dtype of the operands: scaled in float32 afterwards, a wider one
    would be written and read once more.

    Args:
        left: The rows.
        right: The right operand.
        extra: The number of rows of each group.
        contracted: The axes that are summed.
        groups: The axis of the right array that indexes the groups' matrices.
        precision: As in JAX.
    """
    (sizes,), batch = extra, tuple(range(left.ndim - 2))
    numbers = lax.RaggedDotDimensionNumbers(
        (contracted, (batch, batch)),
        lhs_ragged_dimensions=[left.ndim - 2],
        rhs_group_dimensions=groups,
    )
    return lax.ragged_dot_general(left, right, sizes, numbers, precision=precision)
