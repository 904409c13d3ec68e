"""An array of a state that is stored in 8 or 16 bits.

What is restored from a file may be cast to the dtype of a template, as Orbax does, and
codes of 8 bits are then taken for those of 16. So the name of the codes says what they
are: a template of another code has other names, and no file fits it.
"""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._errors import describe
from .._jax_compat import varying_axes
from .._tree import Whole
from ._bits import Noise
from ._codes import Code, decode, encode, layout_of, scales_of


class CompressedArray(Whole):
    """An array of an optimizer's state in 8 or 16 bits.

    Attributes:
        arrays: Codes and scales by name. That of the codes contains their dtype, such
            as `codes_int8`, so that they are restored as what they are or not at all.
        code: The encoding of the numbers.

    It has the `shape` of the array, and is read as float32: `full()`. It has no
    arithmetic, and that on its arrays, as by `jax.tree.map` over a state, is
    meaningless; moving, stacking, saving and selecting them works.
    """

    arrays: dict[str, Array]
    code: Code = eqx.field(static=True)

    def __init__(self, codes: Array, scales: Array | None, code: Code) -> None:
        self.arrays = {code.name: codes}
        if scales is not None:
            self.arrays["scales"] = scales
        self.code = code

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "arrays" not in state:  # pickled before codes had names
            codes, scales, code = (state[k] for k in ("codes", "scales", "code"))
            state = vars(CompressedArray(codes, scales, code))
        vars(self).update(state)

    @property
    def codes(self) -> Array:
        """Integers of 8 or 16 bits, or bfloat16, of the shape of the array."""
        return self.arrays[self.code.name]

    @property
    def scales(self) -> Array | None:
        """For each block of up to 128 numbers its largest magnitude, in float32.

        NaN for a block that contained NaN or an infinity. None for bfloat16.
        """
        return self.arrays.get("scales")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.arrays[self.code.name].shape  # also of a type

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is read."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales together."""
        arrays = self.arrays.values()
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

    def _words(self) -> str:
        return (
            f"An array of an optimizer's state, {list(self.shape)} in {self.code}, "
            "does not support arithmetic. Read it: `full()`, or all of a state: "
            "`mpx.full_state(state)`. What was computed becomes a state again by "
            "`init(params, full)` of `mpx.compress_state(optimizer)`."
        )

    def full(self) -> Float32[Array, "..."]:
        """Returns the array in float32.

        Raises:
            ValueError: The arrays do not match this code.
        """
        codes, scales, code = self.codes, self.scales, self.code
        is_whole = getattr(codes, "dtype", None) == code.dtype
        if is_whole and code.blocks:
            layout = layout_of(codes.shape)
            is_whole = getattr(scales, "shape", None) == layout.scales_shape(
                codes.shape
            ) and (layout.is_even or not varying_axes(codes))
        if not is_whole:
            raise ValueError(
                f"A `CompressedArray` in {code} has {code.dtype} and a float32 scale "
                f"for each block; got {describe(codes)} and {describe(scales)}. Its "
                "arrays are meaningless alone: restore them unchanged, with "
                "`optimizer.init(params)` as the template, and compute with "
                "`full()`. In `shard_map`, shards must contain whole blocks; a state "
                "that was made there is read there."
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
