"""The picture of a run: loss curves, and the loss scale with the skipped steps."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..precisions import Precision
from .display import Labels
from .folder import Row, RunFolder

# Where all three agree all three are seen: broad grey, blue on it, dashes on top.
# Colors of Okabe and Ito (2008), which stay apart for color-blind readers.
STYLES: dict[Precision, dict[str, Any]] = {
    "float32": {"color": "#BBBBBB", "linewidth": 6.0, "zorder": 2},
    "float16": {"color": "#0072B2", "linewidth": 2.2, "zorder": 3},
    "bfloat16": {"color": "#E69F00", "linewidth": 2.2, "zorder": 4, "dashes": (3, 2)},
    "delayed": {"color": "#009E73", "linewidth": 1.4, "zorder": 4},
    "current": {"color": "#D55E00", "linewidth": 1.4, "zorder": 4},
    "block": {"color": "#CC79A7", "linewidth": 1.4, "zorder": 4},
    "mxfp8": {"color": "#56B4E9", "linewidth": 1.4, "zorder": 4},
    "nvfp4": {"color": "#000000", "linewidth": 1.4, "zorder": 4},
}
SKIPPED = "#D32F2F"
INK, FAINT, GRID = "#222222", "#777777", "#EAEAEA"
LEGEND: dict[str, Any] = {"labelcolor": INK, "framealpha": 1, "edgecolor": "none"}
SMOOTHING = 40  # a window is this part of the run


def plot_run(folder: RunFolder, labels: Labels) -> None:
    """Draws the metrics of a run folder into its `curves.png`."""
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12, hspace=0.06)
    figure = Figure(figsize=(8.5, 7.5), layout=layout)
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for precision, rows in folder.history.items():
        result = folder.results.get(precision)
        label = precision
        if result:
            label += f"   {labels.legend(result)}"
        draw_loss(top, precision, rows, label)
        draw_scale(bottom, precision, rows)
    finish_loss(top, labels.title)
    finish_scale(bottom, folder.history)
    figure.savefig(folder.picture_path, dpi=160)


def draw_loss(axes: Axes, precision: Precision, rows: list[Row], label: str) -> None:
    """The loss of every step as dots, and a smooth line through them."""
    steps = np.array([row.step for row in rows])
    losses = np.array([row.loss for row in rows])
    style = STYLES[precision]
    axes.plot(
        steps,
        np.where(losses > 0, losses, np.nan),
        ".",
        color=style["color"],
        markersize=2.5,
        alpha=0.35,
        markeredgewidth=0,
        zorder=1,
    )
    window = max(1, len(rows) // SMOOTHING)
    axes.plot(steps, smooth(losses, window), label=label, **style)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a centered window that shrinks at both ends; NaN is left out."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    count = np.convolve(known.astype(float), kernel, mode="same")
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def draw_scale(axes: Axes, precision: Precision, rows: list[Row]) -> None:
    """The scale that each step was made with; a cross where it was skipped."""
    steps = np.array([row.step for row in rows])
    scales = np.array([row.loss_scale for row in rows])
    skipped = ~np.array([row.finite for row in rows], bool)
    if not skipped.any() and np.all(scales == 1):
        return
    style: dict[str, Any] = STYLES[precision] | {"linewidth": 1.8}
    axes.step(steps, scales, where="mid", label=precision, **style)
    if skipped.any():
        axes.plot(
            steps[skipped],
            scales[skipped],
            "x",
            color=SKIPPED,
            markersize=8,
            markeredgewidth=2.2,
            zorder=5,
            label=f"skipped, gradients not finite: {skipped.sum()}",
        )


def finish_loss(axes: Axes, title: str) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 20 * low:  # powers of ten alone would be one label, or none
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 6.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    style_axes(axes, f"{title}: training loss")
    axes.legend(loc="upper right", **LEGEND)


def finish_scale(axes: Axes, history: Mapping[Precision, list[Row]]) -> None:
    style_axes(axes, "Loss scale")
    axes.set_xlabel("step", color=FAINT)
    unscaled = [
        precision
        for precision, rows in history.items()
        if all(row.loss_scale == 1 for row in rows)
    ]
    if axes.lines:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(power_of_two))
        low, high = axes.get_ylim()
        axes.set_ylim(low / 2, high * 2)
        axes.legend(loc="lower right", **LEGEND)
    else:
        axes.set_yticks([])
    if unscaled:
        verb = "needs" if len(unscaled) == 1 else "need"
        *some, last = unscaled
        names = f"{', '.join(some)} and {last}" if some else last
        note = f"{names} {verb} none"
        axes.set_title(note, loc="right", color=FAINT, fontsize=10)


def power_of_two(value: float, _: int) -> str:
    """A tick label of the axis of scales."""
    return f"$2^{{{round(math.log2(value))}}}$"


def style_axes(axes: Axes, title: str) -> None:
    """The common look: light horizontal lines, no box, title on the left."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", length=0, colors=FAINT)
    axes.margins(x=0.01)
