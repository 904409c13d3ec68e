"""What `mpx.monitor` counts: of each operand of a product, in each format asked for."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._typing import AnyArray
from ._formats import AskedFormat, Kept
from ._trace import Kind

# Numbers are multiplied by this before they are squared, so that float32 holds the
# squares of gradients, and of what they lose, from 1e-23 to 1e9.
UNITS = {Kind.INPUT: 1.0, Kind.WEIGHT: 1.0, Kind.GRADIENT: 2.0**24}

# The first numbers of a vector of counts; those of formats follow.
_COUNTS = ("amax", "squares", "zeros", "broken", "size")
_PER_FORMAT = len(Kept._fields)


def counts(
    x: Array, kind: Kind, axis: int, formats: Sequence[AskedFormat]
) -> Float[Array, " n"]:
    """The counts of an array, to be joined with those of others by `joined`."""
    x = jnp.asarray(x).astype(jnp.float32)
    is_fine = jnp.isfinite(x)
    fine = jnp.where(is_fine, x, jnp.float32(0))
    unit = UNITS[kind]
    scaled = fine * unit
    each = [
        jnp.abs(fine),
        scaled * scaled,
        (x == 0).astype(jnp.float32),
        (~is_fine).astype(jnp.float32),
    ]
    count = len(each)
    each += [value for form in formats for value in form.kept(fine, kind, axis, unit)]
    found = _reduced(each)
    return jnp.stack([*found[:count], jnp.float32(x.size), *found[count:]])


def _reduced(arrays: Sequence[Array]) -> list[Array]:
    """The maximum of the first array, and the sums of the others.

    By one reduction: of several, XLA (jaxlib 0.10.2, November 2026) makes a pass over
    the operand for each: with three formats, compiled for an H100, the counts of the
    paper's ViT move 106 % of what a step does, and 77 % by one (of a quarter, 36 %).
    """

    def join(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
        sums = (x + y for x, y in zip(a[1:], b[1:], strict=True))
        return (jnp.maximum(a[0], b[0]), *sums)

    zeros = tuple(np.float32(0) for _ in arrays)
    axes = tuple(range(arrays[0].ndim))
    return list(lax.reduce(tuple(arrays), zeros, join, axes))


def sampled(x: AnyArray, sample: int) -> AnyArray:
    """One row in so many, along the last axis but one, the rows of a product.

    So a batch, which is the first axis, may lie in parts on several devices.
    """
    if jnp.ndim(x) < 2 or x.shape[-2] < 2 * sample:
        return x
    return lax.slice_in_dim(x, 0, x.shape[-2], sample, axis=x.ndim - 2)


def joined(a: AnyArray, b: AnyArray) -> AnyArray:
    """The counts of two arrays together: the larger amax, and sums."""
    return jnp.concatenate([jnp.maximum(a[..., :1], b[..., :1]), (a + b)[..., 1:]], -1)


@dataclasses.dataclass(frozen=True)
class FormatStatistics:
    """What a format leaves of an array. Shares are of its numbers that are not zero.

    Attributes:
        above: The share beyond the largest number of the format.
        below: The share that is subnormal in the format and loses digits; for a
            quantizer, that is off by more than half a step of normal numbers.
        flushed: The share that becomes zero.
        snr: Signal to noise of quantizing it, in dB; infinite where nothing is lost.
    """

    above: float
    below: float
    flushed: float
    snr: float


@dataclasses.dataclass(frozen=True)
class TensorStatistics:
    """How large the numbers of one operand of products are.

    Attributes:
        layer: The weight of the product that it is an operand of, or the scopes.
        kind: `input`, `weight` or `gradient` (of the output).
        dtype: Its dtype, as the product gets it, or as it is before a recipe.
        size: How many numbers it has, all turns of loops together.
        amax: The largest magnitude among those that are finite.
        rms: The root of the mean of their squares.
        zeros: The share of zeros.
        broken: How many numbers are NaN or infinite.
        formats: By name what each format asked for leaves of it.
        turns: The same for each turn of the loop around it, where there is one.
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
        """Names and numbers."""
        for field in ("amax", "rms", "zeros"):
            yield f"{self.name}/{field}", float(getattr(self, field))
        for format, found in self.formats.items():
            for field in dataclasses.fields(found):
                yield f"{self.name}/{format}/{field.name}", getattr(found, field.name)


def tensor_statistics(
    found: np.ndarray,
    layer: str,
    kind: Kind,
    dtype: str,
    formats: Sequence[AskedFormat],
) -> TensorStatistics | None:
    """Reads counts, stacked by turns or not; None of an operand that was not met."""
    found = np.asarray(found, np.float64)
    make = functools.partial(
        _read, layer=layer, kind=kind, dtype=dtype, formats=formats
    )
    if found.ndim == 1:
        return make(found) if found[4] else None
    rows = found.reshape(-1, found.shape[-1])
    whole = np.concatenate([rows[:, :1].max(0), rows[:, 1:].sum(0)])
    if not whole[4]:
        return None
    return dataclasses.replace(make(whole), turns=tuple(map(make, rows)))


def _read(
    values: np.ndarray,
    *,
    layer: str,
    kind: Kind,
    dtype: str,
    formats: Sequence[AskedFormat],
) -> TensorStatistics:
    amax, squares, zeros, broken, size = values[: len(_COUNTS)]
    count = max(size, 1.0)
    others = max(size - zeros, 1.0)

    def read(number: int) -> FormatStatistics:
        start = len(_COUNTS) + number * _PER_FORMAT
        above, below, flushed, noise = values[start : start + _PER_FORMAT]
        shares = (above / others, below / others, flushed / others)
        return FormatStatistics(*map(float, shares), snr=_snr(squares, noise))

    return TensorStatistics(
        layer,
        kind.value,
        dtype,
        int(size),
        float(amax),
        math.sqrt(squares / count) / UNITS[kind],
        float(zeros / count),
        int(broken),
        {each.name: read(i) for i, each in enumerate(formats)},
    )


def _snr(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if not signal or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
