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

# A vector of counts: of all numbers first, then of each format. Two neighbours, a
# magnitude and a sum of squares divided by the square of it, are a *norm*: float32
# holds the squares of numbers from 1e-19 to 1e19 only.
_COUNTS = ("size", "zeros", "broken", "amax", "squares")
_OF_A_FORMAT = ("above", "below", "flushed", "amax", "squares")


def counts(
    x: Array, kind: Kind, axis: int, formats: Sequence[AskedFormat]
) -> Float[Array, " n"]:
    """The counts of an array, to be joined with those of others by `joined`."""
    x = jnp.asarray(x).astype(jnp.float32)
    is_fine = jnp.isfinite(x)
    fine = jnp.where(is_fine, x, jnp.float32(0))
    each = [
        (x == 0).astype(jnp.float32),
        (~is_fine).astype(jnp.float32),
        *_norm(jnp.abs(fine)),
    ]
    for form in formats:
        *flags, lost = form.kept(fine, kind, axis)
        each += [*flags, *_norm(lost)]
    # By one reduction: of several, XLA (jaxlib 0.10.2, November 2026) makes a pass over
    # the operand for each: with three formats, compiled for an H100, the counts of the
    # paper's ViT move 106 % of what a step does, and 77 % by one (of a quarter, 36 %).
    zeros = tuple(np.float32(0) for _ in each)
    join = functools.partial(_joined, names=_names(len(formats))[1:])
    found = lax.reduce(tuple(each), zeros, join, tuple(range(x.ndim)))
    return jnp.stack([jnp.float32(x.size), *found])


def _names(formats: int) -> tuple[str, ...]:
    return _COUNTS + _OF_A_FORMAT * formats


def _norm(size: Array) -> tuple[Array, Array]:
    return size, (size != 0).astype(jnp.float32)


def _joined(
    a: Sequence[AnyArray], b: Sequence[AnyArray], names: Sequence[str]
) -> tuple[AnyArray, ...]:
    """Two lists of counts together: norms, and sums of the others."""
    found: list[AnyArray] = []
    for i, name in enumerate(names):
        if name == "amax":
            found.append(jnp.maximum(a[i], b[i]))
        elif name == "squares":
            largest = found[-1]
            x, y = (one[i] * _ratio(one[i - 1], largest) ** 2 for one in (a, b))
            found.append(x + y)
        else:
            found.append(a[i] + b[i])
    return tuple(found)


def _ratio(size: AnyArray, largest: AnyArray) -> AnyArray:
    """1 where both are equal, also of zeros and of infinities."""
    return jnp.where(size == largest, jnp.ones_like(size), size / largest)


def sampled(x: AnyArray, sample: int) -> AnyArray:
    """One row in so many, along the last axis but one, the rows of a product.

    So a batch, which is the first axis, may lie in parts on several devices.
    """
    if jnp.ndim(x) < 2 or x.shape[-2] < 2 * sample:
        return x
    return lax.slice_in_dim(x, 0, x.shape[-2], sample, axis=x.ndim - 2)


def joined(a: AnyArray, b: AnyArray) -> AnyArray:
    """The counts of two arrays together."""
    names = _names((a.shape[-1] - len(_COUNTS)) // len(_OF_A_FORMAT))
    of_a, of_b = (list(jnp.moveaxis(one, -1, 0)) for one in (a, b))
    return jnp.stack(_joined(of_a, of_b, names), -1)


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
    whole = rows.sum(0)
    for i, name in enumerate(names):
        if name == "amax":
            whole[i] = largest = rows[:, i].max()
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.where(rows[:, i] == largest, 1, rows[:, i] / largest)
            whole[i + 1] = rows[:, i + 1] @ ratios**2
    return whole


def _read(
    values: np.ndarray,
    *,
    layer: str,
    kind: Kind,
    dtype: str,
    formats: Sequence[AskedFormat],
) -> TensorStatistics:
    size, zeros, broken, amax, squares = map(float, values[: len(_COUNTS)])
    count = max(size, 1.0)
    others = max(size - zeros, 1.0)

    def read(number: int) -> FormatStatistics:
        start = len(_COUNTS) + number * len(_OF_A_FORMAT)
        end = start + len(_OF_A_FORMAT)
        *shares, largest, noise = map(float, values[start:end])
        snr = _snr(squares * amax**2, noise * largest**2)
        return FormatStatistics(*(share / others for share in shares), snr=snr)

    return TensorStatistics(
        layer,
        kind.value,
        dtype,
        int(size),
        amax,
        math.sqrt(squares / count) * amax,
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
