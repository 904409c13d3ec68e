"""The statistics of a run over time as a picture: layers by steps."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._errors import describe, listing
from ._report import Statistics
from ._statistics import TensorStatistics

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
    """The rows of a kind by layer; a turn of a loop over stacked weights is one.

    Not so a turn of other loops: over time, or over micro-batches.
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
    numbers: np.ndarray,
    layers: list[str],
    steps: list[int],
    title: str,
    is_share: bool,
) -> Any:
    # Not pyplot, which keeps every figure and wants a display.
    from matplotlib.figure import Figure

    height = 1.2 + 0.22 * len(layers)
    figure = Figure(figsize=(8, height), layout="constrained")
    # Of equal numbers matplotlib would make a range around them, below 0, too.
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
