r"""Operands of a linear layer's products: which are quantized, how, along which axis.

Each of the three arrays is an operand of two products: x of y = x w and dw = xᵀ g, w of
y and dx = g wᵀ, g of dx and dw. With blocks along the contracted axis, the two products
need two copies, both quantized from high precision. With one scale, or square blocks,
they share one copy.

With a scale for each row of x and each column of w they share one, too. A product of
the backward pass contracts the axis of these scales, so they multiply g before it is
quantized for that product, and only the scales of g multiply the result:

$$dx = Q(g \cdot t) \, \hat w^T \qquad dw = \hat x^T \, Q(s \cdot g)
\qquad x \approx s \cdot \hat x, \quad w \approx \hat w \cdot t$$

Tokens and features that are small stay small in the sum. An MLP's step on a TPU v5e
moves 2 % more bytes than with one scale, with second copies 6 % (libtpu 0.0.42,
November 2026). Where features of x differ in size, dw loses more than with these.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._formats._arithmetic import EXACT, arithmetic_of
from .._formats._blocks import Axes, Join, alone, block_maximum
from .._formats._rounding import flushed, noise_from, pack, unpack
from .._formats._target import Target
from .._quantizers._array import QuantizedArray
from .._quantizers._casting import CAST, CAST_OF_WEIGHT, AbstractKernel, is_cast
from .._quantizers._delayed import Scale
from .._quantizers._kinds import Asked, Quantizer
from .._quantizers._recipes import LEGS, AbstractRecipe, Role
from ._contraction import amax_of_groups, padded, quantized_in_groups
from ._lowering import Operand


@dataclasses.dataclass(frozen=True)
class Copies:
    """Makes the operands of an array's two products.

    Attributes:
        recipe: Gives the quantizers.
        role: The role of the array.
        half: The dtype of a copy that is not quantized.
        target: The device.
        join: How amaxes are joined over devices.
        axes: The axes that the first and the second product contract, negative. Unused
            by quantizers with one scale.
        step: The number of the training step, from which noise is drawn; None if
            unknown.
        rounded_to: A dtype that the values are rounded to first; None: not rounded.
        sizes: The number of rows (axis -2) of each group, if rows come in groups.
        factors: What multiplies the first and the second copy before it is quantized.
        amax: The amaxes of the rows of the first copy, if they are known.
    """

    recipe: AbstractRecipe
    role: Role
    half: np.dtype
    target: Target
    join: Join
    axes: tuple[int, int]
    step: Array | None = None
    rounded_to: np.dtype | None = None
    sizes: Array | None = None
    factors: tuple[Array | None, Array | None] = (None, None)
    amax: Array | None = None

    def first(self, x: Array, scale: Scale | None = None) -> Operand:
        """Returns the copy for y; of a gradient, that for dx.

        Args:
            x: The array.
            scale: The scale of delayed scaling.
        """
        return self._copy(x, self._quantizers()[0], 0, scale)

    def both(self, x: Array, scale: Scale | None = None) -> tuple[Operand, Operand]:
        """Returns both copies, which may be one.

        Args:
            x: The array.
            scale: The scale of delayed scaling.

        Returns:
            The result of `first`; and the copy for the product of the backward pass, or
            for dw of a gradient.
        """
        if (both := self._by_kernel(x)) is not None:
            return both
        copies, x = self._measured(x)
        first = copies.first(x, scale)
        return first, self._second(x, scale, first)

    def _measured(self, x: Array) -> tuple["Copies", Array]:
        """Makes XLA for CUDA write a gradient in 16 bits, before it takes amaxes.

        It would drop that the gradient is rounded, write it in float32, and read it
        three times. Where it transposes 8-bit copies, one kernel takes the amaxes of
        the first copy, too. It saves 1.5 of 22.9 GB in a step of two layers of 4096 x
        16384 on sm_90, 1.7 of 24.4 on sm_100 (jax 0.10.2, November 2026).
        """
        quantizer, factor = self._quantizers()[0], self.factors[0]
        if quantizer is None or factor is None or not quantizer._is_folded:
            return self, x
        if not is_cast(quantizer, self.target):
            return self, x
        if not self.target.transposes_fp8:
            return self, lax.optimization_barrier(x)
        wide = x.astype(jnp.float32) * factor
        amax = block_maximum(wide, (self.axes[0],), 0, CAST.largest)
        x, amax = lax.optimization_barrier((x, amax))
        return dataclasses.replace(self, amax=amax), x

    def _second(self, x: Array, scale: Scale | None, first: Operand) -> Operand:
        if self.recipe.backward_override == "dequantized":
            return first
        one, other = self._quantizers()
        is_shared = one is None or one.block_dimensions != 1
        if one is not None and self.role is not Role.GRADIENT:
            is_shared |= one._is_folded
        if one == other and is_shared and self.factors == (None, None):
            return first
        return self._copy(x, other, 1, scale)

    def _by_kernel(self, x: Array) -> tuple[Operand, Operand] | None:
        """Returns both copies by the recipe's kernel, or None if it does not apply."""
        kernel = kernel_of(self.recipe, self.target)
        if kernel is None or not kernel.takes(x.shape) or self.sizes is not None:
            return None
        first, second = self._quantizers()
        if first is None or second is None or self.recipe.backward_override:
            return None

        if self.target.is_met is not False:
            form = (first, second), self.half, self.axes, self.join
            more = {"step": self.step, "rounded_to": self.rounded_to}
            return kernel.quantize(x, *form, **more)
        one = self._copy(x, first, 0, None)
        other = self._second(x, None, one)
        if isinstance(one, QuantizedArray) and other is one:
            # Square blocks: one copy, which the kernel packs along either axis.
            first_axis, second_axis = self.axes
            return _packed_along(one, first_axis), _packed_along(one, second_axis)
        return one, other

    def _quantizers(self) -> tuple[Quantizer | None, Quantizer | None]:
        first, second = LEGS[self.role]
        quantizer = functools.partial(self.recipe.quantizer, self.role)
        return quantizer(leg=first), quantizer(leg=second)

    def _rounded(self, x: Array) -> Array:
        return x if self.rounded_to is None else x.astype(self.rounded_to)

    def _copy(
        self,
        x: Array,
        quantizer: Quantizer | None,
        place: int,
        scale: Scale | None,
    ) -> Operand:
        x, factor = self._rounded(x), self.factors[place]
        if quantizer is None:
            return x.astype(self.half)
        if factor is not None:
            x = x.astype(jnp.float32) * factor
        axis = self.axes[place]
        axes = {0: (), 1: (axis,), 2: (-2, -1)}[quantizer.block_dimensions]
        quantize = functools.partial(self._quantized, quantizer, scale, place)
        if self.sizes is None or -2 not in axes:
            return quantize(axes, alone, x)
        if not quantizer.block:
            # One scale for each group, which its rows repeat.
            join_rows = functools.partial(amax_of_groups, self.sizes)
            return quantize((-1,), join_rows, x)
        in_blocks = functools.partial(quantize, axes, alone)
        return quantized_in_groups(in_blocks, x, self.sizes, quantizer.block)

    def _quantized(
        self,
        quantizer: Quantizer,
        scale: Scale | None,
        salt: int,
        axes: Axes,
        join_rows: Join,
        x: Array,
    ) -> QuantizedArray:
        x = x.astype(jnp.float32)
        for one in axes:
            # A multiple of the block by construction, also for a symbolic length.
            multiple = quantizer._multiple
            x = padded(x, one, (x.shape[one] + multiple - 1) // multiple * multiple)
        key = None
        if quantizer.stochastic_rounding:
            key = noise_from(flushed(x), salt, self.step)
        if quantizer.scale_from != "history":
            scale = None
        value, inverse = scale if isinstance(scale, tuple) else (scale, None)
        amax = None if salt else self.amax
        to = Asked(self.half, axes, key, value, self.join, join_rows, amax)
        if is_cast(quantizer, self.target):
            by = CAST_OF_WEIGHT if self.role is Role.WEIGHT else CAST
        else:
            by = arithmetic_of(self.target)
            if by is EXACT or axes:  # with one scale, a CPU flushes by itself
                x = flushed(x)
        made = quantizer._quantize(x, to._replace(by=by))
        if inverse is None or quantizer.stochastic_rounding:
            return made
        return dataclasses.replace(made, inverse_scale=inverse)


def folded(
    operand: Operand, contracted: Axes, other: Quantizer | None
) -> tuple[Operand, Array | None]:
    """Takes scales out of an operand, if a product would sum over them.

    Args:
        operand: The input or weight of a product of the backward pass.
        contracted: The axes of the operand that it contracts, not negative.
        other: The quantizer of the gradient in it.

    Returns:
        The operand without scales, and what the gradient is multiplied by; or the
        operand and None.
    """
    if other is None or other.scale_from != "amax":
        return operand, None
    if not isinstance(operand, QuantizedArray) or operand.block or not operand.axes:
        return operand, None
    if operand._is_scaled_outside(contracted):
        return operand, None
    one = jnp.ones((), jnp.float32)
    bare = dataclasses.replace(operand, inverse_scale=one, axes=())
    return bare, operand._outer_scale()


def _packed_along(square: QuantizedArray, axis: int) -> QuantizedArray:
    payload = pack(unpack(square.payload, square.axes[-1]), axis)
    return dataclasses.replace(square, payload=payload, axes=(-3 - axis, axis))


def kernel_of(recipe: AbstractRecipe, target: Target) -> AbstractKernel | None:
    """Returns the kernel of a recipe, or None if the device cannot run it."""
    return getattr(recipe, "kernel", None) if target.has_block_units else None


def has_blocks(recipe: AbstractRecipe) -> bool:
    """Returns whether any quantizer of the recipe has blocks."""
    return any(one.block_dimensions for one in recipe._quantizers())


def rounds_stochastically(recipe: AbstractRecipe) -> bool:
    """Returns whether any quantizer of the recipe rounds stochastically."""
    return any(one.stochastic_rounding for one in recipe._quantizers())
