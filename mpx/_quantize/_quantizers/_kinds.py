"""Quantizers: how an array gets its scales and its low-precision values.

A quantizer is a frozen dataclass of options, without arrays: hashable, equal if the
options are equal, a constant to `jax.jit`. `mpx.quantization.quantize` applies one to
an array. They differ in which values share a scale, and in the dtype of the scales:

    TensorQuantizer   the whole array     float32
    BlockQuantizer    1x128 or 128x128    float32, a power of two by default
    MXFP8Quantizer    1x32                E8M0, a power of two
    NVFP4Quantizer    1x16 or 16x16       E4M3, and one float32 for the tensor

A block `1xn` is along one axis: the one that a matmul contracts.

Finite values saturate. An infinity or a NaN becomes NaN, with its block if it has one,
so its matmuls give NaN: an overflow shows, as it does without quantization. No array is
read an extra time for this.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from ..._base.typing import Shape
from .._formats._arithmetic import EXACT, Arithmetic
from .._formats._blocks import (
    Axes,
    Join,
    alone,
    block_maximum,
    e8m0_code,
    e8m0_from_code,
    e8m0_scale,
    multiply_blocks,
    nvfp4_block_inverse_scale,
    nvfp4_scale,
    nvfp4_tensor_scale,
    scale_from_amax,
)
from .._formats._format import (
    Format,
    check_dimensions,
    check_epsilon,
    check_flags,
    check_format,
)
from .._formats._hadamard import checked_signs
from .._formats._rounding import Key
from ._array import QuantizedArray


class Asked(NamedTuple):
    """The request to a quantizer, besides its own options.

    Attributes:
        dtype: The dtype of the result of `dequantize`.
        axes: As many axes as blocks have dimensions, negative, ascending.
        key: A key or noise, set exactly if `stochastic_rounding`.
        scale: A scale for the tensor, set only if there are no blocks.
        join: Makes the amax of the whole array from that of `x`, which may be a shard.
        by: The arithmetic to compute with.
    """

    dtype: np.dtype
    axes: Axes = ()
    key: Key | None = None
    scale: Array | None = None
    join: Join = alone
    by: Arithmetic = EXACT


@dataclasses.dataclass(frozen=True)
class AbstractQuantizer(abc.ABC):
    """The interface of every quantizer: options, and the blocks that share a scale.

    Attributes:
        stochastic_rounding: Rounds to a random neighbour, the nearer one with the
            higher probability, so that the mean is the number itself; requires a `key`.
    """

    stochastic_rounding: bool = dataclasses.field(default=False, kw_only=True)

    @property
    @abc.abstractmethod
    def format(self) -> Format:
        """The format of the numbers."""

    @property
    def block(self) -> int:
        """The length of a block; 0 for one scale for the whole array."""
        return 0

    @property
    def block_dimensions(self) -> int:
        """The number of axes that a block is along: 0, 1, or 2 for square blocks."""
        return 0

    @abc.abstractmethod
    def _quantize(self, x: Float32[Array, "..."], to: Asked) -> QuantizedArray:
        """Quantizes `x`, whose subnormals are already flushed if `to.by` is `EXACT`."""

    def _made(
        self, payload: Array, inverse_scale: Array, to: Asked, **more: Any
    ) -> QuantizedArray:
        """Returns the array of this payload and these scales."""
        more |= dict(format=self.format, block=self.block)
        return QuantizedArray(
            payload, inverse_scale, dtype=to.dtype, axes=to.axes, **more
        )


@dataclasses.dataclass(frozen=True)
class TensorQuantizer(AbstractQuantizer):
    r"""One float32 scale for the whole array.

    $$s = \frac{\mathrm{MAX}}{\max(\max|x|, \epsilon)} \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot s)) \qquad
    x \approx q \cdot (1 / s)$$

    The maximum is that of the finite numbers; $s = 1$ if it is zero, and $s$ stays
    within $2^{\pm 126}$. An infinity or a NaN becomes NaN without affecting its
    neighbours. `mpx.quantization.quantize(..., scale=s)` uses a given scale, as delayed
    scaling does; finite numbers then saturate to MAX.

    Args:
        format: `Format.E4M3` or `Format.E5M2`.
        power_of_two_scales: Rounds the scale down to a power of two.
        amax_epsilon: $\epsilon$, the smallest amax.
        stochastic_rounding: See `mpx.quantization.AbstractQuantizer`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: The format does not have 8 bits or is a pair; or epsilon is
            negative.

    Source: NVIDIA, Transformer Engine's documentation, FP8 current scaling.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import TensorQuantizer, quantize
        >>> q = quantize(jnp.array([1.0, -0.3, 0.0]), TensorQuantizer())
        >>> q.payload.astype(jnp.float32).tolist()
        [448.0, -128.0, 0.0]
    """

    format: Format = Format.E4M3  # pyright: ignore[reportIncompatibleMethodOverride]
    power_of_two_scales: bool = dataclasses.field(default=False, kw_only=True)
    amax_epsilon: float = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_format(self)
        check_flags(self, "power_of_two_scales", "stochastic_rounding")
        check_epsilon(self)

    def _scale(self, amax: Float32[Array, ""]) -> Float32[Array, ""]:
        return _float32_scale(self, amax)

    def _quantize(self, x: Float32[Array, "..."], to: Asked) -> QuantizedArray:
        by, scale = to.by, to.scale
        if scale is None:
            scale = self._scale(to.join(by.largest_finite(x)))
        # Infinities and NaN show in the payload: with a given scale there is no amax to
        # wait for.
        payload = by.to_format(by.scaled(x, scale), self.format, to.key)
        return self._made(payload, 1 / scale, to)


@dataclasses.dataclass(frozen=True)
class BlockQuantizer(AbstractQuantizer):
    r"""One float32 scale for each block of 1x128 or 128x128 numbers.

    $$s_b = 2^{\left\lfloor \log_2 (\mathrm{MAX} / \max(\max_b|x|, \epsilon))
    \right\rfloor} \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot s_b)) \qquad
    x \approx q \cdot (1 / s_b)$$

    `power_of_two_scales=False` omits the floor. $s_b = 1$ if the amax of a block is
    zero, and it stays within $2^{\pm 126}$. A block that contains an infinity or a NaN
    has the scale NaN and is NaN.

    Args:
        format: `Format.E4M3` or `Format.E5M2`.
        block_dimensions: 1 for 1x128 (inputs, gradients), 2 for 128x128 (weights).
        power_of_two_scales: Rounds scales down to powers of two.
        amax_epsilon: $\epsilon$, the smallest amax.
        stochastic_rounding: See `mpx.quantization.AbstractQuantizer`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: The format does not have 8 bits or is a pair; `block_dimensions` is
            neither 1 nor 2; or epsilon is negative.

    Source: NVIDIA, Transformer Engine's documentation, FP8 block scaling; DeepSeek-V3
    Technical Report (arXiv:2412.19437), section 3.3.2.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> w = jnp.ones((256, 512))
        >>> quantizer = mpx.quantization.BlockQuantizer(block_dimensions=2)
        >>> mpx.quantization.quantize(w, quantizer).inverse_scale.shape
        (2, 4)
    """

    format: Format = Format.E4M3  # pyright: ignore[reportIncompatibleMethodOverride]
    block_dimensions: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    power_of_two_scales: bool = dataclasses.field(default=True, kw_only=True)
    amax_epsilon: float = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_format(self)
        check_dimensions(self)
        check_flags(self, "power_of_two_scales", "stochastic_rounding")
        check_epsilon(self)

    @property
    def block(self) -> int:
        """The length of a block, 128."""
        return 128

    def _quantize(self, x: Float32[Array, "..."], to: Asked) -> QuantizedArray:
        amax = block_maximum(x, to.axes, self.block, to.by.largest)
        scales = _float32_scale(self, amax)
        scaled = multiply_blocks(x, scales, to.axes, self.block)
        return self._made(to.by.to_format(scaled, self.format, to.key), 1 / scales, to)


@dataclasses.dataclass(frozen=True)
class MXFP8Quantizer(AbstractQuantizer):
    r"""One power of two, stored in 8 bits (E8M0), for each block of 1x32 numbers.

    $$e_b = \left\lceil \log_2 (\max\nolimits_b|x| / \mathrm{MAX}) \right\rceil \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot 2^{-e_b})) \qquad
    x \approx q \cdot 2^{e_b}$$

    with $-126 \le e_b \le 126$, so no finite number saturates. A block that contains an
    infinity or a NaN has the scale NaN and is NaN.

    Args:
        format: `Format.E4M3` or `Format.E5M2`.
        stochastic_rounding: See `mpx.quantization.AbstractQuantizer`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: The format does not have 8 bits or is a pair.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3, with
    the scale rounded up as in Transformer Engine, where the specification rounds down.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import MXFP8Quantizer, quantize
        >>> q = quantize(jnp.full((2, 64), 448.0), MXFP8Quantizer())
        >>> q.inverse_scale.dtype, q.inverse_scale.shape
        (dtype(float8_e8m0fnu), (2, 2))
    """

    format: Format = Format.E4M3  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        check_format(self)
        check_flags(self, "stochastic_rounding")

    @property
    def block(self) -> int:
        """The length of a block, 32."""
        return 32

    @property
    def block_dimensions(self) -> int:
        """1: blocks are along one axis."""
        return 1

    def _quantize(self, x: Float32[Array, "..."], to: Asked) -> QuantizedArray:
        amax = block_maximum(x, to.axes, self.block, to.by.largest)
        code = to.by.written(e8m0_code(amax, self.format).astype(jnp.uint8))
        scaled = multiply_blocks(x, e8m0_scale(code), to.axes, self.block)
        payload = to.by.to_format(scaled, self.format, to.key)
        return self._made(payload, e8m0_from_code(code), to)


@dataclasses.dataclass(frozen=True)
class NVFP4Quantizer(AbstractQuantizer):
    r"""E2M1 in blocks of 1x16 or 16x16 with E4M3 scales, and a float32 tensor scale.

    $$t = \frac{448 \cdot 6}{\max|x|} \qquad
    b = \mathrm{E4M3}\!\left(\max\nolimits_b|x| \cdot \frac{t}{6}\right) \qquad
    q = \mathrm{E2M1}\!\left(x \cdot \frac{1}{b \cdot (1 / t)}\right)$$

    and $x \approx q \cdot (b \cdot (1 / t))$; $t = 1$ if the amax of the tensor is
    zero, and at most $2^{100}$. If an array contains an infinity or a NaN, all its
    scales and so all its values are NaN, since E2M1 has none. Blocks whose scale rounds
    to zero are zero.

    Args:
        block_dimensions: 1 for 1x16 (inputs, gradients), 2 for 16x16 (weights).
        hadamard: Quantizes `mpx.quantization.hadamard_transform(x, axis=...)` instead
            of `x`.
        signs: The signs of that transform, 16 numbers 1 or -1; by default its own. If
            the two operands of a matmul have different signs, the transform is undone
            before they are multiplied.
        stochastic_rounding: See `mpx.quantization.AbstractQuantizer`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: `block_dimensions` is neither 1 nor 2; `hadamard` is set for square
            blocks; or signs are set without it, or are not 16 numbers 1 or -1.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149),
    section 2 and appendix C.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import NVFP4Quantizer, quantize
        >>> x = jnp.arange(16.0)
        >>> quantize(x, NVFP4Quantizer()).dequantize()[-4:].tolist()
        [10.0, 15.0, 15.0, 15.0]
    """

    block_dimensions: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    hadamard: bool = dataclasses.field(default=False, kw_only=True)
    signs: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.signs is not None:
            signs = checked_signs(self.signs, "`mpx.quantization.NVFP4Quantizer`")
            # A tuple, so that the options are hashable and comparable.
            object.__setattr__(self, "signs", tuple(int(sign) for sign in signs))
            if self.hadamard is False:
                raise ValueError(
                    "`signs` of `mpx.quantization.NVFP4Quantizer` are those of the "
                    "Hadamard transform; got signs without it. Set `hadamard=True`, "
                    "too."
                )
        check_dimensions(self)
        check_flags(self, "hadamard", "stochastic_rounding")
        if self.hadamard and self.block_dimensions == 2:
            raise ValueError(
                "`mpx.quantization.NVFP4Quantizer` supports the Hadamard transform "
                "along one axis only; got `hadamard=True` with "
                "`block_dimensions=2`. Set only one of them."
            )

    @property
    def format(self) -> Format:
        """The format of the numbers, E2M1."""
        return Format.E2M1

    @property
    def block(self) -> int:
        """The length of a block, 16."""
        return 16

    def _quantize(self, x: Float32[Array, "..."], to: Asked) -> QuantizedArray:
        by, axes = to.by, to.axes
        if self.hadamard:
            x = by.rotated(x, axes[-1], self.signs, to.dtype)
        block_amax = by.written(block_maximum(x, axes, self.block, by.largest))
        tensor_scale = nvfp4_tensor_scale(to.join(by.largest(block_amax)))
        tensor_inverse_scale = 1 / tensor_scale
        inverse_scale = nvfp4_block_inverse_scale(block_amax, tensor_scale)
        inverse_scale = by.written(inverse_scale.astype(jnp.float8_e4m3fn))
        scales = nvfp4_scale(inverse_scale.astype(jnp.float32), tensor_inverse_scale)
        scaled = multiply_blocks(x, scales, axes, self.block)
        return self._made(
            by.to_four_bits(scaled, axes[-1], to.key),
            inverse_scale,
            to,
            tensor_inverse_scale=tensor_inverse_scale,
            rotated=self.hadamard,
            signs=self.signs,
        )


def _float32_scale(
    quantizer: TensorQuantizer | BlockQuantizer, amax: Float32[Array, "..."]
) -> Float32[Array, "..."]:
    return scale_from_amax(
        jnp.maximum(amax, quantizer.amax_epsilon),
        quantizer.format.largest,
        power_of_two_scales=quantizer.power_of_two_scales,
    )


# --- Kernels: both copies of an operand at once ---------------------------------------
#
# Only the interface is here. A recipe has a kernel as an object
# (`mpx.contrib.PallasKernel()`), and mpx does not import its implementation.


class AbstractKernel(abc.ABC):
    """Quantizes an operand of a linear layer for both of its products.

    Part of a recipe: hashable, and compared by value.
    """

    @abc.abstractmethod
    def takes(self, shape: Shape) -> bool:
        """Returns whether the kernel supports arrays of this shape."""

    @abc.abstractmethod
    def quantize(
        self,
        x: Array,
        quantizers: tuple[AbstractQuantizer, AbstractQuantizer],
        dtype: np.dtype,
        axes: tuple[int, int],
        join: Join,
        *,
        step: Array | None = None,
        rounded_to: np.dtype | None = None,
    ) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns both copies, equal to those of the quantizers.

        Square blocks of 4 bits are packed along the axis of their copy.

        Args:
            x: Floating matrices, of a supported shape.
            quantizers: Those of the first copy and of the second. If one has square
                blocks, both are the same.
            dtype: The dtype of the result of `dequantize`.
            axes: The axes of the blocks of the first copy and of the second: -1 and -2
                in any order.
            join: Makes the amax of the whole array from that of `x`.
            step: The number of the training step, from which noise is drawn; None if
                unknown.
            rounded_to: A dtype that the values are rounded to first.
        """
