"""The table and the picture of the first page: what one gains by which precision.

Nothing is computed here that is not in `benchmarks/results/`. A cell says where it is
from: `c` is counted in a program compiled for the GPU of its row, which nobody ran, and
`m` is measured.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from . import results
from .numerics import recipes
from .numerics.folds import mean_interval

LIGHT = {"text": "#1f2328", "face": "#ffffff", "grid": "#d0d7de", "other": "#8c959f"}
DARK = {"text": "#e6edf3", "face": "#0d1117", "grid": "#30363d", "other": "#6e7681"}
OURS = "#009e73"


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: an arm of the results, against the base of its part.

    Attributes:
        label: what the table calls it.
        short: what the picture calls it.
        arm: its name in the results.
        loss: the arm of `recipes` whose gap of the loss stands beside it.
    """

    label: str
    short: str
    arm: str
    loss: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is mpx's."""
        return self.short.startswith("mpx")


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows that have one base.

    Attributes:
        title: the step, the device, the base.
        source: the results.
        match: what the records of the part have in common.
        base: the arm of the base.
        rows: the others.
        by: what tells records apart: arms, or dtypes of weights.
    """

    title: str
    source: str
    match: dict[str, Any]
    base: str
    rows: tuple[Row, ...]
    by: str = "arm"


PARTS = (
    Part(
        "ViT of 12 blocks on an H100, against float32",
        "residuals",
        {"target": "h100", "model": "desktop", "blocks": 12},
        "float32",
        (
            Row("bfloat16, `mpx.autocast`", "mpx", "autocast bfloat16", "bfloat16"),
            Row(
                'bfloat16, `residual_stream="half"`',
                "mpx, half stream",
                "autocast bfloat16, half stream",
            ),
            Row("bfloat16, explicit casts with mpx", "mpx, explicit", "mpx bfloat16"),
            Row("bfloat16, published MPX", "published MPX", "MPX bfloat16"),
        ),
    ),
    Part(
        "Llama of 542 M on an H100, bfloat16 weights with float32 masters, against "
        "a naive cast to bfloat16",
        "whole-steps",
        {"target": "h100", "whole": "Llama", "weights": "masters"},
        "naive bfloat16",
        (
            Row("bfloat16, `mpx.autocast`", "mpx bfloat16", "bfloat16", "bfloat16"),
            Row("FP8, `mpx.DelayedScaling()`", "mpx delayed", "delayed", "delayed"),
            Row(
                "FP8, `mpx.Float8CurrentScaling()`", "mpx current", "current", "current"
            ),
            Row(
                "FP8, delayed, weights stored in 8 bits",
                "mpx, stored",
                "delayed, FP8 weights",
            ),
            Row("FP8, Flax `fp8_ops`", "Flax", "Flax fp8"),
            Row("FP8, Qwix", "Qwix", "Qwix fp8"),
        ),
    ),
    Part(
        "MLP of width 4096 on an H100, against a naive cast to bfloat16",
        "workloads",
        {"target": "h100", "workload": "ffn silu"},
        "naive bfloat16, checked",
        (
            Row("FP8, `mpx.DelayedScaling()`", "mpx delayed", "delayed", "delayed"),
            Row(
                "FP8, `mpx.Float8CurrentScaling()`", "mpx current", "current", "current"
            ),
            Row("FP8, Flax `fp8_ops`", "Flax", "Flax fp8"),
            Row("FP8, Qwix", "Qwix", "Qwix fp8"),
            Row("FP8, 40 lines without a library", "40 lines", "FP8 by hand"),
        ),
    ),
    Part(
        "MLP of width 4096 on a B200, against a naive cast to bfloat16",
        "workloads",
        {"target": "b200", "workload": "ffn gelu"},
        "naive bfloat16, checked",
        (
            Row("MXFP8, `mpx.MXFP8BlockScaling()`", "mpx MXFP8", "mxfp8", "mxfp8"),
            Row(
                "MXFP8, `mpx.MXFP8BlockScaling(kernel=PallasKernel())`",
                "mpx MXFP8, Pallas",
                "mxfp8 by Pallas",
            ),
            Row("MXFP8, `jax.nn`", "JAX MXFP8", "jax.nn MXFP8"),
            Row("NVFP4, `mpx.NVFP4BlockScaling()`", "mpx NVFP4", "nvfp4", "nvfp4"),
            Row(
                "NVFP4, `mpx.NVFP4BlockScaling(kernel=PallasKernel())`",
                "mpx NVFP4, Pallas",
                "nvfp4 by Pallas",
            ),
            Row("NVFP4, `jax.nn`, gradients in bfloat16", "JAX NVFP4", "jax.nn NVFP4"),
        ),
    ),
    Part(
        "The Llama in a scan under `mpx.DelayedScaling()`, moments by "
        "`mpx.compress_state`, against a naive cast with float32 weights",
        "few-bits",
        {"target": "h100", "whole": "Llama, scan"},
        "float32",
        (
            Row("`master_weights(bits=16)`", "mpx 16 bits", "16 bits"),
            Row("`master_weights(bits=8)`", "mpx 8 bits", "8 bits"),
            Row("`master_weights(bits=0)`", "mpx 0 bits", "0 bits"),
        ),
        by="weights",
    ),
)

_HEAD = (
    "| | memory | traffic | roofline time | loss to float32, 95 % interval |",
    "|---|--:|--:|--:|--:|",
)


def shares(part: Part, folder: Path) -> dict[str, dict[str, float]]:
    """By arm: memory, traffic and roof as shares of those of the base."""
    found = results.read(part.source, folder)
    if found is None:
        return {}
    counts = {
        r[part.by]: r["counts"]
        for r in found.records
        if part.match.items() <= r.items() and "counts" in r
    }
    base = counts[part.base]
    keys = [key for key in ("memory", "traffic", "roof") if base.get(key)]
    return {
        arm: {key: count[key] / base[key] for key in keys}
        for arm, count in counts.items()
    }


def table(folder: Path = results.COMMITTED) -> str:
    """The table, in Markdown."""
    measured = results.read("recipes", folder)
    lines = [*_HEAD]
    for part in PARTS:
        found = shares(part, folder)
        lines.append(f"| *{part.title}* | | | | |")
        for row in part.rows:
            one = found.get(row.arm, {})
            cells = [
                f"{one[key]:.2f} c" if key in one else ""
                for key in ("memory", "traffic", "roof")
            ]
            cells.append(_gap(measured, row.loss))
            lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


# The first page's: a row for each step, the same figures of others at its end.
_LLAMA = "Llama, 542 M, float32 masters, H100; naive bfloat16"
_SCAN = "the same in a scan, state in few bits, H100; naive bfloat16, float32 weights"
_VIT = "ViT, width 256, 12 blocks, H100; float32"
_MLP = "MLP, width 4096, {}; naive bfloat16"
_SHORT: tuple[tuple[str, str, Part, str, tuple[str, ...]], ...] = (
    ("FP8, delayed", _LLAMA, PARTS[1], "mpx delayed", ("Flax", "Qwix")),
    ("FP8, delayed", _SCAN, PARTS[4], "mpx 16 bits", ()),
    ("bfloat16", _LLAMA, PARTS[1], "mpx bfloat16", ()),
    ("bfloat16", _VIT, PARTS[0], "mpx", ("published MPX",)),
    ("FP8, delayed", _MLP.format("H100"), PARTS[2], "mpx delayed", ("Flax", "Qwix")),
    ("MXFP8", _MLP.format("B200"), PARTS[3], "mpx MXFP8", ("JAX MXFP8",)),
    ("NVFP4", _MLP.format("B200"), PARTS[3], "mpx NVFP4", ("JAX NVFP4",)),
)
_SHORT_HEAD = (
    "| precision | training step, device; baseline | memory | traffic | roofline time "
    "| the same three with | loss of a small GPT to float32 |",
    "|---|---|--:|--:|--:|---|--:|",
)


def gains(folder: Path = results.COMMITTED) -> str:
    """The same in short, for the first page."""
    measured = results.read("recipes", folder)
    lines = [*_SHORT_HEAD]
    for precision, step, part, ours, others in _SHORT:
        found, rows = shares(part, folder), {row.short: row for row in part.rows}
        beside = [
            f"{name} {', '.join(filter(None, _figures(found, rows[name])))}"
            for name in others
        ]
        cells = [*_figures(found, rows[ours]), "; ".join(beside)]
        cells.append(_gap(measured, rows[ours].loss, short=True))
        lines.append(f"| {precision} | {step} | {' | '.join(cells)} |")
    # A figure and its sign stay in one line.
    return re.sub(r" (±|%)(?= )", "\u00a0\\1", "\n".join(lines))


def _figures(found: dict[str, dict[str, float]], row: Row) -> list[str]:
    one = found.get(row.arm, {})
    return [f"{one[k]:.2f}" if k in one else "" for k in ("memory", "traffic", "roof")]


def _gap(measured: results.Results | None, arm: str, short: bool = False) -> str:
    if measured is None or not arm:
        return ""
    interval = mean_interval(recipes.gaps(measured.records, arm))
    mean = round(interval.mean, 2) + 0.0  # no minus before zero
    if short:
        return f"{mean:+.2f} ± {(interval.high - interval.low) / 2:.2f} %"
    return f"{mean:+.2f} % [{interval.low:+.2f}, {interval.high:+.2f}] m"


def picture(path: Path, colours: dict[str, str], folder: Path) -> None:
    """Bars of the table's shares; ours in colour."""
    import matplotlib.pyplot as plt

    style = {
        "text.color": colours["text"],
        "axes.edgecolor": colours["grid"],
        "axes.facecolor": colours["face"],
        "figure.facecolor": colours["face"],
        "axes.labelcolor": colours["text"],
        "xtick.color": colours["text"],
        "ytick.color": colours["text"],
        "font.size": 9,
    }
    panels = (
        (PARTS[0], "memory", "memory of a ViT's step\nrelative to float32"),
        (PARTS[1], "roof", "roofline time of a Llama's step\nrelative to bfloat16"),
        (PARTS[1], "memory", "memory of the same\nrelative to bfloat16"),
    )
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 3, figsize=(10, 2.4), layout="constrained")
        for axis, (part, key, title) in zip(axes, panels, strict=True):
            found = shares(part, folder)
            rows = [row for row in part.rows if row.arm in found][::-1]
            base = "float32" if part is PARTS[0] else "bfloat16"
            names = [*(row.short for row in rows), base]
            values = [*(found[row.arm][key] for row in rows), 1.0]
            fill = [OURS if row.is_ours else colours["other"] for row in rows]
            fill.append(colours["other"])
            bars = axis.barh(names, values, color=fill)
            axis.bar_label(bars, fmt="%.2f", padding=3)
            axis.set(title=title, xlim=(0, 1.25), xticks=())
            axis.title.set_size(9)
            axis.spines[["top", "right", "bottom"]].set_visible(False)
            axis.tick_params(length=0)
        figure.supxlabel(
            "Programs compiled for an NVIDIA H100 and counted, not run. Shorter is "
            "better.",
            fontsize=8,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)
