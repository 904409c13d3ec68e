"""An array of a state that is stored in 8 or 16 bits."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._errors import describe
from .._tree import Whole
from ._bits import Noise
from ._codes import Code, decode, encode, layout_of, scales_of


class CompressedArray(Whole):
    """An array of an optimizer's state in 8 or 16 bits.

    Attributes:
        codes: Integers of 8 or 16 bits, or bfloat16, of the shape of the array.
        scales: For each block of up to 128 numbers its largest magnitude, in float32.
            NaN for a block that contained NaN or an infinity. None for bfloat16.
        code: The encoding of the numbers.

    It has the `shape` of the array, and is read as float32: `full()`. Arithmetic on its
    arrays, as by `jax.tree.map` over a state, is meaningless; moving, stacking, saving
    and selecting them works.
    """

    codes: Array
    scales: Array | None
    code: Code = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is read."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales together."""
        arrays = [x for x in (self.codes, self.scales) if x is not None]
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

    def full(self) -> Float32[Array, "..."]:
        """Returns the array in float32.

        Raises:
            ValueError: The arrays do not match this code.
        """
        codes, scales, code = self.codes, self.scales, self.code
        is_whole = getattr(codes, "dtype", None) == code.dtype
        if is_whole and code.blocks:
            wanted = layout_of(codes.shape).scales_shape(codes.shape)
            is_whole = getattr(scales, "shape", None) == wanted
        if not is_whole:
            raise ValueError(
                f"A `CompressedArray` in {code} has {code.dtype} and a float32 scale "
                f"for each block; got {describe(codes)} and {describe(scales)}. Its "
                "arrays are meaningless alone: restore them unchanged, with "
                "`optimizer.init(params)` as the template, and compute with "
                "`full()`."
            )
        return decode(codes, scales, code)


def compressed(
    x: Array,
    code: Code,
    noise: Noise,
    before: CompressedArray | None = None,
    scales: Array | None = None,
) -> CompressedArray:
    """An array in a code.

    Args:
        x: The numbers.
        code: How they are stored.
        noise: Draws for the rounding.
        before: The array before the step. Numbers that are unchanged keep their codes:
            no rounding moves them.
        scales: The scales of its blocks, if they are known.
    """
    x = jnp.asarray(x, jnp.float32)
    scales = scales_of(x, code) if scales is None else scales
    codes = encode(x, scales, code, noise)
    if before is not None:
        is_same = x == before.full()
        if scales is not None and before.scales is not None:
            layout = layout_of(x.shape)
            now, then = (layout.spread(s, x.shape) for s in (scales, before.scales))
            is_same = is_same & (now == then)
        codes = jnp.where(is_same, before.codes, codes)
    return CompressedArray(codes, scales, code)
