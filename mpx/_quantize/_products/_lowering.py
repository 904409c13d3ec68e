"""Computes one matmul of quantized operands, on the fastest path of its device.

The paths differ in the computation of a matmul, not in its quantized operands:

    emulated      float32 matmul of dequantized operands: exact up to the sums.
                  bfloat16 operands on a CPU, if those hold the values exactly
    half          the same operands, rounded to half precision if they are not already
                  half-precision values; sums in float32
    FP8 units     FP8 operands whose scales multiply the result (CUDA 8.9, TPU7x, later)
    int8 units    the same of integers, with sums in int32 (TPUs from v5e to v6e, CUDA
                  from 8.0 to 10.0)
    block units   operands in blocks with their scales (MXFP8, NVFP4, CUDA from 10.0 on)

The last two are patterns that XLA recognizes, and are written exactly in its form: a
division by a scale, or a scale after a cast, would be a separate pass. On other
platforms the same program takes the emulated path: see `on_target`.
"""

import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from ..._base.jax_compat import as_varying, varying_axes
from ..._program import data_scope, multiply_wide
from .._formats._format import Format
from .._formats._target import Target
from .._quantizers._array import QuantizedArray
from .._quantizers._recipes import Leg
from ._contraction import Axes, Contraction, GroupedArray, padded

# --- MXFP8 and NVFP4: block-scaled matmuls --------------------------------------------
#
# `jax.nn.scaled_matmul` becomes a cuDNN call on Blackwell; an older cuDNN silently
# computes it another way. It takes matrices with the contracted axis last, one batch
# axis in front, and their scales. It supports neither NVFP4's tensor scale nor
# `jax.vmap` over only one operand; both are added here.


def have_block_form(
    left: QuantizedArray, right: QuantizedArray, target: Target
) -> bool:
    """Returns whether the target's block units multiply these two arrays.

    True for two MXFP8 arrays (not E5M2 by E5M2) or two NVFP4 arrays, if both or neither
    are Hadamard-transformed.
    """
    if not target.has_block_units or not left._is_rotated_like(right):
        return False
    dtypes = {str(one.inverse_scale.dtype) for one in (left, right)}
    blocks, formats = {left.block, right.block}, {left.format, right.format}
    if blocks == {32} and dtypes == {"float8_e8m0fnu"}:
        return Format.E4M3 in formats <= {Format.E4M3, Format.E5M2}
    is_nvfp4 = formats == {Format.E2M1} and dtypes == {"float8_e4m3fn"}
    return is_nvfp4 and blocks == {16}


def in_blocks(
    left: QuantizedArray,
    right: QuantizedArray,
    contraction: Contraction,
    dtype: np.dtype,
) -> Array:
    """Multiplies arrays [*batch, rows, columns] that have blocks.

    Args:
        left: The left operand.
        right: The right operand.
        contraction: The contraction, over one of the last two axes of each operand.
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
    # A result may exceed the range of float16. bfloat16 has the range, and costs one
    # more rounding (2^-9) if a tensor scale follows; a float32 array would take twice
    # the bytes to write, and to read in each use.
    inner = dtype if dtype == jnp.bfloat16 else jnp.dtype("float32")
    multiply = _matrix_product(inner)
    y = multiply(left_payload, right_payload, left_scales, right_scales)
    # JAX's call does not mark its result as varying between devices like its operands.
    y = as_varying(y, varying_axes(left_payload) | varying_axes(right_payload))
    y = y.reshape(*left.shape[:-2], *y.shape[1:])
    if tensor:
        y = y.astype(jnp.float32) * math.prod(tensor[1:], start=tensor[0])
    return y.astype(dtype)


def _with_axis_last(operand: QuantizedArray, axis: int) -> tuple[Array, Array]:
    """Returns payload and scales as [batch, rows, contracted]."""
    payload, scales = operand.payload, operand.inverse_scale
    other = -3 - axis
    if len(operand.axes) == 2:
        scales = jnp.repeat(scales, operand.block, axis=other)
    if operand.format is Format.E2M1:
        packed = operand.axes[-1]
        # XLA gives the bitcast of a transposed argument that argument's layout, and
        # transposes it a second time; an extra axis of length 1 keeps both in order
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


# --- The path of a matmul -------------------------------------------------------------

Operand = QuantizedArray | GroupedArray | Array


class Path(enum.Enum):
    """How a matmul is computed; see the module's docstring."""

    EMULATED = "emulated"
    HALF = "dequantized"
    FP8_UNITS = "FP8 units"
    INT8_UNITS = "int8 units"
    BLOCK_UNITS = "block-scaled units"


