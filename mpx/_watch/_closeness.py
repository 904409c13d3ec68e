"""How close two arrays are: signal to noise, and the cosine of their angle."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._typing import AnyArray

NOISE = 60.0
"""In dB. Float32 has seven digits, 140 dB. Of a value that loses more than half of them
when it is summed in another order, another precision says nothing."""


class Sums(NamedTuple):
    """Sums over a pair of arrays, one for each turn of a loop that they come from.

    All are of the numbers divided by the largest magnitude of the first array, whose
    square float32 might not hold.
    """

    signal: Float[Array, "..."]
    """Of a squared."""
    noise: Float[Array, "..."]
    """Of a minus b, squared."""
    other: Float[Array, "..."]
    """Of b squared."""
    product: Float[Array, "..."]
    """Of a times b."""
    broken: Float[Array, "..."]
    """How many numbers are NaN or infinite in one of them and not equal in the other"""


def sums(a: AnyArray, b: AnyArray, axes: int = 0) -> Sums:
    """The sums over a pair of arrays, but for the first axes.

    A number that is infinite in both, such as a mask, is left out.
    """
    wide = jnp.promote_types(jnp.float32, a.dtype)
    a, b = a.astype(wide), b.astype(wide)
    over = tuple(range(axes, a.ndim))
    are_same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    is_fine = jnp.isfinite(a) & jnp.isfinite(b)
    broken = jnp.sum(~is_fine & ~are_same, axis=over).astype(jnp.float32)
    zero = jnp.zeros((), wide)
    a, b = jnp.where(is_fine, a, zero), jnp.where(is_fine, b, zero)
    noise = a - b  # before the division, which rounds
    unit = jnp.max(jnp.abs(a), axis=over, initial=0, keepdims=True)
    unit = jnp.where(unit == 0, jnp.ones((), unit.dtype), unit)

    def total(x: AnyArray, y: AnyArray) -> Array:
        return jnp.sum((x / unit * (y / unit).conj()).real, axis=over)

    return Sums(total(a, a), total(noise, noise), total(b, b), total(a, b), broken)


@dataclasses.dataclass(frozen=True)
class Closeness:
    """The closeness of an activation or a gradient to that of the reference.

    Attributes:
        name: The layer, `blocks[0].fc1`, or the path of the gradient; with the
            iteration of a loop, `blocks[3]`.
        kind: `activation` or `gradient`.
        snr: Signal to noise in dB, 10 log10 of the sum of squares of the reference over
            that of the difference. Infinite if they are equal, minus infinity if values
            are finite in only one of them, or the reference is zero.
        cosine: The cosine of the angle between the two; NaN if one of them is zero.
        floor: The signal to noise of the reference against itself with its sums in
            reverse order; None if not requested.
        where: For an activation, the scopes, or else the functions around it.
        source: For an activation, the line of the user's code.
    """

    name: str
    kind: str
    snr: float
    cosine: float
    floor: float | None = None
    where: str = ""
    source: str = ""

    @property
    def is_noise(self) -> bool:
        """Whether the reference itself is only rounding noise here, by its floor.

        This includes gradients that are zero in exact arithmetic, such as that of the
        key bias of softmax attention.
        """
        return self.floor is not None and self.floor < NOISE

    def __str__(self) -> str:
        at = f", {self.source}" if self.source else ""
        return f"{self.name}: {decibels(self.snr)} dB, cosine {self.cosine:.6f}{at}"


def snr_of(sums: Sums) -> np.ndarray:
    """Signal to noise in dB."""
    signal, noise, broken = (np.asarray(x, np.float64) for x in (*sums[:2], sums[4]))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 10 * np.log10(signal / noise)
    found = np.where(noise == 0, np.inf, found)
    return np.where(broken > 0, -np.inf, found)


def cosine_of(sums: Sums) -> np.ndarray:
    """The cosine of the angle between two arrays."""
    signal, other, product = (
        np.asarray(x, np.float64) for x in (sums.signal, sums.other, sums.product)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.clip(product / np.sqrt(signal * other), -1, 1)
    return np.where(np.asarray(sums.broken) > 0, np.nan, found)


def decibels(snr: float | None) -> str:
    """`48.1`; `equal` without noise."""
    if snr is None:
        return ""
    if math.isinf(snr):
        return "equal" if snr > 0 else "broken"
    return f"{snr:.1f}"
