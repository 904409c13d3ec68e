"""The statistics of `mpx.monitor`: each matmul operand in each requested format."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..._base.dtypes import is_half
from ..._base.errors import describe
from ..._base.typing import AnyArray, DTypeLike
from ..._quantize import (
    LEGS,
    AbstractRecipe,
    Format,
    Leg,
    Quantizer,
    Role,
    power_of_two,
    quantize_dequantize,
)

# --- Requested formats, and their rounding losses -------------------------------------
#
# Rounding is arithmetic, as in the recipes' emulation: a compiler may drop a pair of
# casts (float32 to float16 and back).

CALL = "`formats` of `mpx.monitor`"

Asked = DTypeLike | Format | Quantizer | AbstractRecipe


class RoundingLoss(NamedTuple):
    """The loss of each value of an array in a format: flags 0 or 1, and its error."""

    above: Float[Array, "..."]
    """Whether it is beyond the largest number of the format."""
    below: Float[Array, "..."]
    """Whether it is not zero and subnormal in the format: it loses digits."""
    flushed: Float[Array, "..."]
    """Whether it is one of them that become zero."""
    lost: Float[Array, "..."]
    """The magnitude of what is lost."""


@dataclasses.dataclass(frozen=True)
class AskedFormat:
    """A requested format.

    Attributes:
        name: Its name in tables and records.
        bits: The number of bits of a value.
        kept: `kept(x, kind, axis)` returns its losses of a float32 array.
    """

    name: str
    bits: int
    kept: Callable[[Array, Role, int], RoundingLoss]


def asked_formats(formats: object) -> tuple[AskedFormat, ...]:
    """Reads the formats that a user requests, one or several."""
    is_several = isinstance(formats, list | tuple)
    every = formats if is_several else (formats,)
    found = tuple(each for asked in every for each in _asked(asked))
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{CALL} must be different; got {', '.join(names)}.")
    return found


def _asked(asked: Any) -> list[AskedFormat]:
    if isinstance(asked, AbstractRecipe):
        return _of_recipe(asked)
    if isinstance(asked, Quantizer):
        return [_of_quantizer(asked.name, lambda _: asked)]
    if isinstance(asked, Format) and asked is not Format.INT8:
        return [_of_format(asked)]
    try:
        dtype = jnp.dtype(asked)
    except TypeError:
        dtype = np.dtype(object)
    if is_half(dtype):
        return [_plain(dtype.name, lambda _: dtype)]
    if asked is Format.INT8 or dtype == np.int8:
        raise TypeError(
            f"{CALL} count unscaled values, and integers of 8 bits need a scale; got "
            f"{describe(asked)}. Pass `mpx.Int8CurrentScaling()`."
        )
    single = [f for f in Format if f.has_exponent and f.dtype == dtype]
    if not single:
        raise TypeError(
            f"{CALL} must be dtypes ('float16', 'bfloat16' and those of "
            "`mpx.Format`), formats such as `mpx.Format.E4M3`, quantizers and "
            f"recipes; got {describe(asked)}."
        )
    return [_of_format(single[0])]


def _of_recipe(recipe: AbstractRecipe) -> list[AskedFormat]:
    """Makes one format of a recipe, or one for each quantized leg, if they differ.

    A transform and the kind of rounding are no difference: what is counted is that of
    the first copy, rounded to nearest.
    """
    name, plain = type(recipe).__name__, {"hadamard": False, "signs": None}

    def kind(role: Role, leg: Leg) -> Quantizer | None:
        found = recipe.quantizer(role, leg=leg)
        rounded = {**plain, "stochastic_rounding": False}
        return None if found is None else dataclasses.replace(found, **rounded)

    if all(kind(role, one) == kind(role, other) for role, (one, other) in LEGS.items()):
        return [_of_quantizer(name, recipe.quantizer)]

    def of_leg(leg: Leg) -> Callable[[Role], Quantizer | None]:
        return lambda role: kind(role, leg) if leg in LEGS[role] else None

    pairs = [(leg, of_leg(leg)) for leg in Leg]
    # Both legs read one copy, along the axis of the first: see `Copies`.
    shared = {
        role
        for role, (one, other) in LEGS.items()
        if role is not Role.GRADIENT
        and (found := kind(role, one)) == kind(role, other)
        and found is not None
        and found._is_folded
    }
    return [
        _of_quantizer(f"{name} {leg.value}", found, leg, shared)
        for leg, found in pairs
        if any(map(found, Role))
    ]


def _of_format(format: Format) -> AskedFormat:
    def dtype(kind: Role) -> np.dtype:
        return (format.backward if kind is Role.GRADIENT else format.forward).dtype

    return _plain(format.name, dtype)


def _plain(name: str, dtype: Callable[[Role], np.dtype]) -> AskedFormat:
    """Makes a format of unscaled values."""

    def kept(x: Array, kind: Role, axis: int) -> RoundingLoss:
        info = jnp.finfo(dtype(kind))
        size = jnp.abs(x)
        rounded = round_to(size, dtype(kind))
        is_below = (size > 0) & (size < float(info.smallest_normal))
        return RoundingLoss(
            _flag(size > float(info.max)),
            _flag(is_below),
            _flag((size > 0) & (rounded == 0)),
            jnp.abs(size - rounded),
        )

    return AskedFormat(name, jnp.finfo(dtype(Role.INPUT)).bits, kept)


def round_to(size: Float[Array, "..."], dtype: np.dtype) -> Float[Array, "..."]:
    r"""Rounds magnitudes to a dtype, to nearest, ties to even, in float32.

    With $d$ the distance of neighbours, the sum $x + 2^{23} d$ has digits down to $d$:
    float32 rounds it as the format would, and the difference is exact. Steps of $d$ for
    all formats would save a branch, but cost 10 % more memory traffic of a monitored
    GPT (`python -m benchmarks monitor`). Values too large for a 16-bit dtype become
    infinite, for a smaller dtype its largest number. Subnormal numbers of bfloat16 are
    those of float32, which devices flush.
    """
    info = jnp.finfo(dtype)
    largest = float(info.max)
    bits = lax.bitcast_convert_type(size, jnp.uint32) >> 23
    lowest = max(127 + info.minexp, info.nmant + 1)
    # All values from this exponent on are beyond the largest number.
    highest = math.frexp(largest)[1] + 127
    exponent = jnp.clip(bits.astype(jnp.int32), lowest, highest)
    shift = 23 - info.nmant
    if highest + shift < 255:
        large = power_of_two(exponent + shift)
        rounded = (size + large) - large
    else:  # for bfloat16 the sum would be infinite
        distance_exponent = exponent - info.nmant
        steps = size * power_of_two(254 - distance_exponent)
        steps = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
        rounded = steps * power_of_two(distance_exponent)
    beyond = jnp.inf if is_half(dtype) else largest
    return jnp.where(rounded > largest, jnp.float32(beyond), rounded)


def _flag(flags: Array) -> Array:
    return flags.astype(jnp.float32)


def _of_quantizer(
    name: str,
    quantizer: Callable[[Role], Quantizer | None],
    leg: Leg | None = None,
    shared: Set[Role] = frozenset(),
) -> AskedFormat:
    """Makes a format of values with the scales that a quantizer finds for them."""

    def kept(x: Array, kind: Role, axis: int) -> RoundingLoss:
        found = quantizer(kind)
        zero = jnp.zeros_like(x)
        if found is None:  # not quantized
            return RoundingLoss(zero, zero, zero, zero)
        if found.stochastic_rounding:
            found = dataclasses.replace(found, stochastic_rounding=False)
        of = None if kind in shared else leg
        padded, axes = _in_blocks(x, found, _axis_of(of, kind, axis, x.ndim))
        rounded = quantize_dequantize(padded, found, axis=axes)
        # Removes the padding, and the axis that made blocks of a vector.
        rounded = rounded.reshape(rounded.shape[rounded.ndim - x.ndim :])
        rounded = rounded[tuple(map(slice, x.shape))]
        lost, size = jnp.abs(x - rounded), jnp.abs(x)
        half_step = 2.0 ** -(_mantissa_bits(found) + 1) * 1.01
        is_below, is_above = lost > half_step * size, ~jnp.isfinite(rounded)
        if not isinstance(found.scale_from, str):  # a constant: others saturate
            is_above |= size * found.scale_from > found.format.largest
        return RoundingLoss(
            _flag(is_above),
            _flag(is_below & ~is_above),
            _flag((size > 0) & (rounded == 0)),
            lost,
        )

    formats = [one.format for one in map(quantizer, Role) if one is not None]
    return AskedFormat(name, (*formats, Format.E4M3)[0].bits, kept)


def _axis_of(leg: Leg | None, kind: Role, axis: int, rank: int) -> int:
    """Returns the axis that a leg contracts, from that of the first matmul met."""
    if leg is None or rank < 2:
        return axis
    if kind is Role.GRADIENT:
        return -1 if leg is Leg.DGRAD else -2
    return axis if leg is Leg.FORWARD else -1 if axis % rank == rank - 2 else -2


def _in_blocks(
    x: Array, quantizer: Quantizer, axis: int
) -> tuple[Array, int | tuple[int, ...]]:
    """Returns an array padded with zeros to whole blocks, and the blocks' axes."""
    dimensions = quantizer.block_dimensions
    if not dimensions:
        return x, axis
    # A vector is one row of square blocks.
    x = x.reshape((1,) * (dimensions - x.ndim) + x.shape)
    axes = (axis % x.ndim,) if dimensions == 1 else (x.ndim - 2, x.ndim - 1)
    widths = [
        (0, -n % quantizer._multiple if i in axes else 0) for i, n in enumerate(x.shape)
    ]
    padded = jnp.pad(x, widths) if any(more for _, more in widths) else x
    return padded, axes if dimensions == 2 else axes[0]