UNITS = (Path.FP8_UNITS, Path.INT8_UNITS, Path.BLOCK_UNITS)
"""The paths of products that are computed with the bits of their operands."""


def in_leg(leg: Leg) -> contextlib.AbstractContextManager[object]:
    """Returns a scope that marks the equations of a matmul with its leg."""
    return data_scope(f"quantized_{leg.value}", leg)


def multiply(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    dtype: np.dtype,
    is_summed: bool = False,
    *,
    target: Target,
    half: np.dtype,
    leg: Leg,
) -> Array:
    """Multiplies two operands, quantized or not.

    Args:
        left: The left operand.
        right: The right operand. Contracted axes of both may be padded.
        contraction: The contraction.
        dtype: The dtype of the result.
        is_summed: Whether the result is summed over devices; then no operation may come
            between the matmul and that sum.
        target: The device.
        half: The dtype for matmuls of dequantized operands on devices that are fast in
            it.
        leg: Which matmul it is. The sums of a backward pass are in full float32.

    Returns:
        The product, permuted.
    """
    dequantized = functools.partial(_dequantized, contraction=contraction, dtype=dtype)
    if target.is_met is False:
        return dequantized(left, right, inner=np.dtype("float32"))
    path = path_of_operands(left, right, contraction, target)
    if path is Path.EMULATED:
        inner = emulated_in(left, right, contraction, target)
        is_in_form = inner == jnp.bfloat16
        fast = functools.partial(dequantized, inner=inner, is_in_form=is_in_form)
    elif path is Path.FP8_UNITS:
        is_cuda, is_backward = target.platform == "cuda", leg is not Leg.FORWARD
        fast = functools.partial(
            _in_fp8,
            contraction=contraction,
            dtype=dtype,
            precision=_preset(is_backward) if is_cuda else None,
            stands_alone=is_cuda and not is_backward,
        )
        has_rows = any(isinstance(x, QuantizedArray) and x.axes for x in (left, right))
        if is_summed and is_cuda and dtype == jnp.float32 and not has_rows:
            fast = functools.partial(_in_fp8_to_sum, contraction=contraction)
    elif path is Path.INT8_UNITS:
        fast = functools.partial(_in_int8, contraction=contraction, dtype=dtype)
    elif path is Path.BLOCK_UNITS:
        fast = functools.partial(in_blocks, contraction=contraction, dtype=dtype)
    else:
        fast = functools.partial(dequantized, inner=half)
    with in_leg(leg):
        return fast(left, right)


def path_of_operands(
    left: object, right: object, contraction: Contraction, target: Target
) -> Path:
    """Returns the path of a matmul. Shapes and options decide it, values do not.

    Args:
        left: The left operand, or its `jax.eval_shape`.
        right: The same for the right operand.
        contraction: The contraction.
        target: The device.
    """
    without = Path.EMULATED if target.platform == "cpu" else Path.HALF
    if not isinstance(left, QuantizedArray) or not isinstance(right, QuantizedArray):
        return without
    if not _are_scaled_outside(left, right, contraction):
        return Path.BLOCK_UNITS if have_block_form(left, right, target) else without
    formats = {left.format, right.format}
    if formats == {Format.INT8}:
        return Path.INT8_UNITS if target.has_int8_units else without
    # cuBLAS cannot multiply E5M2 by E5M2, and XLA has no FP8 matrix-vector product.
    is_fp8 = formats <= {Format.E4M3, Format.E5M2} and formats != {Format.E5M2}
    rows, columns, _ = contraction.sizes(left.shape, right.shape)
    if target.has_fp8_units and is_fp8 and min(rows, columns) > 1:
        return Path.FP8_UNITS
    return without


def emulated_in(
    left: object, right: object, contraction: Contraction, target: Target
) -> np.dtype:
    """Returns the dtype of the operands of an emulated matmul.

    bfloat16 if that is fast and represents all their values, else float32. Scales of
    blocks are part of these values; those that multiply the result are not.

    Args:
        left: The left operand, or its `jax.eval_shape`.
        right: The same for the right operand.
        contraction: The contraction.
        target: The device.
    """
    rotated = _are_rotated_alike(left, right)
    has_all = all(
        _is_bfloat16(operand, axes, rotated)
        for operand, axes in zip((left, right), contraction.contracted, strict=True)
    )
    return np.dtype(jnp.bfloat16 if target.wants_cpu_form and has_all else jnp.float32)


