"""The statistics of a step as a table, records, advice, and a picture over time."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._base.errors import describe, listing
from ..._loss_scaling import AbstractLossScaling
from ._comparison import decibels, table
from ._statistics import TensorStatistics

# The limits of a layer that tolerates a format. E4M3 keeps 31 dB of normal numbers,
# E5M2 25 dB, E2M1 in blocks 20 dB (uniform rounding of their mantissas).
# unsure: 18 dB is below every format's own noise; no training shows that such a layer
# learns as well
LEAST_SNR = 18.0
MOST_FLUSHED = 0.01
# Within a factor of this of the largest number, the next step may overflow.
NEAR = 4.0


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the matmul operands of a step, as `mpx.monitor` returns them.

    Attributes:
        rows: One for each operand of a matmul or convolution, in program order.
        bits: The requested formats, with the number of bits of each.
        recipe_amaxes: The newest amaxes of a recipe by slot: input, weight and
            gradient, if the step's result contains the recipe's state. Nothing is
            computed for them.
        uncounted: Operands without a row: a recipe quantized them outside of the
            `shard_map` that multiplies them.
    """

    rows: tuple[TensorStatistics, ...]
    bits: Mapping[str, int]
    recipe_amaxes: Mapping[str, tuple[float, float, float]]
    uncounted: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[TensorStatistics],
        bits: Mapping[str, int],
        result: PyTree,
        uncounted: tuple[str, ...] = (),
    ) -> Self:
        """Creates statistics from rows and the result of the step."""
        return cls(tuple(rows), bits, recipe_amaxes(result), uncounted)

    def __getitem__(self, name: str) -> TensorStatistics:
        """Returns the row of this name, such as `blocks[0].fc1.weight/input`."""
        return next(row for row in self.rows if row.name == name)

    def records(self) -> dict[str, float]:
        """Returns numbers by name for a logger: `fc1.weight/input/float16/flushed`."""
        found = {name: x for row in self.rows for name, x in row.records()}
        for slot, amaxes in self.recipe_amaxes.items():
            for kind, amax in zip(("input", "weight", "gradient"), amaxes, strict=True):
                found[f"recipe/{slot}/{kind}/amax"] = amax
        return found

    def text(self, width: int = 100) -> str:
        """Returns the table and the advice, at most `width` columns wide."""
        return "\n".join([*self._table(width), "", *_wrapped(self.advice(), width)])

    def __str__(self) -> str:
        return self.text()

    def advice(self) -> tuple[str, ...]:
        """Returns which layers tolerate a lower precision, and which need a higher one.

        A layer tolerates a format if each of its operands keeps 18 dB, with at most 1%
        of its values flushed to zero and none beyond the range. Layers that compute in
        that format already, or in fewer bits, are not counted. A layer needs a higher
        precision if its operands are NaN or infinite, are within a factor of 4 of the
        largest number of their dtype, or a tenth of them is subnormal in it.
        """
        by_layer: dict[str, list[TensorStatistics]] = {}
        for row in self.rows:
            by_layer.setdefault(row.layer, []).append(row)
        whole = {x: rows for x, rows in by_layer.items() if _has_weight(rows)}
        lines = [
            f"{_readable(layer)} needs a higher precision: {reason}"
            for layer, rows in by_layer.items()
            if (reason := _why_higher(rows))
        ]
        if self.uncounted:
            names = ", ".join(map(_readable, self.uncounted))
            lines.append(f"not counted, as they are in sight quantized only: {names}")
        for name, bits in sorted(self.bits.items(), key=lambda item: item[1]):
            asked = {x: rows for x, rows in whole.items() if _may_get(rows, name, bits)}
            bear = [x for x, rows in asked.items() if not _why_not(rows, name)]
            if bear:
                count = len(whole) - len(asked)
                others = f"; {count} compute in it or in fewer bits" if count else ""
                text = f"{name}: {len(bear)} of {len(asked)} layers tolerate it{others}"
                lines.append(text)
            lines += [
                f"{name} is too little for {_readable(layer)}: {_why_not(rows, name)}"
                for layer, rows in asked.items()
                if layer not in bear
            ]
        return tuple(lines)

    def _table(self, width: int) -> list[str]:
        names = list(self.bits)
        head = ["operand", "amax"]
        for name in names:
            head += [_short(name), "flush", "out"]
        rows = [head]
        for row in self.rows:
            cells = [_readable(row.name), f"{row.amax:.3g}"]
            for name in names:
                found = row.formats[name]
                share = found.flushed, found.above
                cells += [decibels(found.snr), *map(_percent, share)]
            rows.append(cells)
        return table(rows, width, least=16, ends_with_text=False)


