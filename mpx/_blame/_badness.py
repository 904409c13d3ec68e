"""What is bad about an array, what numbers it holds, and a cure to try."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._dtypes import full_precision_of
from .._typing import AnyArray, Aval, ScalarLike


def is_number(aval: object) -> bool:
    """Whether arrays of a type can hold what is bad."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def badness_of(x: AnyArray, above: ScalarLike | None = None) -> Array:
    """2 if an array holds NaN, 1 if anything else that is bad, 0 if not, as an int32.

    Args:
        x: The array.
        above: Numbers of larger magnitude are bad, too; None for none.
    """
    if not is_number(jax.typeof(x)) or not x.size:
        return jnp.zeros((), jnp.int32)
    found = jnp.zeros((), jnp.int32)
    for part in _parts(x):
        if above is None:
            is_bad = ~jax.lax.is_finite(part)
        else:
            wide = part.astype(full_precision_of(part.dtype))
            limit = jnp.broadcast_to(jnp.asarray(above, wide.dtype), wide.shape)
            # Not `>`, of which NaN is false.
            is_bad = ~(jax.lax.abs(wide) <= limit)
        level = is_bad.astype(jnp.int32) + jax.lax.ne(part, part).astype(jnp.int32)
        # A maximum: XLA:CPU has no `or` of integers over devices (jaxlib 0.10.2,
        # 2026-11).
        axes = tuple(range(level.ndim))
        found = jnp.maximum(found, jax.lax.reduce_max(level, axes=axes))
    return found


def _parts(x: AnyArray) -> list[AnyArray]:
    """An array as arrays of real numbers of more than 8 bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [x.real, x.imag]
    return [x.astype(jnp.float32) if x.dtype.itemsize < 2 else x]


def cured(x: AnyArray, switch: AnyArray, large: float) -> AnyArray:
    """An array with finite numbers in place of bad ones, where a switch is on.

    NaN becomes 1 and infinity `large` with its sign, so that what depends on them is
    finite. It need not be right.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real, imag = (cured(part, switch, large) for part in (x.real, x.imag))
        return jax.lax.complex(real, imag)
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 2 else x
    one, most = jnp.ones_like(wide), jnp.full_like(wide, large)
    ends = jax.lax.select(wide > 0, most, -most)
    good = jax.lax.select(jax.lax.ne(wide, wide), one, ends)
    is_bad = ~jax.lax.is_finite(wide) & switch
    return jax.lax.select(is_bad, good, wide).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Range:
    """What numbers an array held."""

    type: str
    """Its type: `float16[8,16]`."""
    least: float
    """The smallest finite value."""
    largest: float
    """The largest finite value."""
    amax: float
    """The largest finite magnitude."""
    nans: float
    """The share of NaN, 0 to 1."""
    infinities: float
    """The share of infinities, 0 to 1."""
    zeros: float
    """The share of zeros, 0 to 1."""

    @property
    def bad(self) -> float:
        """The share of numbers that are NaN or infinite, 0 to 1."""
        return self.nans + self.infinities


MEASURED = 5
"""How many numbers `measured` gives."""


def measured(x: AnyArray) -> Array:
    """Minimum, maximum, and the counts of NaN, infinity and zero, as float32."""
    if not x.size:
        return jnp.zeros((MEASURED,), jnp.float32)
    wide = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    wide = wide.astype(jnp.float32)
    is_good = jax.lax.is_finite(wide)
    inf, one, zero = (jnp.full_like(wide, n) for n in (jnp.inf, 1.0, 0.0))
    is_nan = jax.lax.ne(wide, wide)
    columns = (
        jax.lax.select(is_good, wide, inf),
        jax.lax.select(is_good, wide, -inf),
        jax.lax.select(is_nan, one, zero),
        jax.lax.select(is_good | is_nan, zero, one),
        jax.lax.select(jax.lax.eq(wide, zero), one, zero),
    )

    # One pass, which is one operation to compile.
    def join(a: Sequence[AnyArray], b: Sequence[AnyArray]) -> tuple[AnyArray, ...]:
        sums = (x + y for x, y in zip(a[2:], b[2:], strict=True))
        return jax.lax.min(a[0], b[0]), jax.lax.max(a[1], b[1]), *sums

    first = (jnp.float32(jnp.inf), jnp.float32(-jnp.inf), *(jnp.float32(0),) * 3)
    found = jax.lax.reduce(columns, first, join, tuple(range(wide.ndim)))
    return jnp.stack(found)


def range_of(aval: Aval, numbers: np.ndarray) -> Range:
    """The range of an array of a type that `measured` looked at."""
    least, largest, *counts = (float(x) for x in numbers)
    size = max(1, int(np.prod(aval.shape)))
    nans, infinities, zeros = (count / size for count in counts)
    if least > largest:
        least = largest = float("nan")
    amax = max(abs(least), abs(largest))
    kind = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    return Range(kind, least, largest, amax, nans, infinities, zeros)
