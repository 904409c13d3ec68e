"""Draws one equation's way: `python docs/hooks/internals.py` writes the picture."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

mpl.use("Agg")

PICTURE = Path(__file__).parents[1] / "pictures" / "internals.png"
WIDTH, HEIGHT, GAP = 2.35, 1.0, 0.45

# Name, what happens, where. Steps 3 to 6 are done again for each program within.
STEPS = (
    ("1  call", "options, context\nbecome settings", "_transform  _settings"),
    ("2  program", "trees apart,\ntraced as written", "_program/calls"),
    ("3  analyse", "demand, reach,\nislands", "_demand  _program/flow"),
    ("4  decide", "rule, class,\noperands, demand", "_decide  _products"),
    ("5  emit", "cast operands,\nbind again", "_emit  _quantize"),
    ("6  rematerialize", "islands computed\nagain", "_rematerialize"),
    ("7  back", "declared dtypes,\nautodiff", "_call"),
    ("8  report", "notes, FLOPs,\nbytes", "_notes  _inspect"),
)
BLUE, GREY, INK = "#2a6f97", "#e9eef2", "#22313a"


def place(number: int) -> tuple[float, float]:
    """The lower left corner of a box: two rows of four, the second one back."""
    row, column = divmod(number, 4)
    column = column if row == 0 else 3 - column
    return column * (WIDTH + GAP), -row * (HEIGHT + 2 * GAP)


def box(axes: Any, number: int, name: str, what: str, where: str) -> None:
    """One step."""
    x, y = place(number)
    axes.add_patch(
        FancyBboxPatch(
            (x, y), WIDTH, HEIGHT, "round,pad=0.05", fc=GREY, ec=BLUE, lw=1.2
        )
    )
    middle = x + WIDTH / 2
    style = {"ha": "center", "va": "center", "color": INK}
    axes.text(middle, y + 0.84, name, fontsize=10, fontweight="bold", **style)
    axes.text(middle, y + 0.48, what, fontsize=8.5, **style)
    axes.text(middle, y + 0.10, where, fontsize=7.5, family="monospace", **style)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """From one step to the next."""
    style = {"arrowstyle": "-|>", "color": BLUE, "lw": 1.4}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def draw() -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(10.4, 3.4), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1))
    for number, step in enumerate(STEPS):
        box(axes, number, *step)
    for number in range(len(STEPS) - 1):
        (x, y), (next_x, next_y) = place(number), place(number + 1)
        if y == next_y and next_x > x:
            arrow(axes, (x + WIDTH + 0.06, y + 0.5), (next_x - 0.06, next_y + 0.5))
        elif y == next_y:
            arrow(axes, (x - 0.06, y + 0.5), (next_x + WIDTH + 0.06, next_y + 0.5))
        else:
            middle = x + WIDTH / 2
            arrow(axes, (middle, y - 0.06), (middle, next_y + HEIGHT + 0.06))
    axes.text(
        place(2)[0] + WIDTH + GAP / 2,
        -GAP,
        "again for each program within  ",
        fontsize=8,
        ha="center",
        va="center",
        color=BLUE,
        style="italic",
    )
    axes.set_xlim(-0.2, 4 * WIDTH + 3 * GAP + 0.2)
    axes.set_ylim(-HEIGHT - GAP - 0.75, HEIGHT + 0.25)
    axes.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE)
