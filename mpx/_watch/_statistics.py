"""What `mpx.monitor` counts: of each operand of a product, in each format asked for."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._quantize import Role
from .._typing import AnyArray
from ._formats import AskedFormat

# A vector of counts: of all numbers first, then of each format. float32 holds squares
# of 1e-19 to 1e19 only. So those of large and of small numbers are summed apart, each
# brought nearer to 1 before: 1e-34 to 1e34 in one pass (J. L. Blue, "A portable Fortran
# program to find the Euclidean norm of a vector", 1978). A unit found before, of a few
# rows, moves 3 % of a step less, and misses what they lack.
_COUNTS = ("amax", "size", "zeros", "broken", "large", "small")
_OF_A_FORMAT = ("above", "below", "flushed", "large", "small")
_SHRUNK, _GROWN = 2.0**-50, 2.0**50


def counts(
    x: Array, kind: Role, axis: int, formats: Sequence[AskedFormat]
) -> Float[Array, " n"]:
    """The counts of an array, to be joined with those of others by `joined`."""
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
    """The squares of large numbers, and of small ones, where float32 holds them."""
    is_large, none = size >= 1, jnp.zeros_like(size)
    large = jnp.where(is_large, size * _SHRUNK, none)
    return large * large, jnp.square(jnp.where(is_large, none, size * _GROWN))


def _reduced(arrays: Sequence[Array]) -> list[Array]:
    """The maximum of the first array, and the sums of the others.

    By one reduction: of several, XLA (jaxlib 0.10.2, November 2026) makes a pass over
    the operand for each (a ViT compiled for an H100).
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
    """Reads counts, stacked by turns or not; None of an operand that was not met."""
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
    """The sum of squares, which float64 holds."""
    return large / _SHRUNK**2 + small / _GROWN**2


def _snr(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if not signal or not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)
