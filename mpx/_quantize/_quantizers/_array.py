"""`QuantizedArray`: low-precision values together with their scales."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..._base.tree import Guard, Whole
from ..._base.typing import Shape
from .._formats._blocks import Axes, float32_from_e8m0, multiply_blocks
from .._formats._format import Format
from .._formats._hadamard import hadamard_transform
from .._formats._rounding import unpack


class HalfCopy(eqx.Module):
    """A float32 array in half precision, made once for all who read it so.

    Attributes:
        payload: The copy, without a derivative.
    """

    payload: Array


class QuantizedArray(Whole):
    r"""An array in low precision: payload and inverse scales, an immutable PyTree.

    $$x \approx \mathrm{payload} \cdot \mathrm{inverse\_scale}
    \;(\cdot\;\mathrm{tensor\_inverse\_scale})$$

    `mpx.quantization.quantize` returns it; the fields are for kernels and checkpoints.
    It can be passed through jit, scan, `jax.eval_shape`, pickle and checkpoints. A
    vmap, a scan or a stack of layers may add *leading* axes to all its arrays, and
    remove them again: `jax.vmap(quantize)` gives one scale (per tensor) to each row.
    Axes elsewhere (`in_axes=1`) are meaningless, and so is arithmetic on its leaves,
    such as a `jax.tree.map` of a running average: both raise `TypeError`.

    It has no derivative: `dequantize` passes no gradient to payload or scales. Use
    `mpx.quantization.quantize_dequantize` to differentiate.

    Attributes:
        payload: The numbers, in the dtype of the format. In 4 bits it is uint8 with two
            numbers each along the last of `axes`, the first in the low half.
        inverse_scale: The factor of the payload. One float32 for the tensor; or one for
            each block, the axes in `axes` being shorter by the length of a block:
            float32, `float8_e8m0fnu` (MXFP8) or `float8_e4m3fn` (NVFP4). With
            `block=0` the axes in `axes` have length 1.
        tensor_inverse_scale: A second factor in float32 (NVFP4), else None.
        format: The format of the payload.
        dtype: The dtype of the quantized array, and of `dequantize()`.
        axes: The axes that blocks are along, negative; empty for one scale.
        block: The length of a block; 0 for one scale, or for one along all of `axes`.
        guard: Detects arithmetic on the leaves; None disables this.
        rotated: Whether the payload is of the Hadamard transform of the array.
        signs: The signs of that transform; None for the default ones.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> x = jnp.linspace(-1.0, 1.0, 32, dtype=jnp.bfloat16)
        >>> q = mpx.quantization.quantize(x, mpx.quantization.NVFP4Quantizer())
        >>> q.shape, q.payload.shape, q.inverse_scale.shape, q.nbytes
        ((32,), (16,), (2,), 22)
        >>> q.dequantize().dtype
        dtype(bfloat16)
    """

    payload: Array
    inverse_scale: Array
    tensor_inverse_scale: Array | None = None
    guard: Guard | None = None
    format: Format = eqx.field(static=True, kw_only=True)
    dtype: np.dtype = eqx.field(static=True, kw_only=True)
    axes: Axes = eqx.field(static=True, kw_only=True, default=())
    block: int = eqx.field(static=True, kw_only=True, default=0)
    rotated: bool = eqx.field(static=True, kw_only=True, default=False)
    signs: tuple[int, ...] | None = eqx.field(static=True, kw_only=True, default=None)

    def _words(self) -> str:
        return (
            f"A quantized array, {self.dtype}{list(self.shape)} in {self.format}, does "
            "not support arithmetic. Convert it: `dequantize()`; to train, use "
            "`mpx.quantization.quantize_dequantize` or a recipe."
        )

    @property
    def shape(self) -> Shape:
        """The shape of the quantized array."""
        shape = [*self.payload.shape]
        if self.format is Format.E2M1:
            shape[self.axes[-1]] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.payload.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of payload and scales together."""
        arrays = self.payload, self.inverse_scale, self.tensor_inverse_scale
        return sum(
            math.prod(array.shape) * np.dtype(array.dtype).itemsize
            for array in arrays
            if array is not None
        )

    def dequantize(self, *, rotated: bool = False) -> Array:
        r"""Returns the array that payload and scales represent.

        It multiplies in float32 and rounds to `dtype` once.

        Args:
            rotated: True keeps a Hadamard transform, which gives the numbers that a
                matmul of two such arrays multiplies. By default the transform is
                undone.

        Returns:
            An array in `shape` and `dtype`. A block whose scale is NaN is NaN, and a
            value beyond the range of the dtype is infinite.
        """
        numbers = self._numbers()
        # Leading axes added by a vmap are in the scale of the tensor, too.
        last = (1,) * self.ndim
        if self.axes:
            scale = _float32(lax.stop_gradient(self.inverse_scale))
            if self.tensor_inverse_scale is not None:
                tensor = lax.stop_gradient(self.tensor_inverse_scale)
                scale = scale * tensor.reshape((tensor.shape + last)[: scale.ndim])
            x = multiply_blocks(numbers, scale, self.axes, self.block)
        else:
            scale = lax.stop_gradient(self.inverse_scale)
            x = numbers * scale.reshape((scale.shape + last)[: self.ndim])
        if self.rotated and not rotated:
            x = self._rotated_back(x)
        return x.astype(self.dtype)

    def _is_scaled_outside(self, contracted: Axes) -> bool:
        """Returns whether the scales multiply the result of a matmul.

        Args:
            contracted: The axes that it sums over, not negative.
        """
        if not self.axes:
            return True
        return not self.block and {x - self.ndim for x in contracted} <= {*self.axes}

    def _outer_scale(self) -> Array:
        """Returns the scales that multiply a result, in float32."""
        scale = _float32(self.inverse_scale) if self.axes else self.inverse_scale
        tensor = self.tensor_inverse_scale
        return scale if tensor is None else scale * tensor

    def _factors(
        self, *, rotated: bool, contracted: Axes | None = None
    ) -> tuple[Array, Array | None]:
        """Returns the array as float32 values and a factor of all that is summed.

        Args:
            rotated: As in `dequantize`.
            contracted: The axes of a sum, not negative; None: unknown.

        Returns:
            The values, exact except for blocks with float32 scales, and the factor: one
            number; or as many as there are scales, if these multiply sums over
            `contracted`. None if the values include all scales.
        """
        numbers = self._numbers()
        if not self.axes:
            return numbers, lax.stop_gradient(self.inverse_scale)
        if contracted is not None and self._is_scaled_outside(contracted):
            if self.rotated and not rotated:
                numbers = self._rotated_back(numbers)
            return numbers, lax.stop_gradient(self._outer_scale())
        scale = _float32(lax.stop_gradient(self.inverse_scale))
        x = multiply_blocks(numbers, scale, self.axes, self.block)
        if self.rotated and not rotated:
            x = self._rotated_back(x)
        if self.tensor_inverse_scale is None:
            return x, None
        return x, lax.stop_gradient(self.tensor_inverse_scale)

    def _rotated_back(self, x: Array) -> Array:
        axis, signs = self.axes[-1], self.signs
        return hadamard_transform(x, axis=axis, signs=signs, inverse=True)

    def _is_rotated_like(self, other: "QuantizedArray") -> bool:
        """Returns whether both payloads have the same transform, or neither has one."""
        return (self.rotated, self.signs) == (other.rotated, other.signs)

    def _numbers(self) -> Array:
        """Returns the payload in float32, without scales."""
        payload = lax.stop_gradient(self.payload)
        if self.format is Format.E2M1:
            return unpack(payload, self.axes[-1])
        return payload.astype(jnp.float32)


def _float32(scales: Array) -> Array:
    is_e8m0 = scales.dtype == jnp.float8_e8m0fnu
    return float32_from_e8m0(scales) if is_e8m0 else scales.astype(jnp.float32)


# What a weight may be stored as, besides in float32.
Stored = QuantizedArray | HalfCopy
