"""Products of MXFP8 and NVFP4 arrays for units that know blocks and their scales.

`jax.nn.scaled_matmul` becomes cuDNN's call of them on Blackwell (with an older cuDNN it
is computed otherwise, silently). It takes matrices with the contracted axis last and
one batch axis in front, scales beside them, and neither knows NVFP4's scale of the
tensor nor `jax.vmap` over one operand alone: that is what stands here.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax_compat import as_varying, varying_axes
from ._array import QuantizedArray
from ._contraction import Contraction
from ._format import Format
from ._target import Target


def have_block_form(
    left: QuantizedArray, right: QuantizedArray, target: Target
) -> bool:
    """Whether the target's units multiply two arrays with blocks.

    Those of MXFP8 (not E5M2 by E5M2) or of NVFP4, both Hadamard-transformed or neither.
    """
    if not target.has_block_units or not left._is_rotated_like(right):
        return False
    dtypes = {str(one.inverse_scale.dtype) for one in (left, right)}
    blocks = {left.block, right.block}
    if blocks == {32} and dtypes == {"float8_e8m0fnu"}:
        return Format.E4M3 in (left.format, right.format)
    return blocks == {16} and dtypes == {"float8_e4m3fn"}


def in_blocks(
    left: QuantizedArray,
    right: QuantizedArray,
    contraction: Contraction,
    dtype: np.dtype,
) -> Array:
    """The product of arrays [*batch, rows, columns], which blocks lie in.

    Args:
        left: The left operand.
        right: The right operand.
        contraction: What to contract: one axis of the last two, of either.
        dtype: The dtype of the result.
    """
    (here,), (there,) = contraction.dimension_numbers[0]
    left_payload, left_scales = _with_axis_last(left, here - left.ndim)
    right_payload, right_scales = _with_axis_last(right, there - right.ndim)
    tensor = [
        one.tensor_inverse_scale
        for one in (left, right)
        if one.tensor_inverse_scale is not None
    ]
    # float16 may not have the range of a result. bfloat16 has it, and is rounded once
    # more (2^-9) where a scale of the tensor follows: an array of float32 would be
    # twice as many bytes to write, and to read in each use.
    inner = dtype if dtype == jnp.bfloat16 else jnp.dtype("float32")
    multiply = _matrix_product(inner)
    y = multiply(left_payload, right_payload, left_scales, right_scales)
    # JAX's call does not say that its result varies between devices as its operands do.
    y = as_varying(y, varying_axes(left_payload) | varying_axes(right_payload))
    y = y.reshape(*left.shape[:-2], *y.shape[1:])
    if tensor:
        y = y.astype(jnp.float32) * math.prod(tensor[1:], start=tensor[0])
    return y.astype(dtype)


def _with_axis_last(operand: QuantizedArray, axis: int) -> tuple[Array, Array]:
    """Payload and scales as [batch, rows, contracted]."""
    payload, scales = operand.payload, operand.inverse_scale
    other = -3 - axis
    if len(operand.axes) == 2:
        scales = jnp.repeat(scales, operand.block, axis=other)
    if operand.format is Format.E2M1:
        packed = operand.axes[-1]
        # Of a transposed argument XLA gives a bitcast its layout, and transposes what
        # has been transposed before; the axis of one number keeps both in order
        # (jax 0.10.2, November 2026).
        numbers = jnp.moveaxis(payload, packed, -1)[..., None]
        numbers = lax.bitcast_convert_type(numbers, jnp.float4_e2m1fn)
        numbers = numbers.reshape(*numbers.shape[:-3], -1)
        payload = jnp.moveaxis(numbers, -1, packed)
    return _as_matrices(payload, axis), _as_matrices(scales, axis)


def _as_matrices(x: Array, last: int) -> Array:
    rows, length = x.shape[-3 - last], x.shape[last]
    return jnp.moveaxis(x, last, -1).reshape(-1, rows, length)


def _matrix_product(dtype: np.dtype) -> Callable[..., Array]:
    @jax.custom_batching.custom_vmap
    def product(*operands: Array) -> Array:
        return jax.nn.scaled_matmul(*operands, preferred_element_type=dtype)

    @product.def_vmap
    def rule(
        size: int, are_batched: Sequence[bool], *operands: Array
    ) -> tuple[Array, bool]:
        folded = []
        for x, is_batched in zip(operands, are_batched, strict=True):
            if not is_batched:
                x = jnp.broadcast_to(x[None], (size, *x.shape))
            folded.append(x.reshape(-1, *x.shape[2:]))
        y = product(*folded)
        return y.reshape(size, -1, *y.shape[1:]), True

    return product
