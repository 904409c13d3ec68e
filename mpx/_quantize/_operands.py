"""Operands of a linear layer's products: which are quantized, how, along which axis.

Each of the three arrays is an operand of two products: x of y = x w and dw = xᵀ g, w of
y and dx = g wᵀ, g of dx and dw. Where blocks lie along the contracted axis, the two
products want two copies, both quantized from high precision. One scale, or square
blocks, serve both products with the same copy.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._amax import Join
from ._casting import is_cast, quantize_by_cast
from ._contraction import padded
from ._noise import key_from
from ._products import Operand
from ._quantizers import AbstractQuantizer
from ._recipes import AbstractRecipe, Role
from ._rounding import flushed
from ._target import Target


@dataclasses.dataclass(frozen=True)
class Copies:
    """How an array becomes the operands of its two products.

    Attributes:
        recipe: Gives the quantizers.
        role: What the array is.
        half: The dtype of a copy that is not quantized.
        target: The device.
        join: How amaxes are joined over devices.
        axes: The axis that the first product contracts and that the second one does,
            negative. Without meaning for quantizers with one scale.
        step: The number of the training step, by which noise is drawn; None if nobody
            knows it.
    """

    recipe: AbstractRecipe
    role: Role
    half: np.dtype
    target: Target
    join: Join
    axes: tuple[int, int]
    step: Array | None = None

    def first(self, x: Array, scale: Array | None = None) -> Operand:
        """The copy for y, or for dx of a gradient.

        Args:
            x: The array.
            scale: The scale of delayed scaling.
        """
        return self._copy(x, self._quantizers()[0], self.axes[0], scale, salt=0)

    def second(
        self,
        x: Array,
        first: Operand,
        scale: Array | None = None,
    ) -> Operand:
        """The copy for the product of the backward pass, or for dw of a gradient.

        Args:
            x: The array.
            first: What `first` gave for it.
            scale: The scale of delayed scaling.
        """
        if self.role is not Role.GRADIENT:
            if self.recipe.backward_override == "high_precision":
                return x.astype(self.half)
            if self.recipe.backward_override == "dequantized":
                return first
        one, other = self._quantizers()
        if one == other and (one is None or one.block_dimensions != 1):
            return first
        return self._copy(x, other, self.axes[1], scale, salt=1)

    def _quantizers(self) -> tuple[AbstractQuantizer | None, AbstractQuantizer | None]:
        first = self.recipe.quantizer(self.role)
        if self.role is Role.WEIGHT:
            return first, first
        return first, self.recipe.quantizer(self.role, for_wgrad=True)

    def _copy(
        self,
        x: Array,
        quantizer: AbstractQuantizer | None,
        axis: int,
        scale: Array | None,
        salt: int,
    ) -> Operand:
        if quantizer is None:
            return x.astype(self.half)
        axes = {0: (), 1: (axis,), 2: (-2, -1)}[quantizer.block_dimensions]
        x = x.astype(jnp.float32)
        for one in axes:
            # As a multiple, so that it is known to be one whatever the length.
            blocks = (x.shape[one] + quantizer.block - 1) // quantizer.block
            x = padded(x, one, blocks * quantizer.block)
        key = None
        if quantizer.stochastic_rounding:
            key = key_from(flushed(x), salt, self.step)
        if is_cast(quantizer, self.target):
            return quantize_by_cast(
                quantizer, self.target, x, self.half, axes, key, scale, self.join
            )
        x = flushed(x)
        return quantizer._quantize(x, self.half, axes, key, scale, self.join)


def has_blocks(recipe: AbstractRecipe) -> bool:
    """Whether a quantizer of the recipe has blocks."""
    return any(one.block_dimensions for one in _quantizers_of(recipe))


def rounds_stochastically(recipe: AbstractRecipe) -> bool:
    """Whether a quantizer of the recipe does."""
    return any(one.stochastic_rounding for one in _quantizers_of(recipe))


def _quantizers_of(recipe: AbstractRecipe) -> list[AbstractQuantizer]:
    uses = [(role, False) for role in Role]
    uses += [(Role.INPUT, True), (Role.GRADIENT, True)]
    quantizers = (recipe.quantizer(role, for_wgrad=use) for role, use in uses)
    return [one for one in quantizers if one is not None]
