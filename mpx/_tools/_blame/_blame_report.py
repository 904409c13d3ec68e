"""The data of a report of `mpx.blame`, and the measures of an array it is made of."""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._base.dtypes import full_precision_of
from ..._base.typing import AnyArray, Aval, ScalarLike
from ..._settings import Candidate, Rule

# --- Badness and ranges of arrays, and a cure -----------------------------------------


def is_number(aval: object) -> bool:
    """Returns whether arrays of a type can hold NaN or infinity."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def badness_of(x: AnyArray, above: ScalarLike | None = None) -> Array:
    """Returns 2 if an array holds NaN, 1 if other bad values, else 0, as an int32.

    Args:
        x: The array.
        above: Values of larger magnitude count as bad, too; None for no limit.
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
            # Not `>`, which is false for NaN.
            is_bad = ~(jax.lax.abs(wide) <= limit)
        level = is_bad.astype(jnp.int32) + jax.lax.ne(part, part).astype(jnp.int32)
        # A maximum: XLA:CPU has no `or` of integers over devices (jaxlib 0.10.2,
        # 2026-11).
        axes = tuple(range(level.ndim))
        found = jnp.maximum(found, jax.lax.reduce_max(level, axes=axes))
    return found


def _parts(x: AnyArray) -> list[AnyArray]:
    """Returns an array as arrays of real numbers of more than 8 bits."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [x.real, x.imag]
    return [x.astype(jnp.float32) if x.dtype.itemsize < 2 else x]


def cured(x: AnyArray, switch: AnyArray, large: float) -> AnyArray:
    """Replaces bad values by finite ones if `switch` is on.

    NaN becomes 1 and infinity becomes `large` with its sign. The result is finite, not
    necessarily right.
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
    """The range of an array's numbers."""

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
    """Returns minimum, maximum, counts of NaN, infinity and zero, as float32."""
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

    # One pass: one operation to compile.
    def join(a: Sequence[AnyArray], b: Sequence[AnyArray]) -> tuple[AnyArray, ...]:
        sums = (x + y for x, y in zip(a[2:], b[2:], strict=True))
        return jax.lax.min(a[0], b[0]), jax.lax.max(a[1], b[1]), *sums

    first = (jnp.float32(jnp.inf), jnp.float32(-jnp.inf), *(jnp.float32(0),) * 3)
    return jnp.stack(jax.lax.reduce(columns, first, join, tuple(range(wide.ndim))))


def range_of(aval: Aval, numbers: np.ndarray) -> Range:
    """Returns the range of an array, from its type and what `measured` returned."""
    least, largest, *counts = (float(x) for x in numbers)
    size = max(1, int(np.prod(aval.shape)))
    nans, infinities, zeros = (count / size for count in counts)
    if least > largest:
        least = largest = float("nan")
    amax = max(abs(least), abs(largest))
    kind = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    return Range(kind, least, largest, amax, nans, infinities, zeros)


# --- The report -----------------------------------------------------------------------


class Verdict(enum.Enum):
    """The cause of a skipped step."""

    NOTHING = "nothing is bad"
    """The replay is finite."""
    SCALE = "scale"
    """At a loss scale of 1 the step is finite: the scale was too large."""
    PRECISION = "precision"
    """In float32 the step is finite."""
    DATA = "data or mathematics"
    """In float32 the step is non-finite, too."""


@dataclasses.dataclass(frozen=True)
class AtLine:
    """The condition `when` of a rule for the operations of one line."""

    line: str

    def __call__(self, operation: Candidate) -> bool:
        """Returns whether an operation comes from the line."""
        return operation.line.endswith(self.line)

    def __str__(self) -> str:
        """Returns the condition as code."""
        return f'lambda operation: operation.line.endswith("{self.line}")'


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A value that went bad and reached the result, with its operation."""

    primitive: str
    """The operation as it was written: `dot_general`, or `input` or `constant`."""
    computed: str
    """The operation whose result is bad: the same, or a cast inserted for it."""
    kind: str
    """`nan`, `inf` or `nan and inf`; `large` if `above` is set."""
    scope: str
    """The named scopes around it, as a path."""
    function: str
    """The functions of the user's code around it, as a path."""
    line: str
    """The line of the user's code: `model.py:41`."""
    code: str
    """The text of that line, if it can be read."""
    phase: str
    """`forward` if the loss depends on it, so that it also exists without a derivative;
    `recompute` if a checkpoint repeats such an operation; else `backward`."""
    gradient: str
    """In the backward pass, `wgrad` for the gradient of a weight, else `dgrad`."""
    parameters: tuple[str, ...]
    """The weights among its operands, or those whose gradient it is."""
    inside: tuple[str, ...]
    """The loops and calls around it, outermost first: `scan, iteration 3 of 12`."""
    devices: tuple[int, ...]
    """The devices of a `shard_map` on which it is bad; empty outside of one."""
    operands: tuple[Range, ...]
    """The ranges of its operands."""
    results: tuple[Range, ...]
    """The ranges of its results."""
    reason: str
    """The cause as text."""
    made_by: str
    """The operation that made what this one cannot take: a number that overflows a
    format, a rounded zero, the infinity of a mask; else ""."""
    made_at: str
    """The line of that operation."""

    @property
    def direction(self) -> str:
        """`forward`, `backward (wgrad)`, `backward (dgrad)` or `recompute`."""
        return f"{self.phase} ({self.gradient})" if self.gradient else self.phase


@dataclasses.dataclass(frozen=True)
class Content:
    """The data of a report; `BlameReport` adds the views."""

    name: str
    """The name of the function."""
    verdict: Verdict
    """The cause of the skipped step."""
    places: tuple[str, ...]
    """The non-finite results of the step: `the loss`, paths of gradients."""
    culprits: tuple[Culprit, ...]
    """The first bad values: the earliest first, then others independent of it."""
    loss_scale: float
    """The loss scale of the replay."""
    rule: Rule | None
    """The rule of the fewest FLOPs that fixes it, if the verdict is `precision` and one
    for a part of the function was found."""
    rows: tuple[int, ...]
    """The rows of the batch that cause it, each alone, if the verdict is `data`."""
    advice: str
    """The advice as text."""
    untried_rows: int = 0
    """The number of rows not tried, because 200 runs were used up."""