def _is_bfloat16(operand: object, contracted: Axes, rotated: bool) -> bool:
    """Returns whether bfloat16 represents all values of an operand.

    bfloat16 has 8 binary digits; INT8 has 7, E4M3 has 4, E5M2 has 3, and E2M1 times the
    scales of NVFP4 has 2 + 4. Powers of two in float32 are not known here.
    """
    if not isinstance(operand, QuantizedArray):
        return getattr(operand, "dtype", None) == jnp.bfloat16
    if operand.rotated and not rotated:
        return False
    if operand._is_scaled_outside(contracted):
        return True
    scales = operand.inverse_scale.dtype
    is_short = operand.format is not Format.INT8 or scales == jnp.float8_e8m0fnu
    return scales != jnp.float32 and is_short


def _are_scaled_outside(
    left: QuantizedArray, right: QuantizedArray, contraction: Contraction
) -> bool:
    """Returns whether the scales of both operands multiply the result."""
    here, there = contraction.contracted
    is_outside = left._is_scaled_outside(here) and right._is_scaled_outside(there)
    return is_outside and left._is_rotated_like(right)


def _preset(is_backward: bool) -> lax.DotAlgorithmPreset:
    if is_backward:
        return lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    return lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


def _in_fp8(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    dtype: np.dtype,
    precision: lax.DotAlgorithmPreset | None,
    stands_alone: bool = False,
) -> Array:
    assert isinstance(left, QuantizedArray) and isinstance(right, QuantizedArray)
    swapped = contraction.swapped(left.ndim, right.ndim)
    if swapped.is_ordered:  # else a transpose would separate matmul and scale
        left, right, contraction = right, left, swapped
    # XLA for CUDA fuses the scale into the matmul, unless it must pad the sizes: a
    # bfloat16 result would then be rounded before it is scaled. float16 lacks the
    # range.
    sizes = contraction.sizes(left.shape, right.shape)
    is_taken_in = precision is not None and all(size % 16 == 0 for size in sizes)
    is_taken_in &= dtype == jnp.bfloat16
    inner = jnp.dtype("bfloat16" if is_taken_in else "float32")
    y = lax.dot_general(
        left.payload,
        right.payload,
        contraction.dimension_numbers,
        precision=precision,
        preferred_element_type=inner,
    )
    scale = _scales_of(left, right, contraction)
    if scale.ndim:  # in the kernels that read the result
        y = y.astype(jnp.float32) * scale
        return y.astype(dtype).transpose(contraction.permutation)
    y = (y * scale.astype(inner)).astype(dtype)
    if stands_alone:
        # XLA would fuse a gelu after the matmul into its call. If the backward pass
        # also needs the matmul's result, that call has two results, which XLA cannot
        # emit in FP8: "RET_CHECK failure (xla/service/gpu/thunk_emitter.cc)
        # !has_aux_output" (jax 0.10.2, CUDA 12.9, November 2026). The result of a call
        # is written to memory in any case, so a barrier after it adds no memory
        # traffic. The GPT of `benchmarks whole-steps` has such a gelu.
        y = lax.optimization_barrier(y)
    return y.transpose(contraction.permutation)


def _in_int8(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    dtype: np.dtype,
) -> Array:
    assert isinstance(left, QuantizedArray) and isinstance(right, QuantizedArray)
    swapped = contraction.swapped(left.ndim, right.ndim)
    if swapped.is_ordered:
        left, right, contraction = right, left, swapped
    y = multiply_wide(left.payload, right.payload, contraction.dimension_numbers)
    y = y.astype(jnp.float32) * _scales_of(left, right, contraction)
    return y.astype(dtype).transpose(contraction.permutation)


def _scales_of(
    left: QuantizedArray, right: QuantizedArray, contraction: Contraction
) -> Array:
    """Returns the product of scales that multiply a result, not permuted."""
    ranks = left.ndim, right.ndim
    one, other = left._outer_scale(), right._outer_scale()
    return contraction.placed(one, 0, ranks) * contraction.placed(other, 1, ranks)


def _in_fp8_to_sum(left: Operand, right: Operand, contraction: Contraction) -> Array:
    """Returns a device's float32 part of a matmul of the backward pass.

    The compiler sums over devices directly after the matmul. A scale in between would
    prevent two optimizations: one sum after a loop that accumulates such sums, and a
    sum that gives each device only its shard. So the scales are applied to the
    operands: XLA recognizes that as well and emits the same cuBLAS call. It does so for
    float32 results, but not for bfloat16 (jax 0.10.2, compiled for sm_90, November
    2026).
    """
    assert isinstance(left, QuantizedArray) and isinstance(right, QuantizedArray)
    swapped = contraction.swapped(left.ndim, right.ndim)
    if swapped.is_ordered:
        left, right, contraction = right, left, swapped
    y = lax.dot_general(
        left.payload.astype(jnp.float32) * left.inverse_scale,
        right.payload.astype(jnp.float32) * right.inverse_scale,
        contraction.dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.dtype("float32"),
    )
    return y.transpose(contraction.permutation)


