r"""Weights that are quantized where they lie in pieces, before they come together.

$$Q(\operatorname{gather}(w)) = \operatorname{gather}(Q(w))$$

bit for bit, where one scale is for the whole weight: that of its amax, which devices
join, or one that was known before. A quarter of the bytes of float32 travels, and each
device rounds its own piece only.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array

from ._array import QuantizedArray
from ._convolution import ConvolutionProduct
from ._linear import LinearProduct
from ._product import AbstractProduct, Ahead
from ._quantizers import TensorQuantizer
from ._recipes import AbstractRecipe, Role


def may_travel(product: AbstractProduct) -> bool:
    """Whether all that a product reads of its weight is one array of 8 bits.

    Not where blocks share scales, which pieces may cut, nor where the backward pass
    reads the weight in half precision.
    """
    if not isinstance(product, LinearProduct | ConvolutionProduct):
        return False
    recipe: AbstractRecipe = product.recipe
    quantizer = recipe.quantizer(Role.WEIGHT)
    return (
        isinstance(quantizer, TensorQuantizer)
        and not quantizer.stochastic_rounding
        and recipe.backward_override != "high_precision"
    )


def quantized_ahead(
    product: AbstractProduct,
    weight: Array,
    scales: Array | None,
    move: Callable[[Array], Array],
) -> Ahead:
    """A weight for a product, quantized where it lies and then moved.

    Args:
        product: The product; `may_travel` says whether it can be.
        weight: The piece of the weight that is here, floating.
        scales: The scales of delayed scaling.
        move: Brings the pieces together, and says how they lie there.

    Returns:
        The whole weight, without a derivative.
    """
    weight, scales = jax.lax.stop_gradient((weight, scales))
    amax, scale = product._scaled(Role.WEIGHT, weight, scales)
    piece = product._copies(Role.WEIGHT).first(weight, scale)
    assert isinstance(piece, QuantizedArray)  # `may_travel`
    return Ahead(piece, amax).moved(move)
