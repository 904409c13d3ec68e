"""Refusing the derivative of a derivative rule of a quantized product.

The rules of a product compute with numbers that were rounded, by bit operations and
casts to 8 bits. The derivative of these is zero or nothing useful, and a second
derivative through them would be wrong without a word: by 67 to 100 % in a Hessian.
"""

from typing import NoReturn

import jax
from jaxtyping import PyTree


@jax.custom_jvp
def differentiated_once(arrays: object) -> PyTree:
    """What a derivative rule is given: an error where that has a tangent itself."""
    return arrays


@differentiated_once.defjvp
def _refuse(primals: PyTree, tangents: PyTree) -> NoReturn:
    # JAX does not ask for it where all tangents are zero.
    raise TypeError(
        "A matmul under a recipe has no second derivative (`jax.hessian`, a "
        "gradient penalty, a gradient step inside a loss): its first one is "
        "computed from quantized values. Put `mpx.autocast(..., recipe=...)` around "
        "the function that computes the inner derivative, so that each matmul in it "
        "is quantized separately; or compute the inner derivative without the "
        "recipe: `mpx.autocast(func, recipe=None)`."
    )