def recipe_amaxes(tree: PyTree) -> dict[str, tuple[float, float, float]]:
    """Returns the newest amaxes of recipes in a tree by slot, iterations joined."""
    is_scaling = lambda node: isinstance(node, AbstractLossScaling)  # noqa: E731
    found: dict[str, tuple[float, float, float]] = {}
    for node in jax.tree.leaves(tree, is_leaf=is_scaling):
        known = node.amaxes_by_weight() if is_scaling(node) else {}
        for slot, amaxes in known.items():
            rows = np.asarray(amaxes, np.float64).reshape(-1, 3)
            a, b, c = map(float, rows.max(axis=0))
            found[slot] = (a, b, c)
    return found


def _has_weight(rows: Sequence[TensorStatistics]) -> bool:
    return any(row.kind == "weight" for row in rows)


def _may_get(rows: Sequence[TensorStatistics], name: str, bits: int) -> bool:
    """Returns whether a format differs from a layer's and has no more bits."""
    dtypes = {row.dtype for row in rows if row.kind != "weight"}
    dtypes = dtypes or {row.dtype for row in rows}
    present = max(jnp.finfo(dtype).bits for dtype in dtypes)
    # float16 may be requested for a layer in bfloat16, which has as many bits.
    return present > bits or (present == bits == 16 and dtypes != {name})


def _why_not(rows: Sequence[TensorStatistics], name: str) -> str:
    reasons = []
    for row in rows:
        found = row.formats[name]
        if found.above > 0:
            reasons.append(f"{_percent(found.above)} of its {row.kind}s are beyond it")
        elif found.flushed > MOST_FLUSHED:
            reasons.append(f"{_percent(found.flushed)} of its {row.kind}s become zero")
        elif found.snr < LEAST_SNR:
            reasons.append(f"its {row.kind}s keep {decibels(found.snr)} dB")
    return ", ".join(reasons)


def _why_higher(rows: Sequence[TensorStatistics]) -> str:
    reasons = []
    for row in rows:
        largest = float(jnp.finfo(row.dtype).max)
        below = row.formats[row.dtype].below if row.dtype in row.formats else 0.0
        if row.broken:
            reasons.append(f"{row.broken:,} of its {row.kind}s are NaN or infinite")
        elif row.amax * NEAR >= largest:
            reasons.append(f"{row.kind}s up to {row.amax:.3g} are near the largest")
        elif below > 0.1:
            share = _percent(below)
            reasons.append(f"{share} of its {row.kind}s are subnormal in {row.dtype}")
    return ", ".join(reasons)


def _percent(share: float) -> str:
    if share == 0:
        return "0 %"
    return "<0.1 %" if share < 0.001 else f"{100 * share:.1f} %"


_SHORT = (("Float8", "FP8 "), ("BlockScaling", " block"), ("Scaling", ""))


def _short(name: str) -> str:
    """Returns the head of a column."""
    short = name.replace("float8_", "").replace("Quantizer", "")
    for long, text in _SHORT:
        short = short.replace(long, text)
    return short.strip()


def _readable(path: str) -> str:
    """Returns a path in readable form, `blocks.0.fc1/input`, without quotes."""
    # An NNX state's array is the `.value` of a variable, which has the name.
    whole = re.sub(r"(?<='\])\.value(?=/| #|$)", "", path)
    return re.sub(r"\['([^']*)'\]", r".\1", whole).lstrip(".")


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, width, subsequent_indent="  ")
    ]


# --- Statistics over time: layers by steps --------------------------------------------

_WHOLE = ("amax", "rms", "zeros")
_OF_FORMAT = ("snr", "flushed", "above", "below")
_LOGARITHMIC = ("amax", "rms")


