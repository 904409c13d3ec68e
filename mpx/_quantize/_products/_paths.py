"""Names the path and the format of each leg of a linear layer's products, for reports.

A leg is *quantized* if the recipe has a quantizer for one of its operands.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._formats._blocks import alone
from .._formats._format import Format
from .._formats._target import Target, target_from
from .._quantizers._kinds import Quantizer
from .._quantizers._recipes import LEGS, AbstractRecipe, Leg, Role
from ._contraction import contractions
from ._linear import AbstractDequantizedProduct
from ._lowering import UNITS, Operand, Path, emulated_in, path_of_operands
from ._operands import Copies, folded
from ._product import AbstractProduct


class LegPath(NamedTuple):
    """How a quantized leg is computed.

    Attributes:
        path: "FP8 units", "int8 units", "block-scaled units", "dequantized" or
            "emulated".
        why: The reason, without a full stop.
        format: The format that it multiplies in: "FP8", "MXFP8", "NVFP4", "INT8", or
            two of them joined by "by"; "" if it multiplies in another dtype. On a CPU,
            which emulates all of them, that on a device that the recipe is for.
    """

    path: str
    why: str
    format: str

    @property
    def is_emulated(self) -> bool:
        """Whether it is emulated, as on a CPU."""
        return self.path == Path.EMULATED.value


@functools.lru_cache(maxsize=256)
def legs_of(product: AbstractProduct) -> Mapping[Leg, LegPath]:
    """Returns how the quantized legs of a product are computed, in order.

    Args:
        product: The product. Its shapes are unknown here; a matrix-vector product is
            always computed dequantized.
    """
    return {
        leg: _path_of(product, leg)
        for leg in Leg
        if any(_quantizers(product.recipe, leg))
    }


def legs_text(legs: Mapping[Leg, LegPath]) -> str:
    """Returns the paths and reasons; with the names of legs, where they differ."""
    groups: dict[str, list[str]] = {}
    for leg in Leg:
        one = legs.get(leg)
        text = "not quantized" if one is None else f"{one.path} ({one.why})"
        groups.setdefault(text, []).append(leg.value)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{' and '.join(of)}: {text}" for text, of in groups.items())


# One device for each set of units, the best one last.
_DEVICES = tuple(map(target_from, ("tpu v6e", "tpu7x", "sm_90", "sm_100")))
_MATRICES = (((1,), (0,)), ((), ()))
_CONTRACTIONS = dict(zip(Leg, contractions(_MATRICES, 2, 2), strict=True))


def _path_of(product: AbstractProduct, leg: Leg) -> LegPath:
    target, is_cpu = product.target, product.target.platform == "cpu"
    if isinstance(product, AbstractDequantizedProduct):
        path, why = Path.HALF, f"{product.plural} have no FP8 form"
        if is_cpu:
            path, why = Path.EMULATED, f"float32 {product.plural} on a CPU; {why}"
        return LegPath(path.value, why, "")
    devices = (target, *_DEVICES) if is_cpu else (target,)
    with_units = [one for one in devices if _path(product, leg, one) in UNITS]
    path = _path(product, leg, target)
    is_emulated = path is Path.EMULATED
    why = _reason(product, leg, devices[-1] if is_emulated else target)
    if is_emulated:
        operands = _operands(product.recipe, product.dtype, target)[leg]
        dtype = emulated_in(*operands, _CONTRACTIONS[leg], target)
        why = f"{dtype} matmuls on a CPU" + ("" if with_units else f"; {why}")
    format = _format_name(product.recipe, leg) if with_units else ""
    return LegPath(path.value, why, format)


def _path(product: AbstractProduct, leg: Leg, target: Target) -> Path:
    operands = _operands(product.recipe, product.dtype, target)[leg]
    return path_of_operands(*operands, _CONTRACTIONS[leg], target)


@functools.lru_cache(maxsize=1024)
def _operands(
    recipe: AbstractRecipe, dtype: np.dtype, target: Target
) -> dict[Leg, tuple[Any, Any]]:
    """Returns the operands of the matmuls, as shapes."""

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
        x, w, _ = made
        quantizer = functools.partial(recipe.quantizer, Role.GRADIENT)
        w[1], _ = folded(w[1], (1,), quantizer(leg=Leg.DGRAD))
        x[1], _ = folded(x[1], (0,), quantizer(leg=Leg.WGRAD))
        return made

    any_matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    x, w, g = jax.eval_shape(operands, any_matrix, any_matrix, any_matrix)
    pairs = (x[0], w[0]), (g[0], w[1]), (x[1], g[1])
    return dict(zip(Leg, pairs, strict=True))


def _quantizers(recipe: AbstractRecipe, leg: Leg) -> list[Quantizer | None]:
    return [recipe.quantizer(role, leg=leg) for role in Role if leg in LEGS[role]]


def _format_name(recipe: AbstractRecipe, leg: Leg) -> str:
    found = [one for one in _quantizers(recipe, leg) if one is not None]
    return " by ".join(dict.fromkeys(map(_format_of, found)))


def _format_of(quantizer: Quantizer) -> str:
    if quantizer.format is Format.INT8:
        return "INT8"
    prefix = {"e8m0": "MX", "e4m3": "NV"}.get(quantizer.scales, "")
    return f"{prefix}FP{quantizer.format.bits}"


def _reason(product: AbstractProduct, leg: Leg, target: Target) -> str:
    """Returns why a leg has the path that it has on a target."""
    path = _path(product, leg, target)
    if path in (Path.FP8_UNITS, Path.INT8_UNITS):
        return f"{'cuBLASLt' if target.platform == 'cuda' else 'XLA'} on {target.name}"
    if path is Path.BLOCK_UNITS:
        return f"cuDNN on {target.name}, from cuDNN 9.10 on"
    found = [x for x in _quantizers(product.recipe, leg) if x is not None]
    if len(found) < 2:
        return "one operand is not quantized"
    if any(one.format is Format.INT8 for one in found):
        return f"{target.name} has no fast matmul of int8"
    blocks = [one.block for one in found if one.scales not in ("e8m0", "e4m3")]
    if any(blocks):
        return f"XLA has no fast matmul for blocks of {max(blocks)}"
    if any(one.block for one in found):
        if target.has_block_units:
            return "the operands have incompatible blocks"
        return f"{target.name} has no hardware for scaled blocks"
    if target.has_fp8_units:
        return f"{target.name} has no matmul of these formats"
    return f"{target.name} has no FP8 hardware that XLA uses"