def _dequantized(
    left: Operand,
    right: Operand,
    contraction: Contraction,
    inner: np.dtype,
    dtype: np.dtype,
    is_in_form: bool = False,
) -> Array:
    # A Hadamard transform cancels only if both operands have the same one.
    rotated, ranks = _are_rotated_alike(left, right), (left.ndim, right.ndim)
    (left, left_scale), (right, right_scale) = (
        numbers_and_scale(operand, rotated=rotated, contracted=axes)
        for operand, axes in zip((left, right), contraction.contracted, strict=True)
    )
    for here, there in zip(*contraction.dimension_numbers[0], strict=True):
        left = padded(left, here, right.shape[there])
        right = padded(right, there, left.shape[here])
    left, right = left.astype(inner), right.astype(inner)
    if is_in_form:
        y = multiply_wide(left, right, contraction.dimension_numbers)
    else:
        y = lax.dot_general(
            left,
            right,
            contraction.dimension_numbers,
            precision=lax.Precision.HIGHEST if inner == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
    scales = (
        None if scale is None else contraction.placed(scale, side, ranks)
        for side, scale in enumerate((left_scale, right_scale))
    )
    y = times_scales(y, *scales)
    return y.transpose(contraction.permutation).astype(dtype)


def times_scales(y: Array, left: Array | None, right: Array | None) -> Array:
    """Multiplies a matmul's result by the scales of its operands, in float32."""
    y = y.astype(jnp.float32)
    if left is not None and right is not None:
        return y * (left * right)
    scale = right if left is None else left
    return y if scale is None else y * scale


def has_units(
    left: object, right: object, contraction: Contraction, target: Target
) -> bool:
    """Returns whether a matmul is computed with the bits of its operands."""
    return path_of_operands(left, right, contraction, target) in UNITS


def apart(x: Operand, w: Operand, contracted: Axes, target: Target) -> Operand:
    """Separates the data of an FP8 matmul of CUDA from matmuls that share it.

    XLA merges matmuls that share an operand, such as q, k and v, into one, and cuts out
    each result with a separate kernel, which moves 6.4 of 85 GB in a Llama of 8 layers
    (jax 0.10.2, compiled for sm_90, November 2026). A barrier on the data and the scale
    of this weight prevents it.

    Args:
        x: The data.
        w: The weight.
        contracted: The axes of the data that the matmul sums over. If they are not the
            last ones, XLA transposes the data first, once for all matmuls: no barrier.
        target: The device.
    """
    last = tuple(range(x.ndim - len(contracted), x.ndim))
    is_turned = target.transposes_fp8 and contracted != last
    if target.platform != "cuda" or not target.has_fp8_units or is_turned:
        return x
    if not (isinstance(x, QuantizedArray) and isinstance(w, QuantizedArray)) or x.block:
        return x
    payload, _ = lax.optimization_barrier((x.payload, w.inverse_scale))
    return dataclasses.replace(x, payload=payload)


def stored(*arrays: PyTree) -> tuple[PyTree, ...]:
    """Keeps operands that are saved for a later matmul in their few bits.

    If no operation computes with these bits, the compiler sees an array that is
    rounded, narrowed and widened again. It would remove the last two as lossless, and
    keep the wide array. It would also delay making an operand of the backward pass, and
    keep its source instead. So a result passed through here becomes available only when
    the operands are.
    """
    return lax.optimization_barrier(arrays)


def numbers_and_scale(
    operand: Operand, *, rotated: bool = False, contracted: Axes | None = None
) -> tuple[Array, Array | None]:
    """Returns an operand's values and their common factor; see `QuantizedArray`."""
    if isinstance(operand, QuantizedArray):
        return operand._factors(rotated=rotated, contracted=contracted)
    if isinstance(operand, GroupedArray):
        return operand._factors(rotated=rotated)
    return operand, None


def _are_rotated_alike(left: object, right: object) -> bool:
    """Returns whether both operands have the same Hadamard transform."""
    if not isinstance(left, QuantizedArray) or not isinstance(right, QuantizedArray):
        return False
    return left.rotated and left._is_rotated_like(right)