def _mantissa_bits(quantizer: Quantizer) -> int:
    # Integers have the same steps everywhere: they are called small where E4M3 would
    # lose less.
    is_integer = quantizer.format is Format.INT8
    return (Format.E4M3 if is_integer else quantizer.format)._info.nmant


# --- Counts ---------------------------------------------------------------------------
#
# A vector of counts: those of all values first, then those of each format. float32
# holds squares of 1e-19 to 1e19 only. So the squares of large and of small values are
# summed separately, each scaled towards 1 first: 1e-34 to 1e34 in one pass (J. L. Blue,
# "A portable Fortran program to find the Euclidean norm of a vector", 1978). A unit
# taken from a few rows moves 3 % of a step less, but misses the other rows.
_COUNTS = ("amax", "size", "zeros", "broken", "large", "small")
_OF_A_FORMAT = ("above", "below", "flushed", "large", "small")
_SHRUNK, _GROWN = 2.0**-50, 2.0**50


def counts(
    x: Array, kind: Role, axis: int, formats: Sequence[AskedFormat]
) -> Float[Array, " n"]:
    """Returns the counts of an array; `joined` combines those of several."""
    x = jnp.asarray(x).astype(jnp.float32)
    is_fine = jnp.isfinite(x)
    fine = jnp.where(is_fine, x, jnp.float32(0))
    flags = [(x == 0).astype(jnp.float32), (~is_fine).astype(jnp.float32)]
    each = [jnp.abs(fine), *flags, *_squares(jnp.abs(fine))]
    for form in formats:
        *flags, lost = form.kept(fine, kind, axis)
        each += [*flags, *_squares(lost)]
    amax, *sums = _reduced(each)
    return jnp.stack([amax, jnp.float32(x.size), *sums])


