"""Names the path and the formats of a linear layer's products, for reports."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._formats._blocks import alone
from .._formats._target import Target, target_from
from .._quantizers._kinds import BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from .._quantizers._recipes import AbstractRecipe, Role
from ._contraction import contractions
from ._linear import AbstractDequantizedProduct
from ._lowering import UNITS, Operand, Path, emulated_in, path_of_operands
from ._operands import Copies
from ._product import AbstractProduct

_MATRICES = (((1,), (0,)), ((), ()))


def path_of(product: AbstractProduct) -> tuple[str, str]:
    """Returns how the forward product is computed, and why.

    Args:
        product: The product. Its shapes are unknown here; a matrix-vector product is
            always computed dequantized.

    Returns:
        The path ("FP8 units", "block-scaled units", "dequantized" or "emulated") and
        the reason, without a full stop.
    """
    target = product.target
    if isinstance(product, AbstractDequantizedProduct):
        reason = f"{product.plural} have no FP8 form"
        if target.platform == "cpu":
            reason = f"float32 {product.plural} on a CPU; {reason}"
            return Path.EMULATED.value, reason
        return Path.HALF.value, reason
    path, *_ = _paths(product.recipe, product.dtype, target)
    return path.value, _reason(path, product, target)


def formats_of(product: AbstractProduct) -> tuple[str, str]:
    """Returns the formats in which a product multiplies, forward and backward.

    On its target; or, since a CPU emulates all of them, on a device that the recipe is
    for.

    Args:
        product: The product, as for `path_of`.

    Returns:
        "FP8", "MXFP8", "NVFP4", or two of them joined by "by"; "" if it multiplies in
        another dtype.
    """
    if isinstance(product, AbstractDequantizedProduct):
        return "", ""
    recipe, is_cpu = product.recipe, product.target.platform == "cpu"
    devices = _DEVICES if is_cpu else (product.target,)
    paths = [_paths(recipe, product.dtype, device) for device in devices]
    # On a real device, its program shows the dtypes of the gradients' matmuls.
    is_in = all if is_cpu else any
    has_forward = any(one in UNITS for one, *_ in paths)
    has_backward = any(is_in(one in UNITS for one in rest) for _, *rest in paths)
    forward = recipe.quantizer(Role.INPUT), recipe.quantizer(Role.WEIGHT)
    backward = recipe.quantizer(Role.GRADIENT), recipe.quantizer(Role.WEIGHT)
    return (
        _format_name(forward) if has_forward else "",
        _format_name(backward) if has_backward else "",
    )


# One device for each set of units, the best one last.
_DEVICES = tuple(map(target_from, ("tpu7x", "sm_90", "sm_100")))


def _paths(
    recipe: AbstractRecipe, dtype: np.dtype, target: Target
) -> tuple[Path, Path, Path]:
    """Returns the paths of a matmul and of the gradients of data and weight."""
    forward, for_data, for_weight = (
        path_of_operands(*pair, contraction, target)
        for pair, contraction in zip(
            _pairs(recipe, dtype, target), contractions(_MATRICES, 2, 2), strict=True
        )
    )
    return forward, for_data, for_weight


@functools.lru_cache(maxsize=1024)
def _pairs(
    recipe: AbstractRecipe, dtype: np.dtype, target: Target
) -> tuple[tuple[Any, Any], ...]:
    """Returns the operands of these matmuls, as shapes."""

    def operands(data: Array, weight: Array, gradient: Array) -> list[list[Operand]]:
        made = []
        for role, x, axes in (
            (Role.INPUT, data, (-1, -2)),
            (Role.WEIGHT, weight, (-2, -1)),
            (Role.GRADIENT, gradient, (-1, -2)),
        ):
            copies = Copies(recipe, role, dtype, target, alone, axes)
            first = copies.first(x)
            made.append([first, copies._second(x, None, first)])
        return made

    any_matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    x, w, g = jax.eval_shape(operands, any_matrix, any_matrix, any_matrix)
    return (x[0], w[0]), (g[0], w[1]), (x[1], g[1])


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
        best = _DEVICES[-1]
        path, *_ = _paths(product.recipe, product.dtype, best)
        more = "" if path in UNITS else f"; {_reason(path, product, best)}"
        forward, *_ = _pairs(product.recipe, product.dtype, target)
        return f"{emulated_in(*forward, target)} matmuls on a CPU{more}"
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
