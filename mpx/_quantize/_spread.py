r"""Gradients of weights that are finite in all of their numbers, or NaN in all.

Training steps skip what is not finite, and to find out they read every gradient once
more. Where a product is quantized with one scale for each array, its operands have been
read for their amaxes:

$$|dw| \le n \cdot \max|x| \cdot \max|g|$$

with $n$ terms in each sum. So dw is finite where this is, and where it is not, the
scale of the product is made NaN, which multiplies all of it: one number of dw says
whether the others are finite. What would have been finite with $\max|x| \max|g| \ge
2^{60}$ is NaN, too: with $n \le 2^{40}$ that leaves room up to the largest number,
$2^{128}$, for a sum of such gradients and for loss scales down to `SMALLEST_SCALE`.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._array import QuantizedArray
from ._format import Format
from ._products import Operand
from ._quantizers import NVFP4Quantizer, TensorQuantizer
from ._recipes import AbstractRecipe, Role

_LARGEST_PRODUCT = 2.0**60

# Of the 28 bits between 2^60 * 2^40 and 2^128, 8 are for a sum over uses of a weight.
SMALLEST_SCALE = 2.0**-20


def can_spread(recipe: AbstractRecipe) -> bool:
    """Whether the gradient of a weight has scales for the whole of what it is from."""
    for role in (Role.INPUT, Role.GRADIENT):
        quantizer = recipe.quantizer(role, for_wgrad=True)
        if not isinstance(quantizer, TensorQuantizer | NVFP4Quantizer):
            return False
    return True


def spread(
    x: Operand, g: Operand, x_amax: Array | None, g_amax: Array | None
) -> Operand:
    """An operand of a weight's gradient, NaN if that might not be finite everywhere.

    Args:
        x: The data, quantized by a recipe that `can_spread`.
        g: The gradient of the result, quantized by it.
        x_amax: The amax of the data; None where its scale is made of it.
        g_amax: The amax of the gradient, likewise.

    Returns:
        The gradient, with another scale for the whole array.
    """
    assert isinstance(x, QuantizedArray) and isinstance(g, QuantizedArray)
    if g_amax is not None:
        # Together, or XLA takes the amax in a pass of its own, because the product
        # waits for it: 0.27 of 18.5 GB for two layers of 4096 x 16384 (jax 0.10.2,
        # compiled for sm_100, November 2026).
        payload, g_amax = lax.optimization_barrier((g.payload, g_amax))
        g = dataclasses.replace(g, payload=payload)
    of_x = _largest(x) if x_amax is None else x_amax
    of_g = _largest(g) if g_amax is None else g_amax
    # False of a NaN; and of 0 * inf, which is one.
    is_within = of_x * of_g < _LARGEST_PRODUCT
    if g.tensor_inverse_scale is None:
        scale = jnp.where(is_within, g.inverse_scale, jnp.nan)
        return dataclasses.replace(g, inverse_scale=scale)
    scale = jnp.where(is_within, g.tensor_inverse_scale, jnp.nan)
    return dataclasses.replace(g, tensor_inverse_scale=scale)


def _largest(x: QuantizedArray) -> Array:
    """The largest number that an array can stand for; NaN if one is not finite."""
    if x.tensor_inverse_scale is None:
        return x.format.largest * x.inverse_scale
    return x.format.largest * Format.E4M3.largest * x.tensor_inverse_scale
