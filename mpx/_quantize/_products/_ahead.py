r"""Weights that are quantized before the product.

Where they lie in pieces, before they come together:

$$Q(\operatorname{gather}(w)) = \operatorname{gather}(Q(w))$$

bit for bit, where one scale is for the whole weight: that of its amax, which devices
join, or one that was known before. A quarter of the bytes of float32 travels, and each
device rounds its own piece only.

Or long before, by the optimizer, where a model stores its weights in 8 bits.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array

from .._formats._blocks import refuse_batching
from .._quantizers._array import QuantizedArray
from .._quantizers._kinds import TensorQuantizer
from .._quantizers._recipes import AbstractRecipe, Role
from ._linear import ConvolutionProduct, LinearProduct
from ._product import AbstractProduct, PrequantizedWeight


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
) -> PrequantizedWeight:
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
    return PrequantizedWeight(piece, amax).moved(move)


def may_read(product: AbstractProduct, stored: QuantizedArray) -> bool:
    """Whether a product reads the numbers of a weight that has one scale.

    Args:
        product: The product.
        stored: The weight.
    """
    if not may_travel(product):
        return False
    quantizer = product.recipe.quantizer(Role.WEIGHT)
    assert isinstance(quantizer, TensorQuantizer)  # `may_travel`
    return quantizer.format is stored.format


def stored_ahead(
    product: AbstractProduct, stored: QuantizedArray, scales: Array | None
) -> PrequantizedWeight:
    """A weight for a product, as it is stored.

    To delayed scaling its amax is the largest number that its scale leaves room for. No
    array is read for that, and what the state learns is the scale of the storage: the
    same weight in float32, under the same state, is quantized to the same numbers.

    Args:
        product: The product; `may_read` says whether it reads them.
        stored: The weight.
        scales: The scales of delayed scaling, of which that of the weight is unused.

    Returns:
        The weight, without a derivative.
    """
    stored, scales = jax.lax.stop_gradient((stored, scales))
    amax = None
    if scales is not None:
        amax = refuse_batching(stored.format.largest * stored.inverse_scale, scales)
    return PrequantizedWeight(dataclasses.replace(stored, dtype=product.dtype), amax)
