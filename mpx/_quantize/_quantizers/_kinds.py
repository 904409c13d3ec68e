"""`Quantizer`: how an array gets its scales and its low-precision values.

A quantizer is a frozen dataclass of options, without arrays: hashable, equal if the
options are equal, a constant to `jax.jit`. `mpx.quantization.quantize` applies one to
an array. The options say what is computed:

    format            the grid of the numbers
    block_dimensions  what shares a scale: 0 the array, 1 numbers along the axis that a
                      matmul contracts, 2 numbers along both axes of a matrix
    block             how many of them along each axis; 0 for all
    scales            the form of a scale
    scale_from        where it comes from: the numbers, a history, a constant
    hadamard          a transform before

Finite values saturate. An infinity or a NaN becomes NaN, with all that share its scale
if there are several scales, or if the format has no NaN. So its matmuls give NaN: an
overflow shows, as it does without quantization.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._formats._arithmetic import EXACT, Arithmetic
from .._formats._blocks import (
    LARGEST_SCALE,
    Axes,
    Join,
    alone,
    block_maximum,
    e8m0_code,
    e8m0_from_code,
    e8m0_scale,
    in_blocks,
    multiply_blocks,
    nvfp4_block_inverse_scale,
    nvfp4_scale,
    nvfp4_tensor_scale,
    scale_from_amax,
)
from .._formats._format import (
    Format,
    check_choice,
    check_dimensions,
    check_epsilon,
    check_flags,
    check_format,
    single_format,
)
from .._formats._hadamard import BLOCK, checked_signs
from .._formats._rounding import SMALLEST_FLOAT32, Key, round_to_format, to_int8
from ._array import QuantizedArray


class Asked(NamedTuple):
    """The request to a quantizer, besides its own options.

    Attributes:
        dtype: The dtype of the result of `dequantize`.
        axes: As many axes as blocks have dimensions, negative, ascending.
        key: A key or noise, set exactly if `stochastic_rounding`.
        scale: A scale for the tensor, set only if there are no blocks.
        join: Makes the amax of the whole array from that of `x`, which may be a shard.
        join_rows: The same for amaxes of rows, which groups of rows may share.
        amax: The amaxes of rows, if they are known.
        by: The arithmetic to compute with.
    """

    dtype: np.dtype
    axes: Axes = ()
    key: Key | None = None
    scale: Array | None = None
    join: Join = alone
    join_rows: Join = alone
    amax: Array | None = None
    by: Arithmetic = EXACT


_SCALES = ("float32", "power of two", "e8m0", "e4m3")


@dataclasses.dataclass(frozen=True, repr=False)
class Quantizer:
    r"""Numbers of few bits, and the scales that groups of them share.

    $$s = \frac{\mathrm{MAX}}{\max(r, \epsilon)} \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot s)) \qquad
    x \approx q \cdot (1 / s)$$

    where $r$ is the result of `range_of`: the amax of the numbers that share the scale,
    unless a subclass overrides it. $s = 1$ if that is zero; $s$ stays within
    $2^{\pm 126}$. For scales in "e8m0" see `mpx.quantization.MXFP8Quantizer`, in "e4m3"
    `mpx.quantization.NVFP4Quantizer`.

    An infinity or a NaN becomes NaN. With one scale for the array and a format that has
    a NaN, it does not affect its neighbours; else all numbers that share its scale
    become NaN. E2M1 and INT8 have no NaN: then the scale is NaN.

    Args:
        format: `Format.E4M3`, `E5M2`, `E2M1` or `INT8`.
        block_dimensions: What shares a scale. 0: the array. 1: numbers along the axis
            that a matmul contracts. 2: numbers along both axes of a matrix; with
            `block=0` that is one scale for each matrix of a stack.
        block: How many numbers along each of these axes share a scale. 0: all, as in
            a row of the left operand and in a column of the right one.
        scales: The form of a scale. "float32"; "power of two": rounded down to one;
            "e8m0": a power of two in 8 bits, rounded up; "e4m3": of 8 bits, with one in
            float32 for the tensor above.
        scale_from: "amax": the numbers. "history": the state of `mpx.DelayedScaling`.
            A number: this scale, always; finite numbers may then saturate.
        amax_epsilon: $\epsilon$, the smallest amax.
        largest_scale: The largest scale of a block with "e4m3"; at most 448. A smaller
            one leaves room for a `range_of` above the amax.
        hadamard: Quantizes `mpx.quantization.hadamard_transform(x, axis=...)` instead
            of `x`; only with `block_dimensions=1`.
        signs: The signs of that transform, 16 numbers 1 or -1; by default its own. If
            the two operands of a matmul have different signs, the transform is undone
            before they are multiplied.
        stochastic_rounding: Rounds to a random neighbour, the nearer one with the
            higher probability, so that the mean is the number itself; requires a `key`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed, or does not go with
            another one.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> from mpx.quantization import Quantizer, quantize
        >>> rows = Quantizer(mpx.Format.INT8, block_dimensions=1)
        >>> q = quantize(jnp.array([[1.0, -0.5], [0.0, 8.0]]), rows)
        >>> q.payload.tolist(), q.inverse_scale.shape
        ([[127, -64], [0, 127]], (2, 1))
    """

    format: Format = Format.E4M3
    block_dimensions: int = 0
    block: int = 0
    scales: str = dataclasses.field(default="float32", kw_only=True)
    scale_from: str | float = dataclasses.field(default="amax", kw_only=True)
    amax_epsilon: float = dataclasses.field(default=0.0, kw_only=True)
    largest_scale: float = dataclasses.field(default=448.0, kw_only=True)
    hadamard: bool = dataclasses.field(default=False, kw_only=True)
    signs: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    stochastic_rounding: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        name = "`mpx.quantization.Quantizer`"
        single_format(self.format, f"`format` of {name}")
        check_choice(self, "block_dimensions", (0, 1, 2))
        check_choice(self, "scales", _SCALES)
        check_flags(self, "hadamard", "stochastic_rounding")
        check_epsilon(self)
        if isinstance(self.block, bool) or not isinstance(self.block, int):
            raise TypeError(
                f"`block` of {name} must be an integer; got {self.block!r}."
            )
        has_blocks, few = self.block_dimensions > 0, self.format.bits == 4
        if self.block < 0 or (self.block and not has_blocks) or self.block % (1 + few):
            raise ValueError(
                f"`block` of {name} must be 0 or the length of a block of 1 or 2 "
                f"dimensions, even for 4 bits; got {self.block!r} for {self!r}."
            )
        largest = self.largest_scale
        if not isinstance(largest, int | float) or not 1 <= largest <= 448:
            raise ValueError(
                f"`largest_scale` of {name} must be between 1 and 448, the largest "
                f"number of E4M3; got {largest!r}."
            )
        if not has_blocks and (few or self.scales in ("e8m0", "e4m3")):
            raise ValueError(
                f"{name} with 4 bits, or with scales in 8 bits, needs blocks; got "
                f"{self!r}. Set `block_dimensions` to 1 or 2."
            )
        self._check_scale_from(name)
        if self.signs is not None:
            signs = checked_signs(self.signs, name)
            # A tuple, so that the options are hashable and comparable.
            object.__setattr__(self, "signs", tuple(int(sign) for sign in signs))
            if self.hadamard is False:
                raise ValueError(
                    f"`signs` of {name} are those of the Hadamard transform; got signs "
                    "without it. Set `hadamard=True`, too."
                )
        if self.hadamard and self.block_dimensions != 1:
            raise ValueError(
                f"{name} supports the Hadamard transform along one axis only; got "
                f"`hadamard=True` with `block_dimensions={self.block_dimensions}`. "
                "Set only one of them."
            )

    def _check_scale_from(self, name: str) -> None:
        given = self.scale_from
        if isinstance(given, str):
            is_known = given == "amax" or (
                given == "history" and not self.block_dimensions
            )
            is_known &= self.scales != "e4m3" or given == "amax"
        elif isinstance(given, bool) or not isinstance(given, int | float):
            raise TypeError(
                f"`scale_from` of {name} must be 'amax', 'history' or a number; got "
                f"{given!r}."
            )
        else:
            is_known = SMALLEST_FLOAT32 <= given <= LARGEST_SCALE
            is_known &= self.scales == "float32"
        if not is_known:
            raise ValueError(
                f"`scale_from` of {name} must be 'amax'; 'history', if the array has "
                "one scale; or a number between 2^-126 and 2^126, if scales are in "
                f"'float32'; got {given!r} for {self!r}."
            )

    def __repr__(self) -> str:
        """Returns the format, and the options that are set."""
        fields = [f for f in dataclasses.fields(self) if f.name != "format"]
        given = [(f.name, getattr(self, f.name), f.default) for f in fields]
        words = [f"{name}={x!r}" for name, x, default in given if x != default]
        return f"{type(self).__name__}({', '.join([repr(self.format), *words])})"

    @property
    def name(self) -> str:
        """A short name for reports, such as "E4M3 1x128"."""
        length = self.block or "n"
        shares = ("tensor", f"1x{length}", f"{length}x{length}")
        return f"{self.format.name} {shares[self.block_dimensions]}"

    @property
    def _is_folded(self) -> bool:
        """Whether one copy of an input or weight serves two legs; see `_operands`."""
        is_row = self.block_dimensions == 1 and not self.block
        return is_row and self.format.bits == 8 and not self.hadamard

    @property
    def _multiple(self) -> int:
        """The lengths of blocked axes are multiples of it."""
        return math.lcm(
            self.block or 1, BLOCK * self.hadamard or 1, 8 // self.format.bits
        )

    def range_of(
        self, blocks: Float32[Array, "..."], amax: Float32[Array, "..."]
    ) -> Float32[Array, "..."]:
        """Returns the magnitudes that become the largest number of the format.

        For subclasses, which are frozen dataclasses, too. Larger numbers saturate.

        Args:
            blocks: The numbers. Those of a block are along the last axis.
            amax: The amax of each block, infinite or NaN if one of its numbers is.

        Returns:
            As many numbers as `amax` has: infinite or NaN where `amax` is; here `amax`.
        """
        return amax

    def rounded(
        self, blocks: Float32[Array, "..."], ranges: Float32[Array, "..."]
    ) -> Float32[Array, "..."]:
        """Returns the numbers that are left of blocks with these ranges.

        For a `range_of` that compares several. Scales are exact here, in float32.

        Args:
            blocks: As in `range_of`.
            ranges: A range for each block.
        """
        scale = self._scale(ranges)[..., None]
        return round_to_format(blocks * scale, self.format) / scale

    def _scale(self, amax: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """Returns the scale of an amax."""
        return scale_from_amax(
            jnp.maximum(amax, self.amax_epsilon),
            self.format.largest,
            power_of_two_scales=self.scales == "power of two",
        )

    def _ranges(self, x: Array, amax: Array, axes: Axes) -> Array:
        if type(self).range_of is Quantizer.range_of:
            return amax
        blocks = in_blocks(x, axes, self.block)
        return self.range_of(blocks, amax.reshape(blocks.shape[:-1])).reshape(
            amax.shape
        )

    def _quantize(self, x: Float32[Array, "..."], to: Asked) -> QuantizedArray:
        """Quantizes `x`, whose subnormals are already flushed if `to.by` is `EXACT`."""
        by, axes, given = to.by, to.axes, to.scale
        if self.hadamard:
            x = by.rotated(x, axes[-1], self.signs, to.dtype)
        if self.scales == "e4m3":
            return self._quantize_in_two_levels(x, to)
        if given is None and not isinstance(self.scale_from, str):
            given = jnp.float32(self.scale_from)
        # One scale, and infinities and NaN show in the payload: with a given scale
        # there is no amax to wait for.
        shows, code = not axes and self.format.has_nan, None
        if shows and given is not None:
            scale = given
        else:
            if not axes:
                amax = to.join(by.largest_finite(x) if shows else by.largest(x))
            elif to.amax is None:
                amax = to.join_rows(block_maximum(x, axes, self.block, by.largest))
            else:
                amax = to.amax
            amax = self._ranges(x, amax, axes)
            if self.scales == "e8m0":
                code = by.written(e8m0_code(amax, self.format).astype(jnp.uint8))
                scale = e8m0_scale(code)
            elif given is None:
                scale = self._scale(amax)
            else:
                scale = jnp.where(amax < jnp.inf, given, jnp.nan)
        if shows:
            scaled = by.scaled(x, scale)
        else:
            scaled = multiply_blocks(x, scale, axes, self.block)
        payload = self._rounded(scaled, to)
        return self._made(
            payload, 1 / scale if code is None else e8m0_from_code(code), to
        )

    def _quantize_in_two_levels(
        self, x: Float32[Array, "..."], to: Asked
    ) -> QuantizedArray:
        by, axes, format = to.by, to.axes, self.format
        amax = by.written(block_maximum(x, axes, self.block, by.largest))
        tensor_scale = nvfp4_tensor_scale(
            to.join(by.largest(amax)), format, self.largest_scale
        )
        tensor_inverse_scale = 1 / tensor_scale
        ranges = self._ranges(x, amax, axes)
        inverse_scale = nvfp4_block_inverse_scale(ranges, tensor_scale, format)
        inverse_scale = by.written(inverse_scale.astype(jnp.float8_e4m3fn))
        scales = nvfp4_scale(inverse_scale.astype(jnp.float32), tensor_inverse_scale)
        payload = self._rounded(multiply_blocks(x, scales, axes, self.block), to)
        return self._made(payload, inverse_scale, to, tensor_inverse_scale)

    def _rounded(self, scaled: Array, to: Asked) -> Array:
        if self.format.bits == 4:
            return to.by.to_four_bits(scaled, to.axes[-1], to.key)
        if self.format is Format.INT8:
            return to_int8(scaled, to.key)
        return to.by.to_format(scaled, self.format, to.key)

    def _made(
        self,
        payload: Array,
        inverse_scale: Array,
        to: Asked,
        tensor_inverse_scale: Array | None = None,
    ) -> QuantizedArray:
        return QuantizedArray(
            payload,
            inverse_scale,
            tensor_inverse_scale,
            format=self.format,
            dtype=to.dtype,
            axes=to.axes,
            block=self.block,
            rotated=self.hadamard,
            signs=self.signs,
        )


def TensorQuantizer(
    format: Format = Format.E4M3,
    *,
    power_of_two_scales: bool = False,
    amax_epsilon: float = 0.0,
    stochastic_rounding: bool = False,
) -> Quantizer:
    r"""Returns the quantizer with one float32 scale for the whole array.

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
        stochastic_rounding: See `mpx.quantization.Quantizer`.

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
    return Quantizer(
        check_format(format, "TensorQuantizer"),
        scales=_float32(power_of_two_scales, "TensorQuantizer"),
        amax_epsilon=amax_epsilon,
        stochastic_rounding=stochastic_rounding,
    )