def heat_map(
    history: Mapping[int, Statistics],
    measure: str = "amax",
    format: str | None = None,
    *,
    kind: str = "gradient",
) -> Any:
    """Draws a picture of a run: a row for each layer, a column for each monitored step.

    Layers that a scan runs, one per iteration, have a row each: `blocks iteration 3`.

    Args:
        history: The statistics from `mpx.monitor`, by the number of the step.
        measure: "amax" or "rms", as a power of two; "zeros"; or, in a format, "snr",
            "flushed", "above", "below".
        format: The format of the measure, by its name: "float16".
        kind: The operands: "input", "weight" or "gradient".

    Returns:
        A `matplotlib` figure; save it with `figure.savefig("amax.png")`.

    Raises:
        TypeError: `history` is not a mapping, or contains anything but statistics.
        ValueError: There is nothing to show, or the measure, kind or format is unknown.
        ModuleNotFoundError: matplotlib is not installed.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
        >>> history = {}
        >>> for step in range(3):
        ...     _, history[step] = mpx.monitor(jnp.dot, weights=1)(x * 2.0**step, w)
        >>> figure = mpx.reports.heat_map(history, kind="input")
    """
    values = list(history.values()) if isinstance(history, Mapping) else [history]
    others = [seen for seen in values if not isinstance(seen, Statistics)]
    if others or not isinstance(history, Mapping):
        raise TypeError(
            "`history` of `mpx.reports.heat_map` must map step numbers to "
            f"statistics; got {describe([*others, history][0])}. Keep the second "
            "result of `mpx.monitor`: `result, history[step] = watch(*args)`."
        )
    is_format = measure in _OF_FORMAT
    if not is_format and measure not in _WHOLE:
        raise ValueError(
            "`measure` of `mpx.reports.heat_map` must be one of "
            f"{listing((*_WHOLE, *_OF_FORMAT))}; got {describe(measure)}."
        )
    steps = sorted(history)
    formats = {name for seen in history.values() for name in seen.bits}
    if is_format and format not in formats:
        raise ValueError(
            "`format` of `mpx.reports.heat_map` must be a counted one, "
            f"{listing(sorted(formats)) or 'none'}; got {describe(format)}."
        )
    rows = [dict(_by_layer(history[s], kind)) for s in steps]
    layers = list(dict.fromkeys(layer for some in rows for layer in some))
    if not layers:
        raise ValueError(
            "`mpx.reports.heat_map` needs statistics of a step, with operands of the "
            f"kind 'input', 'weight' or 'gradient'; got {len(steps)} steps without one "
            f"of the kind {kind!r}."
        )

    def value(row: TensorStatistics) -> float:
        number = getattr(row.formats[format] if format and is_format else row, measure)
        if measure not in _LOGARITHMIC:
            return number
        return math.log2(number) if number > 0 else math.nan

    numbers = np.full((len(layers), len(steps)), np.nan)
    for column, some in enumerate(rows):
        for layer, row in some.items():
            numbers[layers.index(layer), column] = value(row)
    label = f"log2 of {measure}" if measure in _LOGARITHMIC else measure
    title = f"{kind}s: {label}" + (f" in {format}" if is_format else "")
    is_share = measure not in (*_LOGARITHMIC, "snr")
    return _drawn(numbers, layers, steps, title, is_share)


def _by_layer(seen: Statistics, kind: str) -> Iterator[tuple[str, TensorStatistics]]:
    """Yields rows of a kind by layer; each iteration over stacked weights is a layer.

    Iterations of other loops are not: over time, or over micro-batches.
    """
    stacked = {r.layer: len(r.turns) for r in seen.rows if r.kind == "weight"}
    for row in seen.rows:
        if row.kind != kind:
            continue
        if row.turns and len(row.turns) == stacked.get(row.layer.partition(" #")[0]):
            for number, turn in enumerate(row.turns):
                yield f"{row.layer} iteration {number}", turn
        else:
            yield row.layer, row


def _drawn(
    numbers: np.ndarray, layers: list[str], steps: list[int], title: str, is_share: bool
) -> Any:
    # Not pyplot, which keeps every figure and needs a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.22 * len(layers)), layout="constrained")
    # For equal values matplotlib would choose a range around them, also below 0.
    ends = (0, np.nanmax(numbers) or 1) if is_share else (None, None)
    axes = figure.subplots()
    image = axes.imshow(
        np.where(np.isfinite(numbers), numbers, np.nan),
        aspect="auto",
        interpolation="nearest",
        vmin=ends[0],
        vmax=ends[1],
    )
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).astype(int))
    axes.set_xticks(shown, [str(steps[i]) for i in shown])
    axes.set_xlabel("step")
    axes.set_title(title)
    figure.colorbar(image)
    return figure
