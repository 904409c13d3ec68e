"""`LinearProduct`: the matrix product of a linear layer, quantized in both directions.

On devices with units of low precision the three products are computed with the bits of
their operands; see `_products`.
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
from ..._base.typing import AnyArray, DTypeLike, Shape
from .._quantizers._recipes import Role
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
    multiply,
    numbers_and_scale,
    stored,
    times_scales,
)
from ._operands import Copies, has_blocks
from ._product import AbstractProduct, Extra, Residuals, without_padding


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


# ----------------------------------------------------------------------------
# Products for which no device has units of low precision: of dequantized operands.
#
# What is gained are the bytes kept for the backward pass, and, on a laptop, the
# numerics. Every such product is a function of data and weight, with two gradients;
# quantizing them is the same for all, and here. On a GPU or a TPU the numbers are
# multiplied in half precision, in which all numbers of 8 bits are exact, elsewhere in
# float32.


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


# ----------------------------------------------------------------------------
# `ConvolutionProduct`: a convolution, quantized in both directions.
#
# With one scale for each array a convolution quantizes like a product: what is computed
# are convolutions of low-precision numbers, times two scales. The gradients are those
# of the convolution, taken of quantized numbers by `jax.linear_transpose`. Blocks along
# a contracted axis have no meaning here, since a window contracts several.
#
# On GPUs and TPUs the convolutions are computed in bfloat16, which has all numbers of 8
# bits, with results in bfloat16 too, as such layers have them without quantization.
# What is gained are the bytes kept for the backward pass, not speed.


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


# ----------------------------------------------------------------------------
# `RaggedProduct`: the products of experts, quantized in both directions.
#
# `jax.lax.ragged_dot`: rows of the data come in groups, one after the other, and each
# group has a matrix of its own.
#
# $$y_i = Q(x_i)\,Q(w_{e(i)}) \qquad dx_i = Q(g_i)\,Q(w_{e(i)})^T \qquad
#     dw_e = \sum_{i: e(i) = e} Q(x_i)^T\,Q(g_i)$$
#
# All recipes have it. One scale is that of all data, or of the stack of all weights.
# Blocks of dw lie along the rows, of one group each: see `_groups`. Rows after the last
# group are in no product and count for no amax.
#
# No device has an FP8 form of it in XLA: on GPUs and TPUs it is the product of half
# precision. What is gained are the bytes kept for the backward pass, not speed.


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