def BlockQuantizer(
    format: Format = Format.E4M3,
    block_dimensions: int = 1,
    *,
    power_of_two_scales: bool = True,
    amax_epsilon: float = 0.0,
    stochastic_rounding: bool = False,
) -> Quantizer:
    r"""Returns that of one float32 scale for each block of 1x128 or 128x128 numbers.

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
        stochastic_rounding: See `mpx.quantization.Quantizer`.

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
    return Quantizer(
        check_format(format, "BlockQuantizer"),
        check_dimensions(block_dimensions, "BlockQuantizer"),
        128,
        scales=_float32(power_of_two_scales, "BlockQuantizer"),
        amax_epsilon=amax_epsilon,
        stochastic_rounding=stochastic_rounding,
    )


def MXFP8Quantizer(
    format: Format = Format.E4M3, *, stochastic_rounding: bool = False
) -> Quantizer:
    r"""Returns that of a power of two in 8 bits (E8M0) for each block of 1x32 numbers.

    $$e_b = \left\lceil \log_2 (\max\nolimits_b|x| / \mathrm{MAX}) \right\rceil \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot 2^{-e_b})) \qquad
    x \approx q \cdot 2^{e_b}$$

    with $-126 \le e_b \le 126$, so no finite number saturates. A block that contains an
    infinity or a NaN has the scale NaN and is NaN.

    Args:
        format: `Format.E4M3` or `Format.E5M2`.
        stochastic_rounding: See `mpx.quantization.Quantizer`.

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
    return Quantizer(
        check_format(format, "MXFP8Quantizer"),
        1,
        32,
        scales="e8m0",
        stochastic_rounding=stochastic_rounding,
    )


