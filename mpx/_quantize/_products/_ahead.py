r"""Weights that are quantized before the product.

A sharded weight, before it is gathered:

$$Q(\operatorname{gather}(w)) = \operatorname{gather}(Q(w))$$

bit for bit, if the whole weight has one scale: from its amax, joined over devices, or
known before. Communication takes a quarter of the bytes of float32, and each device
rounds only its shard.

Or long before, by the optimizer, if a model stores its weights in 8 bits
(`mpx/_stored_weights.py`).
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array

from .._formats._blocks import refuse_batching
from .._quantizers._array import QuantizedArray
from .._quantizers._recipes import AbstractRecipe, Leg, Role
from ._linear import ConvolutionProduct, LinearProduct
from ._product import AbstractProduct, PrequantizedWeight


def may_travel(product: AbstractProduct) -> bool:
    """Returns whether a product reads its weight only as one 8-bit array.

    False if blocks share scales, which shards may cut, or if the backward pass reads
    the weight in half precision.
    """
    if not isinstance(product, LinearProduct | ConvolutionProduct):
        return False
    recipe: AbstractRecipe = product.recipe
    quantizer = recipe.quantizer(Role.WEIGHT)
    for_dgrad = recipe.quantizer(Role.WEIGHT, leg=Leg.DGRAD)
    return (
        quantizer is not None
        and not quantizer.block_dimensions
        and not quantizer.stochastic_rounding
        and (quantizer == for_dgrad or recipe.backward_override == "dequantized")
    )


def quantized_ahead(
    product: AbstractProduct,
    weight: Array,
    scales: Array | None,
    move: Callable[[Array], Array],
) -> PrequantizedWeight:
    """Quantizes a shard of a weight for a product, then gathers it.

    Args:
        product: The product, for which `may_travel` is True.
        weight: The shard of the weight on this device, floating.
        scales: The scales of delayed scaling.
        move: Gathers the shards and sets their sharding.

    Returns:
        The whole weight, without a derivative.
    """
    weight, scales = jax.lax.stop_gradient((weight, scales))
    amax, piece, _ = product._on_target(
        AbstractProduct._quantized, weight, scales, role=Role.WEIGHT
    )
    assert isinstance(piece, QuantizedArray)  # `may_travel`
    return PrequantizedWeight(piece, amax).moved(move)


def may_read(product: AbstractProduct, stored: QuantizedArray) -> bool:
    """Returns whether a product can read the payload of this weight with one scale.

    Args:
        product: The product.
        stored: The weight.
    """
    if not may_travel(product):
        return False
    quantizer = product.recipe.quantizer(Role.WEIGHT)
    assert quantizer is not None  # `may_travel`
    has_scale = isinstance(quantizer.scale_from, str)  # and no constant one
    return has_scale and quantizer.format is stored.format


def stored_ahead(
    product: AbstractProduct, stored: QuantizedArray, scales: Array | None
) -> PrequantizedWeight:
    """Returns a stored weight for a product, unchanged.

    Delayed scaling gets as amax the largest value that its scale allows. No array is
    read for that, and the state takes over the scale of the storage: the same weight in
    float32, under the same state, is quantized to the same values.

    Args:
        product: The product, for which `may_read` is True.
        stored: The weight.
        scales: The scales of delayed scaling; that of the weight is unused.

    Returns:
        The weight, without a derivative.
    """
    stored, scales = jax.lax.stop_gradient((stored, scales))
    amax = None
    if scales is not None:
        amax = refuse_batching(stored.format.largest * stored.inverse_scale, scales)
    return PrequantizedWeight(dataclasses.replace(stored, dtype=product.dtype), amax)
