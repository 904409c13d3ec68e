"""The result of `mpx.compare`, as data and as a table; and claims about it."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._base.errors import describe
from ..._base.typing import AnyArray
from .._expect import ContractError, Violation
from .._report_files import aligned, cut, widths_of

# --- Closeness of two arrays: signal to noise, and cosine -----------------------------

# unsure: half of float32's 140 dB, less a margin; not calibrated on models
NOISE = 60.0
"""In dB. Float32 has seven digits, 140 dB. Of a value that loses more than half of them
when it is summed in another order, another precision says nothing."""


class Sums(NamedTuple):
    """Sums over a pair of arrays, one for each iteration of the loops around them.

    Values are divided by the largest magnitude of the first array, whose square float32
    might not hold.
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
    """Returns the sums over a pair of arrays, except over the first axes.

    Values that are infinite in both, such as a mask, are excluded.
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
    """Returns the signal to noise in dB."""
    signal, noise, broken = (np.asarray(x, np.float64) for x in (*sums[:2], sums[4]))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 10 * np.log10(signal / noise)
    found = np.where(noise == 0, np.inf, found)
    return np.where(broken > 0, -np.inf, found)


def cosine_of(sums: Sums) -> np.ndarray:
    """Returns the cosine of the angle between two arrays."""
    signal, other, product = (
        np.asarray(x, np.float64) for x in (sums.signal, sums.other, sums.product)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.clip(product / np.sqrt(signal * other), -1, 1)
    return np.where(np.asarray(sums.broken) > 0, np.nan, found)


def closeness(
    name: str, kind: str, pairs: Sequence[Sums], turn: tuple[int, ...], **place: str
) -> Closeness:
    """Computes closeness from the sums of the functions and, if any, of the floor."""
    here, *floors = (Sums(*(np.asarray(x)[turn] for x in pair)) for pair in pairs)
    lowest = float(snr_of(floors[0])) if floors else None
    snr, cosine = float(snr_of(here)), float(cosine_of(here))
    return Closeness(name, kind, snr, cosine, lowest, **place)


def divergence(
    a: Float[AnyArray, "... vocabulary"], b: Float[AnyArray, "... vocabulary"]
) -> Float[Array, "..."]:
    """Returns the KL divergence of each row of logits from that of the reference.

    `mpx.compare` has the equation. Close distributions are summed as
    $p (e^{-d} - 1 + d)$, where d is the difference of their logarithms: about
    $p d^2 / 2$, while the terms $p d$ cancel.
    """
    wide = a.dtype if a.dtype == jnp.float64 else jnp.float32
    log_p, log_q = (jax.nn.log_softmax(x.astype(wide)) for x in (a, b))
    p, q, d = jnp.exp(log_p), jnp.exp(log_q), log_p - log_q
    # The products with p = 0 would be NaN.
    weighted = jnp.where(jnp.isposinf(d), d, p * d)
    far = q - p + jnp.where(jnp.isneginf(log_p), jnp.zeros_like(p), weighted)
    near = p * (jnp.expm1(-d) + d)
    return jnp.sum(jnp.where(jnp.abs(d) < 1, near, far), axis=-1)


def decibels(snr: float | None) -> str:
    """Returns text such as `48.1`; `equal` without noise, `broken` if non-finite."""
    if snr is None:
        return ""
    if math.isinf(snr):
        return "equal" if snr > 0 else "broken"
    return f"{snr:.1f}"


# --- A table whose first column shrinks to fit ----------------------------------------


def table(
    rows: Sequence[Sequence[str]], width: int, least: int, *, ends_with_text: bool
) -> list[str]:
    """Returns the lines of a table, with numbers aligned to the right.

    Args:
        rows: The cells, the head first; each row has the same number.
        width: The largest width of a line.
        least: The smallest width of the first column, if its text needs it.
        ends_with_text: Whether the last column is text, and not a number.
    """
    first, *others = widths_of(rows)
    room = max(width - sum(others) - 2 * len(others), least)
    short = [(cut(x, min(first, room), False, "…"), *cells) for x, *cells in rows]
    texts = (0, len(others)) if ends_with_text else (0,)
    return [line[:width] for line in aligned(short, texts)]


def numbered(names: Iterable[tuple[str, object]]) -> list[str]:
    """Returns names, with numbers added to those that repeat in the same kind."""
    seen: Counter[tuple[str, object]] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name[0] + (f" #{seen[name]}" if seen[name] > 1 else ""))
    return found


# --- The report of a comparison -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two precisions on the same data, as `mpx.compare` returns it.

    Attributes:
        reference: The name of the reference function.
        name: The name of the other function.
        losses: The two losses; empty if the functions return logits.
        activations: One for each layer that both programs have, and each iteration of a
            loop over layers, in program order.
        gradients: One for each leaf of the gradient; empty for logits.
        kl: The KL divergence of each token from the reference in nats,
            float32 of the shape of the logits without the last axis; None without
            logits. `kl.mean()`, `kl.max()`.
    """

    reference: str
    name: str
    losses: tuple[float, ...]
    activations: tuple[Closeness, ...]
    gradients: tuple[Closeness, ...]
    kl: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[Closeness]:
        return iter((*self.activations, *self.gradients))

    @property
    def floor(self) -> float | None:
        """The noise floor of any precision, in dB; None if not requested.

        The lowest signal to noise of the reference against itself with its sums in
        reverse order, over all that is not noise.
        """
        floors = (x.floor for x in self if not x.is_noise)
        return min((x for x in floors if x is not None), default=None)

    def worst(self, count: int = 5) -> tuple[Closeness, ...]:
        """Returns layers and gradients of lowest signal to noise, lowest first.

        Noise in the reference itself is omitted.

        Args:
            count: The number of layers and gradients.
        """
        some = (x for x in self if not x.is_noise)
        return tuple(sorted(some, key=lambda x: x.snr)[:count])

    def records(self) -> dict[str, float]:
        """Returns numbers by name for a logger: `gradient/blocks[0].fc1.weight/snr`."""
        found: dict[str, float] = {}
        if self.losses:
            found = {"loss/reference": self.losses[0], "loss/compared": self.losses[1]}
        if self.kl is not None:
            found |= {"kl/mean": float(self.kl.mean()), "kl/max": float(self.kl.max())}
        for each in self:
            found[f"{each.kind}/{each.name}/snr"] = each.snr
            found[f"{each.kind}/{each.name}/cosine"] = each.cosine
        return found

    def text(self, width: int = 100) -> str:
        """Returns the table, at most `width` columns wide."""
        lines = [f"{self.name} against {self.reference}"[:width]]
        if self.losses:
            a, b = self.losses
            lines.append(f"loss {b:.6g} against {a:.6g}")
        if self.kl is not None:
            mean, most = self.kl.mean(), self.kl.max()
            lines.append(f"KL per token: mean {mean:.3g}, max {most:.3g} nats")
        if self.floor is not None:
            floor = decibels(self.floor)
            lines.append(f"floor {floor} dB: the reference with sums in reverse order")
        for kind, some in (
            ("activation", self.activations),
            ("gradient", self.gradients),
        ):
            if some or self.losses:
                lines += ["", *_table(kind, some, width)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


_NUMBERS = ("SNR dB", "cosine", "floor dB")


def _table(kind: str, some: Sequence[Closeness], width: int) -> list[str]:
    rows: list[tuple[str, ...]] = [
        (kind, *_NUMBERS, "line" if kind == "activation" else "")
    ]
    for x in some:
        snr = "noise" if x.is_noise else decibels(x.snr)
        numbers = (snr, f"{x.cosine:.6f}", decibels(x.floor))
        rows.append((x.name, *numbers, x.source))
    return table(rows, width, least=12, ends_with_text=True)


def expect_close(
    comparison: Comparison,
    *,
    activation_snr: float | None = None,
    gradient_snr: float | None = None,
    gradient_cosine: float | None = None,
    except_in: str | Sequence[str] = (),
) -> None:
    """Raises an error unless two precisions of a loss are as close as claimed.

    Use it in tests: a change that loses precision in a layer fails there, and not in a
    run. bfloat16 gives 30 to 50 dB, float16 about 18 dB more, FP8 15 to 25 dB. Set
    limits a few dB below what the model has today.

    Args:
        comparison: The result of `mpx.compare(...)(...)`.
        activation_snr: The least signal to noise of an activation, in dB.
        gradient_snr: The least signal to noise of a leaf of the gradient, in dB.
        gradient_cosine: The least cosine of a leaf of the gradient.
        except_in: Ignores layers and gradients with these names or prefixes: `"head"`,
            `"blocks[0].norm"`.

    Raises:
        ContractError: A claim is not met. The message names the layers, the worst
            first, with their numbers and lines.
        TypeError: `comparison` is not a `mpx.reports.Comparison`, or a limit is not a
            number.
        ValueError: There is no claim.

    A layer with values that are finite in only one precision fails every claim on it.
    Noise in the reference itself (`Closeness.is_noise`) is ignored. A leaf whose
    gradient is zero in the reference has no cosine, and fails no claim on it.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> w, x = jnp.ones((8, 4)) / 3, jnp.ones((2, 8)) / 7
        >>> found = mpx.compare(loss, mpx.autocast(loss))(w, x)
        >>> mpx.expect_close(found, gradient_snr=30.0, gradient_cosine=0.999)
        >>> try:
        ...     mpx.expect_close(found, gradient_snr=90.0)
        ... except mpx.reports.ContractError as error:
        ...     print(error.violations[0].claim)
        gradient_snr
    """
    call = "`mpx.expect_close`"
    if not isinstance(comparison, Comparison):
        raise TypeError(
            f"{call} needs the result of `mpx.compare(reference, func)(*args)`; got "
            f"{describe(comparison)}."
        )
    claims = {
        "activation_snr": activation_snr,
        "gradient_snr": gradient_snr,
        "gradient_cosine": gradient_cosine,
    }
    for name, limit in claims.items():
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and (not is_number or math.isnan(limit)):
            raise TypeError(
                f"`{name}` of {call} must be a number; got {describe(limit)}."
            )
    limits = {name: limit for name, limit in claims.items() if limit is not None}
    if not limits:
        raise ValueError(
            f"{call} needs at least one claim; got none. Pass one, for example "
            "`gradient_snr=30.0`."
        )
    prefixes = (except_in,) if isinstance(except_in, str) else tuple(except_in)
    kept = [x for x in comparison if not (x.is_noise or x.name.startswith(prefixes))]
    found = (_violation(name, limit, kept) for name, limit in limits.items())
    violations = [each for each in found if each is not None]
    if violations:
        raise ContractError(violations, len(limits))


_MEASURES: dict[str, tuple[str, Callable[[Closeness], float], str]] = {
    "activation_snr": ("activation", lambda x: x.snr, " dB"),
    "gradient_snr": ("gradient", lambda x: x.snr, " dB"),
    "gradient_cosine": ("gradient", lambda x: x.cosine, ""),
}


def _violation(claim: str, limit: float, some: Iterable[Closeness]) -> Violation | None:
    kind, measure, unit = _MEASURES[claim]
    looked_at = [x for x in some if x.kind == kind]
    if not looked_at:
        return Violation(claim, f"both programs have no {kind} in common.")
    below = (x for x in looked_at if measure(x) < limit or x.snr == -math.inf)
    wrong = sorted(below, key=lambda x: x.snr)
    if not wrong:
        return None
    found = (
        f"at least {limit!r}{unit} expected; {len(wrong)} of {len(looked_at)} "
        f"{kind}s have less:"
    )
    return Violation(claim, found, tuple(wrong))
