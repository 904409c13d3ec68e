"""`PallasKernel`: an array is read once, or twice, for both of its copies."""

import dataclasses

import numpy as np
from jaxtyping import Array

from .._quantize import (
    AbstractKernel,
    AbstractQuantizer,
    Join,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedArray,
)
from .._typing import Shape
from ._eight_bits import quantize_eight_bits
from ._four_bits import quantize_four_bits
from ._tiles import has_tiles


@dataclasses.dataclass(frozen=True)
class PallasKernel(AbstractKernel):
    """A Pallas kernel that quantizes for MXFP8 and NVFP4 block scaling.

    It is the `kernel=` of `mpx.MXFP8BlockScaling` and `mpx.NVFP4BlockScaling`. XLA
    takes four passes over an array for MXFP8, more for NVFP4. This takes one for MXFP8
    and two for NVFP4, on devices with hardware for blocks and for matrices whose sizes
    are multiples of 32; elsewhere XLA quantizes. The numbers are bit-identical, except
    for the order of sums in NVFP4's transform. A step of wide layers compiled for a
    B200 moves 12% fewer bytes in MXFP8, 23% fewer in NVFP4.

    **No device has run it yet**: it is tested by interpreting it on a CPU. It needs
    Pallas's Triton backend, which jax 0.10 to 0.12 have.

    Examples:
        >>> import mpx
        >>> recipe = mpx.MXFP8BlockScaling(kernel=mpx.contrib.PallasKernel())
        >>> recipe.kernel
        PallasKernel()
    """

    def takes(self, shape: Shape) -> bool:
        """Returns whether it supports a shape: matrices divisible into blocks."""
        return has_tiles(shape)

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
        """Returns both copies of an operand; see `AbstractKernel`."""
        first, second = quantizers
        if isinstance(first, MXFP8Quantizer):
            return quantize_eight_bits(x, first.format, dtype, axes, rounded_to)
        assert isinstance(first, NVFP4Quantizer)  # By the recipes that have kernels.
        assert isinstance(second, NVFP4Quantizer)
        return quantize_four_bits(
            x, (first, second), dtype, axes, join, step=step, rounded_to=rounded_to
        )