def _squares(size: Array) -> tuple[Array, Array]:
    """Returns squares of large and of small values, scaled to float32's range."""
    is_large, none = size >= 1, jnp.zeros_like(size)
    large = jnp.where(is_large, size * _SHRUNK, none)
    return large * large, jnp.square(jnp.where(is_large, none, size * _GROWN))


def _reduced(arrays: Sequence[Array]) -> list[Array]:
    """Returns the maximum of the first array, and the sums of the others.

    In one reduction: for several, XLA (jaxlib 0.10.2, November 2026) makes a pass over
    the operand for each (a ViT compiled for an H100).
    """

    def join(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
        sums = (x + y for x, y in zip(a[1:], b[1:], strict=True))
        return (jnp.maximum(a[0], b[0]), *sums)

    zeros = tuple(np.float32(0) for _ in arrays)
    return list(lax.reduce(tuple(arrays), zeros, join, tuple(range(arrays[0].ndim))))


def sampled(x: AnyArray, sample: int) -> AnyArray:
    """Returns every `sample`-th row, along the second-to-last axis, a matmul's rows.

    The batch, which is the first axis, may be sharded over devices.
    """
    if jnp.ndim(x) < 2 or x.shape[-2] < 2 * sample:
        return x
    return lax.slice_in_dim(x, 0, x.shape[-2], sample, axis=x.ndim - 2)


def joined(a: AnyArray, b: AnyArray) -> AnyArray:
    """Combines the counts of two arrays: the larger amax, and sums."""
    return jnp.concatenate([jnp.maximum(a[..., :1], b[..., :1]), (a + b)[..., 1:]], -1)


@dataclasses.dataclass(frozen=True)
class FormatStatistics:
    """The loss of an array in a format. Shares are of its nonzero values.

    Attributes:
        above: The share beyond the largest number of the format.
        below: The share that is subnormal in the format and loses precision; for a
            quantizer, the share with an error of more than half a step of normal
            numbers.
        flushed: The share that becomes zero.
        snr: Signal to noise of quantizing it, in dB; infinite if nothing is lost.
    """

    above: float
    below: float
    flushed: float
    snr: float


@dataclasses.dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one operand of matmuls or convolutions.

    Attributes:
        layer: The weight of its matmul, or else the scopes.
        kind: `input`, `weight` or `gradient` (of the output).
        dtype: Its dtype in the matmul, or before quantization by a recipe.
        size: The number of its values, all iterations of loops together.
        amax: The largest finite magnitude.
        rms: The root of the mean of their squares.
        zeros: The share of zeros.
        broken: The number of NaN and infinite values.
        formats: The loss in each requested format, by name.
        turns: The same for each iteration of the loop around it, if there is one.
    """

    layer: str
    kind: str
    dtype: str
    size: int
    amax: float
    rms: float
    zeros: float
    broken: int
    formats: Mapping[str, FormatStatistics]
    turns: "tuple[TensorStatistics, ...]" = ()

    @property
    def name(self) -> str:
        """`blocks[0].fc1.weight/input`."""
        return f"{self.layer}/{self.kind}"

    def records(self) -> Iterator[tuple[str, float]]:
        """Returns numbers by name."""
        for field in ("amax", "rms", "zeros"):
            yield f"{self.name}/{field}", float(getattr(self, field))
        for format, found in self.formats.items():
            for field in dataclasses.fields(found):
                yield f"{self.name}/{format}/{field.name}", getattr(found, field.name)


def tensor_statistics(
    found: np.ndarray,
    layer: str,
    kind: Role,
    dtype: str,
    formats: Sequence[AskedFormat],
) -> TensorStatistics | None:
    """Reads counts, stacked by iteration or not; None if nothing was counted."""
    found = np.asarray(found, np.float64)
    make = functools.partial(
        _read, layer=layer, kind=kind, dtype=dtype, formats=formats
    )
    if found.ndim == 1:
        return make(found) if found[1] else None
    rows = found.reshape(-1, found.shape[-1])
    whole = np.concatenate([rows[:, :1].max(0), rows[:, 1:].sum(0)])
    if not whole[1]:
        return None
    return dataclasses.replace(make(whole), turns=tuple(map(make, rows)))


def _read(
    values: np.ndarray,
    *,
    layer: str,
    kind: Role,
    dtype: str,
    formats: Sequence[AskedFormat],
) -> TensorStatistics:
    amax, size, zeros, broken, *squares = map(float, values[: len(_COUNTS)])
    signal = _sum(*squares)
    count = max(size, 1.0)
    others = max(size - zeros, 1.0)

    def read(number: int) -> FormatStatistics:
        start = len(_COUNTS) + number * len(_OF_A_FORMAT)
        end = start + len(_OF_A_FORMAT)
        *shares, large, small = map(float, values[start:end])
        shares = (share / others for share in shares)
        return FormatStatistics(*shares, snr=_snr(signal, _sum(large, small)))

    return TensorStatistics(
        layer,
        kind.value,
        dtype,
        int(size),
        amax,
        math.sqrt(signal / count),
        zeros / count,
        int(broken),
        {each.name: read(i) for i, each in enumerate(formats)},
    )


def _sum(large: float, small: float) -> float:
    """Returns the unscaled sum of squares, which float64 holds."""
    return large / _SHRUNK**2 + small / _GROWN**2


def _snr(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if not signal or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
