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
from ._formats import AskedFormat
from ._trace import Kind

# A vector of counts: of all numbers first, then of each format. Squares are divided by
# that of `unit`: float32 holds the squares of numbers from 1e-19 to 1e19 only.
_COUNTS = ("size", "unit", "amax", "squares", "zeros", "broken")
_OF_A_FORMAT = ("above", "below", "flushed", "squares")
# The unit where nothing is known, of a sample of zeros.
_UNITS = {Kind.INPUT: 1.0, Kind.WEIGHT: 1.0, Kind.GRADIENT: 2.0**-24}
# The largest of so many rows is the unit. That of all would be one more pass; a joint
# maximum in the reduction moves half as much again (GPT, compiled for an H100).
_SAMPLE = 4


def counts(
    x: Array, kind: Kind, axis: int, formats: Sequence[AskedFormat]
) -> Float[Array, " n"]:
    """The counts of an array, to be joined with those of others by `joined`."""
    x = jnp.asarray(x).astype(jnp.float32)
    unit = _unit(x, kind)
    is_fine = jnp.isfinite(x)
    fine = jnp.where(is_fine, x, jnp.float32(0))
    inverse = 1 / unit
    each = [
        jnp.abs(fine),
        jnp.square(fine * inverse),
        (x == 0).astype(jnp.float32),
        (~is_fine).astype(jnp.float32),
    ]
    for form in formats:
        *flags, lost = form.kept(fine, kind, axis)
        each += [*flags, jnp.square(lost * inverse)]
    found = _reduced(each)
    return jnp.stack([jnp.float32(x.size), unit, *found])


def _unit(x: Array, kind: Kind) -> Float[Array, ""]:
    """About the largest magnitude; of a sample, so that little is read twice."""
    rows = x.shape[-2] if x.ndim > 1 else 1
    step = max(1, rows // _SAMPLE)
    some = lax.slice_in_dim(x, 0, rows, step, axis=x.ndim - 2) if step > 1 else x
    size = jnp.where(jnp.isfinite(some), jnp.abs(some), jnp.float32(0))
    amax = jnp.max(size, initial=0)
    unit = jnp.where(amax == 0, jnp.float32(_UNITS[kind]), amax)
    # The inverse must be normal, too.
    return jnp.clip(unit, 2.0**-120, 2.0**120).astype(jnp.float32)


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


def _names(formats: int) -> tuple[str, ...]:
    return _COUNTS + _OF_A_FORMAT * formats


def sampled(x: AnyArray, sample: int) -> AnyArray:
    """One row in so many, along the last axis but one, the rows of a product.

    So a batch, which is the first axis, may lie in parts on several devices.
    """
    if jnp.ndim(x) < 2 or x.shape[-2] < 2 * sample:
        return x
    return lax.slice_in_dim(x, 0, x.shape[-2], sample, axis=x.ndim - 2)


def joined(a: AnyArray, b: AnyArray) -> AnyArray:
    """The counts of two arrays together: the larger magnitudes, and sums."""
    names = _names((a.shape[-1] - len(_COUNTS)) // len(_OF_A_FORMAT))
    unit = jnp.maximum(a[..., 1], b[..., 1])
    # Zeros, with which a loop begins, have none.
    safe = jnp.where(unit == 0, jnp.ones_like(unit), unit)
    by_a, by_b = (jnp.square(one[..., 1] / safe) for one in (a, b))
    found = []
    for i, name in enumerate(names):
        x, y = a[..., i], b[..., i]
        if name in ("unit", "amax"):
            found.append(jnp.maximum(x, y))
        elif name == "squares":
            found.append(x * by_a + y * by_b)
        else:
            found.append(x + y)
    return jnp.stack(found, -1)


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
        return make(found) if found[0] else None
    rows = found.reshape(-1, found.shape[-1])
    whole = _whole(rows, _names(len(formats)))
    if not whole[0]:
        return None
    return dataclasses.replace(make(whole), turns=tuple(map(make, rows)))


def _whole(rows: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The counts of all turns together."""
    units = rows[:, names.index("unit")]
    ratios = units / (units.max() or 1.0)
    whole = rows.sum(0)
    for i, name in enumerate(names):
        if name in ("unit", "amax"):
            whole[i] = rows[:, i].max()
        elif name == "squares":
            whole[i] = rows[:, i] @ ratios**2
    return whole


def _read(
    values: np.ndarray,
    *,
    layer: str,
    kind: Kind,
    dtype: str,
    formats: Sequence[AskedFormat],
) -> TensorStatistics:
    size, unit, amax, squares, zeros, broken = map(float, values[: len(_COUNTS)])
    count = max(size, 1.0)
    others = max(size - zeros, 1.0)

    def read(number: int) -> FormatStatistics:
        start = len(_COUNTS) + number * len(_OF_A_FORMAT)
        end = start + len(_OF_A_FORMAT)
        *shares, noise = map(float, values[start:end])
        shares = (share / others for share in shares)
        return FormatStatistics(*shares, snr=_snr(squares, noise))

    return TensorStatistics(
        layer,
        kind.value,
        dtype,
        int(size),
        amax,
        math.sqrt(squares / count) * unit,
        zeros / count,
        int(broken),
        {each.name: read(i) for i, each in enumerate(formats)},
    )


def _snr(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if not signal or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
