"""Which path the products of a linear layer take, and in which format, in words."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._amax import alone
from ._contraction import contractions
from ._dequantized_product import AbstractDequantizedProduct
from ._operands import Copies
from ._product import AbstractProduct
from ._products import Operand, Path, path_of_operands
from ._quantizers import BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from ._recipes import AbstractRecipe, Role
from ._target import Target

_MATRICES = (((1,), (0,)), ((), ()))


def path_of(product: AbstractProduct) -> tuple[str, str]:
    """How the forward product is computed, and why.

    Args:
        product: What product. Its shapes are not known here; a matrix by a vector is
            always computed dequantized.

    Returns:
        The path ("FP8 units", "block-scaled units", "dequantized" or "emulated") and
        the reason, without a full stop.
    """
    target, recipe = product.target, product.recipe
    if isinstance(product, AbstractDequantizedProduct):
        if target.platform == "cpu":
            return Path.EMULATED.value, f"float32 {product.plural} on a CPU"
        return Path.HALF.value, f"{product.plural} have no FP8 form"

    def operands(left: Array, right: Array) -> tuple[Operand, Operand]:
        like = product.dtype, target, alone
        data = Copies(recipe, Role.INPUT, *like, (-1, -2)).first(left)
        weight = Copies(recipe, Role.WEIGHT, *like, (-2, -1)).first(right)
        return data, weight

    any_matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    left, right = jax.eval_shape(operands, any_matrix, any_matrix)
    forward = contractions(_MATRICES, 2, 2).forward
    path = path_of_operands(left, right, forward, target)
    return path.value, _reason(path, product, target)


def formats_of(recipe: AbstractRecipe) -> tuple[str, str]:
    """The formats of a recipe's products, forward and backward.

    Args:
        recipe: The recipe.

    Returns:
        "FP8", "MXFP8", "NVFP4", or two of them with "by" between; "" where an operand
        stays in high precision.
    """
    forward = recipe.quantizer(Role.INPUT), recipe.quantizer(Role.WEIGHT)
    backward = recipe.quantizer(Role.GRADIENT), recipe.quantizer(Role.WEIGHT)
    return _format_name(forward), _format_name(backward)


def _format_name(quantizers: tuple[object, ...]) -> str:
    if None in quantizers:
        return ""
    return " by ".join(dict.fromkeys(map(_format_of, quantizers)))


def _format_of(quantizer: object) -> str:
    if isinstance(quantizer, NVFP4Quantizer):
        return "NVFP4"
    return "MXFP8" if isinstance(quantizer, MXFP8Quantizer) else "FP8"


def _reason(path: Path, product: AbstractProduct, target: Target) -> str:
    if path is Path.EMULATED:
        return "float32 matmuls on a CPU"
    if path is Path.FP8_UNITS:
        return f"{'cuBLASLt' if target.platform == 'cuda' else 'XLA'} on {target.name}"
    if path is Path.BLOCK_UNITS:
        return f"cuDNN on {target.name}, from cuDNN 9.10 on"
    quantizers = [product.recipe.quantizer(r) for r in (Role.INPUT, Role.WEIGHT)]
    if any(isinstance(one, BlockQuantizer) for one in quantizers):
        return "XLA has no fast matmul for blocks of 128"
    if None in quantizers:
        return "one operand is not quantized"
    if any(one is not None and one.block_dimensions for one in quantizers):
        if target.has_block_units:
            return "the operands have incompatible blocks"
        return f"{target.name} has no hardware for scaled blocks"
    if target.has_fp8_units:
        return f"{target.name} has no matmul of these formats"
    return f"{target.name} has no FP8 hardware that XLA uses"
