"""`PallasKernel`, and its kernel for MXFP8; those for NVFP4 are in `_four_bits`."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._base.typing import Shape
from .._quantize import (
    AbstractKernel,
    Format,
    Join,
    QuantizedArray,
    Quantizer,
    e8m0_code,
    e8m0_from_code,
    e8m0_scale,
    largest_magnitude,
)
from ._four_bits import quantize_four_bits
from ._tiles import BLOCK, COLUMNS, ROWS, Tiled, has_tiles

# --- MXFP8 in both layouts ------------------------------------------------------------
#
# An operand of a linear layer is quantized along two axes, for two matmuls. XLA needs
# four passes for that: a maximum along either axis, then the casts. It has no kernel
# that computes a maximum and the cast that depends on it. This one does: for a block of
# 64 x 64 numbers both maxima, scales, casts, and the transpose. Compiled for a B200, a
# step of two layers of 4096 x 16384 moves 20.3 GB with it and 24.4 without (jax 0.10.2,
# November 2026).
#
# The results are bit-identical to XLA's, by the same formulas in the same order.


def quantize_eight_bits(
    x: Array,
    format: Format,
    dtype: np.dtype,
    axes: tuple[int, int],
    rounded_to: np.dtype | None = None,
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantizes an operand along both axes; returns both copies.

    Args:
        x: Floating matrices, both sizes multiples of 32.
        format: `Format.E4M3` or `Format.E5M2`.
        dtype: The dtype that `dequantize` returns.
        axes: The block axes of the first and second copy: -1 and -2 in any order.
        rounded_to: A dtype that the numbers are rounded to first.
    """
    payload, codes, turned, turned_codes = in_both_layouts(x, format, rounded_to)
    found = {-1: (payload, codes), -2: (turned.mT, turned_codes.mT)}
    first, second = (
        QuantizedArray(
            found[axis][0],
            e8m0_from_code(found[axis][1]),
            format=format,
            dtype=dtype,
            axes=(axis,),
            block=BLOCK,
        )
        for axis in axes
    )
    return first, second


def in_both_layouts(
    x: Array,
    format: Format,
    rounded_to: np.dtype | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Quantizes matrices along their rows and along their columns.

    Args:
        x: Floating matrices `[..., m, n]`, both multiples of 32.
        format: `Format.E4M3` or `Format.E5M2`.
        rounded_to: A dtype that the numbers are rounded to first.
        interpret: Runs the kernel on a device without Triton, for tests.

    Returns:
        Numbers `[..., m, n]` and codes of E8M0 scales `[..., m, n / 32]`, then numbers
        `[..., n, m]` and codes `[..., n, m / 32]` of the transposed matrices.
    """
    whole = ((ROWS, BLOCK), (COLUMNS, BLOCK))
    turned = ((COLUMNS, BLOCK), (ROWS, BLOCK))
    return Tiled(
        functools.partial(_kernel, format=format, rounded_to=rounded_to),
        "mxfp8_in_both_layouts",
        operands=(whole,),
        results=(
            (whole, format.dtype),
            (((ROWS, BLOCK), (COLUMNS, 1)), jnp.uint8),
            (turned, format.dtype),
            (((COLUMNS, BLOCK), (ROWS, 1)), jnp.uint8),
        ),
        interpret=interpret,
    )(x)


def _kernel(
    x_ref: Any,
    payload: Any,
    codes: Any,
    turned: Any,
    turned_codes: Any,
    *,
    format: Format,
    rounded_to: np.dtype | None,
) -> None:
    x = x_ref[...]
    x = (x if rounded_to is None else x.astype(rounded_to)).astype(jnp.float32)
    payload[...], codes[...] = _along_rows(x, format)
    turned[...], turned_codes[...] = _along_rows(x.T, format)


def _along_rows(x: Array, format: Format) -> tuple[Array, Array]:
    # Pallas compiles a maximum to `maxnumf`, which loses NaN (jax 0.10 to 0.12). So
    # amaxes are maxima of integers, and NaN is restored after clipping.
    blocks = x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    code = e8m0_code(largest_magnitude(blocks, (2,)), format)
    scaled = blocks * lax.expand_dims(e8m0_scale(code), (2,))
    clipped = jnp.clip(scaled, -format.largest, format.largest)
    numbers = jnp.where(scaled == scaled, clipped, jnp.nan).reshape(x.shape)
    return numbers.astype(format.dtype), code.astype(jnp.uint8)


# --- The kernel of a recipe -----------------------------------------------------------


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
        quantizers: tuple[Quantizer, Quantizer],
        dtype: np.dtype,
        axes: tuple[int, int],
        join: Join,
        *,
        step: Array | None = None,
        rounded_to: np.dtype | None = None,
    ) -> tuple[QuantizedArray, QuantizedArray]:
        """Returns both copies of an operand; see `AbstractKernel`."""
        first, second = quantizers
        if first.scales == "e8m0":
            return quantize_eight_bits(x, first.format, dtype, axes, rounded_to)
        # Only two recipes have kernels, and the other one is NVFP4.
        return quantize_four_bits(
            x, (first, second), dtype, axes, join, step=step, rounded_to=rounded_to
        )
