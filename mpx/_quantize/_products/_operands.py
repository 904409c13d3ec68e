"""Operands of a linear layer's products: which are quantized, how, along which axis.

Each of the three arrays is an operand of two products: x of y = x w and dw = xᵀ g, w of
y and dx = g wᵀ, g of dx and dw. With blocks along the contracted axis, the two products
need two copies, both quantized from high precision. With one scale, or square blocks,
they share one copy.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._formats._arithmetic import EXACT, arithmetic_of
from .._formats._blocks import Axes, Join
from .._formats._rounding import flushed, noise_from, pack, unpack
from .._formats._target import Target
from .._quantizers._array import QuantizedArray
from .._quantizers._casting import CAST, CAST_OF_WEIGHT, is_cast
from .._quantizers._delayed import Scale
from .._quantizers._kinds import AbstractKernel, AbstractQuantizer, Asked
from .._quantizers._recipes import AbstractRecipe, Role
from ._contraction import padded, quantized_in_groups
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

    def first(self, x: Array, scale: Scale | None = None) -> Operand:
        """Returns the copy for y; of a gradient, that for dx.

        Args:
            x: The array.
            scale: The scale of delayed scaling.
        """
        return self._copy(x, self._quantizers()[0], self.axes[0], scale, salt=0)

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
        first = self.first(x, scale)
        return first, self._second(x, scale, first)

    def _second(self, x: Array, scale: Scale | None, first: Operand) -> Operand:
        if self.role is not Role.GRADIENT:
            if self.recipe.backward_override == "high_precision":
                return self._rounded(x).astype(self.half)
            if self.recipe.backward_override == "dequantized":
                return first
        one, other = self._quantizers()
        if one == other and (one is None or one.block_dimensions != 1):
            return first
        return self._copy(x, other, self.axes[1], scale, salt=1)

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
        one = self._copy(x, first, self.axes[0], None, salt=0)
        other = self._second(x, None, one)
        if isinstance(one, QuantizedArray) and other is one:
            # Square blocks: one copy, which the kernel packs along either axis.
            first_axis, second_axis = self.axes
            return _packed_along(one, first_axis), _packed_along(one, second_axis)
        return one, other

    def _quantizers(self) -> tuple[AbstractQuantizer | None, AbstractQuantizer | None]:
        first = self.recipe.quantizer(self.role)
        if self.role is Role.WEIGHT:
            return first, first
        return first, self.recipe.quantizer(self.role, for_wgrad=True)

    def _rounded(self, x: Array) -> Array:
        return x if self.rounded_to is None else x.astype(self.rounded_to)

    def _copy(
        self,
        x: Array,
        quantizer: AbstractQuantizer | None,
        axis: int,
        scale: Scale | None,
        salt: int,
    ) -> Operand:
        x = self._rounded(x)
        if quantizer is None:
            return x.astype(self.half)
        axes = {0: (), 1: (axis,), 2: (-2, -1)}[quantizer.block_dimensions]
        quantize = functools.partial(self._quantized, quantizer, axes, scale, salt)
        if self.sizes is None or -2 not in axes:
            return quantize(x)
        return quantized_in_groups(quantize, x, self.sizes, quantizer.block)

    def _quantized(
        self,
        quantizer: AbstractQuantizer,
        axes: Axes,
        scale: Scale | None,
        salt: int,
        x: Array,
    ) -> QuantizedArray:
        x = x.astype(jnp.float32)
        for one in axes:
            # A multiple of the block by construction, also for a symbolic length.
            blocks = (x.shape[one] + quantizer.block - 1) // quantizer.block
            x = padded(x, one, blocks * quantizer.block)
        key = None
        if quantizer.stochastic_rounding:
            key = noise_from(flushed(x), salt, self.step)
        value, inverse = scale if isinstance(scale, tuple) else (scale, None)
        to = Asked(self.half, axes, key, value, self.join)
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


def _packed_along(square: QuantizedArray, axis: int) -> QuantizedArray:
    payload = pack(unpack(square.payload, square.axes[-1]), axis)
    return dataclasses.replace(square, payload=payload, axes=(-3 - axis, axis))


def kernel_of(recipe: AbstractRecipe, target: Target) -> AbstractKernel | None:
    """Returns the kernel of a recipe, or None if the device cannot run it."""
    return getattr(recipe, "kernel", None) if target.has_block_units else None


def has_blocks(recipe: AbstractRecipe) -> bool:
    """Returns whether any quantizer of the recipe has blocks."""
    return any(one.block_dimensions for one in _quantizers_of(recipe))


def rounds_stochastically(recipe: AbstractRecipe) -> bool:
    """Returns whether any quantizer of the recipe rounds stochastically."""
    return any(one.stochastic_rounding for one in _quantizers_of(recipe))


def _quantizers_of(recipe: AbstractRecipe) -> list[AbstractQuantizer]:
    uses = [(role, False) for role in Role]
    uses += [(Role.INPUT, True), (Role.GRADIENT, True)]
    quantizers = (recipe.quantizer(role, for_wgrad=use) for role, use in uses)
    return [one for one in quantizers if one is not None]