def NVFP4Quantizer(
    block_dimensions: int = 1,
    *,
    hadamard: bool = False,
    signs: tuple[int, ...] | None = None,
    stochastic_rounding: bool = False,
) -> Quantizer:
    r"""Returns that of E2M1 in blocks of 1x16 or 16x16 with scales in E4M3.

    $$t = \frac{448 \cdot 6}{\max|x|} \qquad
    b = \mathrm{E4M3}\!\left(\max\nolimits_b|x| \cdot \frac{t}{6}\right) \qquad
    q = \mathrm{E2M1}\!\left(x \cdot \frac{1}{b \cdot (1 / t)}\right)$$

    and $x \approx q \cdot (b \cdot (1 / t))$, with one float32 number $t$ for the
    tensor; $t = 1$ if the amax of the tensor is zero, and at most $2^{100}$. If an
    array contains an infinity or a NaN, all its scales and so all its values are NaN,
    since E2M1 has none. Blocks whose scale rounds to zero are zero.

    Args:
        block_dimensions: 1 for 1x16 (inputs, gradients), 2 for 16x16 (weights).
        hadamard: See `mpx.quantization.Quantizer`, like `signs`.
        signs: The signs of that transform.
        stochastic_rounding: See `mpx.quantization.Quantizer`.

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
    return Quantizer(
        Format.E2M1,
        check_dimensions(block_dimensions, "NVFP4Quantizer"),
        16,
        scales="e4m3",
        hadamard=hadamard,
        signs=signs,
        stochastic_rounding=stochastic_rounding,
    )


def _float32(power_of_two_scales: object, name: str) -> str:
    if not isinstance(power_of_two_scales, bool):
        raise TypeError(
            f"`power_of_two_scales` of `mpx.quantization.{name}` must be True or "
            f"False; got {power_of_two_scales!r}."
        )
    return "power of two" if power_of_two_scales else "float32"
