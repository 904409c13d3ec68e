"""One product of quantized operands, on the fastest path that its device has.

The paths differ in how a product is computed, not in what is quantized:

    emulated      float32 products of dequantized operands: exact but for the sums
    half          the same operands rounded to half precision, if they are not already
                  half-precision numbers; sums in float32
    FP8 units     FP8 operands, where each has one scale (CUDA from 8.9 on, TPU7x)
    block units   operands in blocks with their scales (MXFP8, NVFP4, CUDA from 10.0 on)

The last two are patterns that XLA recognizes. They are written exactly as it wants
them: a scale that is divided by, or applied after a cast, would be a pass of its own.
A path stands in `jax.lax.platform_dependent` with the emulated one as the default, so
that the same program runs on the CPU.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ._array import QuantizedArray
from ._contraction import Contraction, padded
from ._format import Format
from ._target import Target

Operand = QuantizedArray | Array


def multiply(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    dtype: np.dtype,
    target: Target,
    half: np.dtype,
    *,
    is_backward: bool,
) -> Array:
    """The product of two operands, quantized or not.

    Args:
        left: The left operand.
        right: The right operand. Contracted axes may be padded, of either.
        contraction: What to contract.
        dtype: The dtype of the result.
        target: The device.
        half: The dtype for products of what is dequantized, where that is fast.
        is_backward: Whether the product is of a backward pass, for which sums are kept
            in full float32.

    Returns:
        The product, permuted.
    """
    emulated = functools.partial(
        _dequantized, contraction=contraction, inner=np.dtype("float32"), dtype=dtype
    )
    if target.platform == "cpu":
        return emulated(left, right)
    if has_fp8_form(left, right, contraction, target):
        fast = functools.partial(
            _in_fp8,
            contraction=contraction,
            dtype=dtype,
            precision=_preset(is_backward) if target.platform == "cuda" else None,
        )
    else:
        fast = functools.partial(
            _dequantized, contraction=contraction, inner=half, dtype=dtype
        )
    if target.platform not in ("cuda", "rocm", "tpu"):
        return fast(left, right)
    branches = {target.platform: fast}
    return lax.platform_dependent(left, right, **branches, default=emulated)


def _preset(is_backward: bool) -> lax.DotAlgorithmPreset:
    if is_backward:
        return lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    return lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


def has_fp8_form(
    left: Operand, right: Operand, contraction: Contraction, target: Target
) -> bool:
    """Whether the product is one of two FP8 arrays that the target's units compute.

    cuBLAS has none of E5M2 by E5M2, and XLA none of a matrix by a vector.
    """
    if not isinstance(left, QuantizedArray) or not isinstance(right, QuantizedArray):
        return False
    if not target.has_fp8_units or left.axes or right.axes:
        return False
    both_wide = left.format is Format.E5M2 and right.format is Format.E5M2
    smallest = contraction.smallest_free_size(left.shape, right.shape)
    return not both_wide and smallest > 1


def _in_fp8(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    dtype: np.dtype,
    precision: lax.DotAlgorithmPreset | None,
) -> Array:
    assert isinstance(left, QuantizedArray) and isinstance(right, QuantizedArray)
    # float16 has not the range of the unscaled product, which bfloat16 has.
    inner = dtype if dtype == jnp.bfloat16 else jnp.dtype("float32")
    y = lax.dot_general(
        left.payload,
        right.payload,
        contraction.dimension_numbers,
        precision=precision,
        preferred_element_type=inner,
    )
    scale = left.inverse_scale * right.inverse_scale
    y = y * scale.astype(inner)
    return y.transpose(contraction.permutation).astype(dtype)


def _dequantized(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    inner: np.dtype,
    dtype: np.dtype,
) -> Array:
    # A product sees the transform of an operand only if it has that of the other one.
    rotated = _is_rotated(left) and _is_rotated(right)
    left, left_scale = _numbers_and_scale(left, rotated)
    right, right_scale = _numbers_and_scale(right, rotated)
    for here, there in zip(*contraction.dimension_numbers[0], strict=True):
        left = padded(left, here, right.shape[there])
        right = padded(right, there, left.shape[here])
    y = lax.dot_general(
        left.astype(inner),
        right.astype(inner),
        contraction.dimension_numbers,
        precision=lax.Precision.HIGHEST if inner == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    for scale in _joined(left_scale, right_scale):
        y = y * scale
    return y.transpose(contraction.permutation).astype(dtype)


def _joined(left: Array | None, right: Array | None) -> list[Array]:
    if left is not None and right is not None:
        return [left * right]
    return [scale for scale in (left, right) if scale is not None]


def _numbers_and_scale(operand: Operand, rotated: bool) -> tuple[Array, Array | None]:
    if isinstance(operand, QuantizedArray):
        return operand._factors(rotated=rotated)
    return operand, None


def _is_rotated(operand: Operand) -> bool:
    return isinstance(operand, QuantizedArray) and operand.rotated
