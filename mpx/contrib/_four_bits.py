"""NVFP4 in both layouts by two kernels, each of which reads an array once.

An operand of a linear layer is quantized along two axes, for two matmuls, one copy
after the Hadamard transform. XLA needs one pass for each of: the transform, both amaxes
of the tensor, two times the amaxes of blocks, two times the casts. The first kernel
here computes the amaxes of the tensor, with the transform and the hash that seeds the
noise; the second one the rest, with the transform again. Compiled for a B200, a step of
two layers of 4096 x 16384 moves 21.9 GB with them and 28.6 without (jax 0.10.2,
November 2026).

The results are bit-identical to XLA's, except after the transform: its sums of 16
numbers are added in another order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._quantize import (
    Format,
    Join,
    QuantizedArray,
    Quantizer,
    encode,
    flushed,
    hashed,
    largest_magnitude,
    noise_of_hash,
    nvfp4_scale,
    nvfp4_tensor_scale,
    round_finite,
    signs_of,
    uniform,
    up_or_down,
)
from ._tiles import BLOCK, COLUMNS, ROWS, Along, Tiled

_SCALED = 16  # numbers that share a scale
_ROTATED = 16  # numbers that are transformed together
_HALF = BLOCK // 2  # bytes of a block
_SCALES = BLOCK // _SCALED  # scales of a block

_MATRIX: Along = ((ROWS, BLOCK), (COLUMNS, BLOCK))
_PLACE: tuple[Along, ...] = (((ROWS, BLOCK),), ((COLUMNS, BLOCK),))

# The positions in the second kernel's array of facts: for each copy the factor that
# brings an amax into E4M3's range, and the key of the noise; then the factor of each
# E4M3 scale.
_UNIT, _KEY, _TABLES, _CODES = 0, 2, 256, 128
_FACTS: Along = ((None, _TABLES + 2 * _CODES),)
_E4M3 = np.arange(_CODES, dtype=np.uint8).view(Format.E4M3.dtype).astype(np.float32)


class _Copy(NamedTuple):
    """How one copy is made, along rows or along columns.

    Attributes:
        signs: The signs of the Hadamard transform, as bits that are 1 for -1; None if
            the copy is not transformed.
        is_stochastic: Whether it is rounded stochastically.
        rounded_to: The dtype that the transformed numbers are rounded to, or None.
    """

    signs: int | None
    is_stochastic: bool
    rounded_to: np.dtype | None

    @classmethod
    def of(cls, quantizer: Quantizer, rounded_to: np.dtype | None) -> "_Copy":
        """Returns the copy that a quantizer makes."""
        signs = signs_of(quantizer.signs) if quantizer.hadamard else None
        return cls(signs, quantizer.stochastic_rounding, rounded_to)


def quantize_four_bits(
    x: Array,
    quantizers: tuple[Quantizer, Quantizer],
    dtype: np.dtype,
    axes: tuple[int, int],
    join: Join,
    *,
    step: Array | None = None,
    rounded_to: np.dtype | None = None,
    interpret: bool = False,
) -> tuple[QuantizedArray, QuantizedArray]:
    """Quantizes an operand along both axes; returns both copies.

    Args:
        x: Floating matrices, both sizes multiples of 32.
        quantizers: Those of the first and second copy; equal if one has square blocks.
        dtype: The dtype that `dequantize` returns.
        axes: The block axes of the first and second copy: -1 and -2 in any order.
        join: Makes the amax of the whole array from that of `x`.
        step: The number of the training step, which seeds the noise; None if unknown.
        rounded_to: A dtype that the numbers are rounded to first.
        interpret: Runs the kernels on a device without Triton, for tests.
    """
    if x.dtype.itemsize not in (2, 4):  # Triton has no matmul of other dtypes
        x = x.astype(jnp.float32)
    half = dtype if dtype == jnp.bfloat16 else None
    rows, columns = (quantizers[axes.index(axis)] for axis in (-1, -2))
    copies = _Copy.of(rows, half), _Copy.of(columns, half)
    has_noise = any(one.is_stochastic for one in copies)
    place = _places(x) if has_noise else ()
    *amaxes, total = _measured(x, place, copies, rounded_to, interpret)
    scales = [nvfp4_tensor_scale(join(amax)) for amax in amaxes]
    keys = [
        noise_of_hash(total, x.shape, salt, step).halves
        if has_noise
        else jnp.zeros(2, jnp.uint32)
        for salt in (axes.index(-1), axes.index(-2))
    ]
    is_square = rows.block_dimensions == 2
    found = _both(
        x, _facts(scales, keys), place, copies, is_square, rounded_to, interpret
    )
    first, second = (
        QuantizedArray(
            *found[axis],
            1 / scales[-1 - axis],
            format=Format.E2M1,
            dtype=dtype,
            # The last axis is packed.
            axes=(-3 - axis, axis) if is_square else (axis,),
            block=_SCALED,
            rotated=one.hadamard,
            signs=one.signs,
        )
        for axis, one in zip(axes, quantizers, strict=True)
    )
    return first, second


def _measured(
    x: Array,
    place: tuple[Array, ...],
    copies: tuple[_Copy, _Copy],
    rounded_to: np.dtype | None,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Returns the amaxes of both copies, and the numbers' hash if noise is drawn."""
    if not place and all(one.signs is None for one in copies):
        rounded = x if rounded_to is None else x.astype(rounded_to)
        amax = largest_magnitude(rounded.astype(jnp.float32))
        return amax, amax, jnp.uint32(0)
    blocks: Along = ((ROWS, 1), (COLUMNS, 1))
    found = Tiled(
        functools.partial(_measure, copies=copies, rounded_to=rounded_to),
        "nvfp4_amaxes",
        operands=(_MATRIX, *_PLACE[: len(place)]),
        results=((blocks, jnp.int32), (blocks, jnp.int32), (blocks, jnp.uint32)),
        interpret=interpret,
    )(x, *place)

    def join(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        return (
            jnp.maximum(left[0], right[0]),
            jnp.maximum(left[1], right[1]),
            left[2] + right[2],
        )

    # All three in one kernel.
    nothing = np.int32(0), np.int32(0), np.uint32(0)
    first, second, total = lax.reduce(found, nothing, join, tuple(range(x.ndim)))
    one, other = (lax.bitcast_convert_type(y, jnp.float32) for y in (first, second))
    return one, other, total


def _both(
    x: Array,
    facts: Array,
    place: tuple[Array, ...],
    copies: tuple[_Copy, _Copy],
    is_square: bool,
    rounded_to: np.dtype | None,
    interpret: bool,
) -> dict[int, tuple[Array, Array]]:
    """Returns payload and scales of each copy, by the axis of its packed blocks."""
    by_rows, by_columns = (ROWS, _SCALES), (COLUMNS, _SCALES)
    scales = (((ROWS, BLOCK), by_columns), ((COLUMNS, BLOCK), by_rows))
    numbers = (((ROWS, BLOCK), (COLUMNS, _HALF)), ((COLUMNS, BLOCK), (ROWS, _HALF)))
    results = (*numbers, *(((by_rows, by_columns),) if is_square else scales))
    kernel = _quantize_square if is_square else _quantize
    payload, turned, *codes = Tiled(
        functools.partial(kernel, copies=copies, rounded_to=rounded_to),
        "nvfp4_in_both_layouts",
        operands=(_MATRIX, _FACTS, *_PLACE[: len(place)]),
        results=tuple((along, jnp.uint8) for along in results),
        interpret=interpret,
    )(x, jnp.broadcast_to(facts, (*x.shape[:-2], *facts.shape)), *place)
    first, *turned_scales = (
        lax.bitcast_convert_type(code, Format.E4M3.dtype) for code in codes
    )
    second = first if is_square else turned_scales[0].mT
    return {-1: (payload, first), -2: (turned.mT, second)}


def _facts(scales: Sequence[Array], keys: Sequence[Array]) -> Array:
    """Returns the second kernel's array of facts, at the positions above."""
    # In the order of `nvfp4_block_inverse_scale`.
    units = [scale * np.float32(1 / Format.E2M1.largest) for scale in scales]
    tables = [nvfp4_scale(jnp.asarray(_E4M3), 1 / scale) for scale in scales]
    filling = jnp.zeros(_TABLES - _KEY - 4, jnp.uint32)
    parts = (_bits(jnp.stack(units)), *keys, filling, *map(_bits, tables))
    return jnp.concatenate(parts)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _places(x: Array) -> tuple[Array, Array]:
    """Returns two arrays whose sum is each number's index in the flattened array."""
    *batch, rows, columns = x.shape
    first = jnp.arange(int(np.prod(batch)) * rows, dtype=jnp.uint32)
    first = (first * np.uint32(columns)).reshape(*batch, rows)
    return first, jnp.broadcast_to(
        jnp.arange(columns, dtype=jnp.uint32), (*batch, columns)
    )


# --- Inside a tile --------------------------------------------------------------------


def _measure(
    x_ref: Any, *refs: Any, copies: tuple[_Copy, _Copy], rounded_to: np.dtype | None
) -> None:
    *place, amax, turned_amax, totals = refs
    x = _loaded(x_ref, rounded_to)
    one, other = copies
    amax[...] = _as_integers(_largest(_rotated(x, one), BLOCK, BLOCK))
    turned_amax[...] = _as_integers(_largest(_rotated(x.T, other), BLOCK, BLOCK).T)
    if place:
        rows, columns = place
        places = rows[...][:, None] + columns[...][None, :]
        mixed = hashed(flushed(x.astype(jnp.float32)), places)
        sums = _in_pieces(mixed, 1, BLOCK).sum(axis=2, dtype=jnp.uint32)
        totals[...] = _in_pieces(sums, 0, BLOCK).sum(axis=1, dtype=jnp.uint32)
    else:
        totals[...] = jnp.zeros(totals.shape, jnp.uint32)


def _quantize(
    x_ref: Any,
    facts: Any,
    *refs: Any,
    copies: tuple[_Copy, _Copy],
    rounded_to: np.dtype | None,
) -> None:
    *place, payload, turned, codes, turned_codes = refs
    x = _loaded(x_ref, rounded_to)
    results = ((payload, codes), (turned, turned_codes))
    for index, (copy, (numbers, scales)) in enumerate(
        zip(copies, results, strict=True)
    ):
        y = _rotated(x if index == 0 else x.T, copy)
        code = _scale_codes(_largest(y, 1, _SCALED), facts, index)
        factor = _factors(code, facts, index)
        scaled = _in_pieces(y, 1, _SCALED) * factor[:, :, None]
        rounding = _nearest_integers
        if copy.is_stochastic:
            along, across = place if index == 0 else place[::-1]
            places = along[...][:, None] + across[...][None, :]
            rounding = _random_integers(facts, index, places)
        numbers[...] = _packed(
            round_finite(scaled.reshape(y.shape), Format.E2M1, rounding)
        )
        scales[...] = code.astype(jnp.uint8)


def _quantize_square(
    x_ref: Any,
    facts: Any,
    payload: Any,
    turned: Any,
    codes: Any,
    *,
    copies: tuple[_Copy, _Copy],
    rounded_to: np.dtype | None,
) -> None:
    x = _loaded(x_ref, rounded_to).astype(jnp.float32)
    code = _scale_codes(_largest(x, _SCALED, _SCALED), facts, 0)
    factor = _factors(code, facts, 0)
    height, width = x.shape
    scaled = x.reshape(height // _SCALED, _SCALED, width // _SCALED, _SCALED)
    scaled = (scaled * factor[:, None, :, None]).reshape(x.shape)
    numbers = round_finite(scaled, Format.E2M1, _nearest_integers)
    payload[...] = _packed(numbers)
    turned[...] = _packed(numbers.T)
    codes[...] = code.astype(jnp.uint8)


def _loaded(x_ref: Any, rounded_to: np.dtype | None) -> Array:
    x = x_ref[...]
    return x if rounded_to is None else x.astype(rounded_to)


def _in_pieces(x: Array, axis: int, length: int) -> Array:
    shape = [*x.shape]
    shape[axis : axis + 1] = [x.shape[axis] // length, length]
    return x.reshape(shape)


def _largest(x: Array, height: int, width: int) -> Array:
    """Returns each block's largest magnitude. Triton reduces one axis at a time."""
    amax = largest_magnitude(_in_pieces(x, 1, width), (2,))
    if height == 1:
        return amax
    return largest_magnitude(_in_pieces(amax, 0, height), (1,))


def _as_integers(magnitude: Array) -> Array:
    """Returns integers in the order of the magnitudes, infinity and NaN on top."""
    return lax.bitcast_convert_type(magnitude, jnp.int32)


def _rotated(x: Array, copy: _Copy) -> Array:
    """Applies the Hadamard transform along rows, as a block diagonal matmul.

    Products of a half-precision number with 1/4 are exact, and sums are in float32.
    """
    if copy.signs is None:
        return x.astype(jnp.float32)
    size = x.shape[1]
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    sign = (copy.signs >> (i % _ROTATED)) + lax.population_count(i & j & (_ROTATED - 1))
    entry = jnp.where((sign & 1) == 1, -0.25, 0.25)
    matrix = jnp.where(i // _ROTATED == j // _ROTATED, entry, 0.0).astype(x.dtype)
    y = lax.dot(
        x, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if copy.rounded_to is not None:
        y = y.astype(copy.rounded_to)
    return y.astype(jnp.float32)


def _scale_codes(amax: Array, facts: Any, index: int) -> Array:
    """Returns the E4M3 codes of the scales of blocks."""
    wanted = amax * lax.bitcast_convert_type(facts[_UNIT + index], jnp.float32)
    value = round_finite(wanted, Format.E4M3, _nearest_integers)
    # For a float32 of at least 2^-6 the code is in its bits: the exponent and three
    # bits of mantissa.
    bits = lax.bitcast_convert_type(value, jnp.int32)
    is_subnormal = value < Format.E4M3.smallest_normal
    small = (value * np.float32(1 / Format.E4M3.smallest)).astype(jnp.int32)
    code = jnp.where(is_subnormal, small, (bits >> 20) - (120 << 3))
    return jnp.where(wanted == wanted, code, _CODES - 1)  # NaN


def _factors(code: Array, facts: Any, index: int) -> Array:
    """Returns the factor of each block. Read: Triton's division is not exact."""
    start = _TABLES + index * _CODES
    return lax.bitcast_convert_type(facts[start + code], jnp.float32)


def _packed(numbers: Array) -> Array:
    """Packs two codes of E2M1 into a byte, along rows."""
    pairs = _in_pieces(encode(numbers).astype(jnp.int32), 1, 2)
    place = lax.broadcasted_iota(jnp.int32, pairs.shape, 2)
    return jnp.sum(pairs << (4 * place), axis=2).astype(jnp.uint8)


def _nearest_integers(steps: Array) -> Array:
    """Rounds to nearest, ties to even: Pallas has no rounding for Triton."""
    lower = jnp.floor(steps)
    rest = steps - lower
    is_odd = lower != 2 * jnp.floor(lower * 0.5)
    is_up = (rest > 0.5) | ((rest == 0.5) & is_odd)
    return lower + is_up.astype(jnp.float32)


def _random_integers(facts: Any, index: int, place: Array) -> Any:
    start = _KEY + 2 * index
    first, second = facts[start], facts[start + 1]

    def rounding(steps: Array) -> Array:
        draws = uniform(first, second, place)
        return up_or_down(steps, jnp.floor(steps), draws)

    return rounding
