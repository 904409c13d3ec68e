"""The table and the picture of the first page: what one gains by which precision.

Nothing is computed here that is not in `benchmarks/results/`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from . import results
from .numerics import recipes
from .numerics.interval import mean_interval

LIGHT = {"text": "#1f2328", "face": "#ffffff", "grid": "#d0d7de", "other": "#8c959f"}
DARK = {"text": "#e6edf3", "face": "#0d1117", "grid": "#30363d", "other": "#6e7681"}
OURS = "#009e73"
WHAT = ("memory", "traffic", "roof")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step that was counted in several arms.

    Attributes:
        title: the step, the device, the base.
        source: the results.
        match: what the records of the step have in common.
        base: the arm that the others are compared with.
        by: what tells records apart: arms, or what is kept of weights.
    """

    title: str
    source: str
    match: dict[str, Any]
    base: str
    by: str = "arm"

    def shares(self, folder: Path) -> dict[str, dict[str, float]]:
        """By arm: memory, traffic and roofline time as shares of those of the base."""
        found = results.read(self.source, folder)
        if found is None:
            return {}
        counts = {
            r[self.by]: r["counts"]
            for r in found.records
            if self.match.items() <= r.items() and "counts" in r
        }
        base = counts[self.base]
        keys = [key for key in WHAT if base.get(key)]
        return {
            arm: {key: count[key] / base[key] for key in keys}
            for arm, count in counts.items()
        }


def _whole(title: str, target: str, whole: str, weights: str) -> Step:
    match = {"target": target, "whole": whole, "weights": weights}
    source = "whole-steps-tpu" if target == "v5e" else "whole-steps"
    return Step(title, source, match, "naive bfloat16")


LLAMA = _whole(
    "Llama, 542 M, float32 masters, H100; naive bfloat16", "h100", "Llama", "masters"
)
SCAN = Step(
    "the same in a scan, state in few bits, H100; naive bfloat16, float32 weights",
    "few-bits",
    {"target": "h100", "whole": "Llama, scan"},
    "float32",
    by="weights",
)
VIT = Step(
    "ViT, width 256, 12 blocks, H100; float32",
    "residuals",
    {"target": "h100", "model": "desktop", "blocks": 12},
    "float32",
)
TPU = _whole(
    "Llama, 337 M, in a scan, float32 masters, TPU v5e; naive bfloat16",
    "v5e",
    "Llama of 4 in a scan, scores in float32",
    "masters",
)
H100_MLP, B200_MLP = (
    _whole(f"MLP, width 4096, {on}; naive bfloat16", on.lower(), "ffn", "float32")
    for on in ("H100", "B200")
)
_PEERS = {"Flax": "Flax fp8", "Qwix": "Qwix fp8"}
_MPX = {"published MPX": "MPX bfloat16"}
# Precision, step, our arm, others by name, and the arm of `recipes` with its loss.
ROWS: tuple[tuple[str, Step, str, dict[str, str], str], ...] = (
    ("FP8, delayed", LLAMA, "delayed", _PEERS, "delayed"),
    ("FP8, delayed", SCAN, "16 bits", {}, ""),
    ("bfloat16", LLAMA, "bfloat16", {}, "bfloat16"),
    ("bfloat16", VIT, "autocast bfloat16", _MPX, "bfloat16"),
    ("bfloat16", TPU, "nothing set", {"float32": "float32"}, recipes.ON_TPU),
    ("FP8, delayed", H100_MLP, "delayed", _PEERS, "delayed"),
    ("MXFP8", B200_MLP, "mxfp8", {"JAX MXFP8": "jax.nn MXFP8"}, "mxfp8"),
    ("NVFP4", B200_MLP, "nvfp4", {"JAX NVFP4": "jax.nn NVFP4"}, "nvfp4"),
)
_HEAD = (
    "| precision | training step, device; baseline | memory | traffic | roofline time "
    "| the same three with | loss of a small GPT to float32 |",
    "|---|---|--:|--:|--:|---|--:|",
)


def table(folder: Path = results.COMMITTED) -> str:
    """A row for each step, in Markdown; the same figures of others at its end."""
    measured = results.read("recipes", folder)
    lines = [*_HEAD]
    for precision, step, ours, others, loss in ROWS:
        found = step.shares(folder)
        beside = [
            f"{name} {', '.join(filter(None, _figures(found, arm)))}"
            for name, arm in others.items()
        ]
        cells = [*_figures(found, ours), "; ".join(beside), _gap(measured, loss)]
        lines.append(f"| {precision} | {step.title} | {' | '.join(cells)} |")
    # A figure and its sign stay in one line.
    return re.sub(r" (±|%)(?= )", "\u00a0\\1", "\n".join(lines))


def _figures(found: dict[str, dict[str, float]], arm: str) -> list[str]:
    one = found.get(arm, {})
    return [f"{one[key]:.2f}" if key in one else "" for key in WHAT]


def _gap(measured: results.Results | None, arm: str) -> str:
    if measured is None or not arm:
        return ""
    interval = mean_interval(recipes.gaps(measured.records, arm))
    mean = round(interval.mean, 2) + 0.0  # no minus before zero
    return f"{mean:+.2f} ± {(interval.high - interval.low) / 2:.2f} %"


# What the picture calls the arms.
_OF_VIT = {
    "mpx": "autocast bfloat16",
    "mpx, half stream": "autocast bfloat16, half stream",
    "mpx, explicit": "mpx bfloat16",
    "published MPX": "MPX bfloat16",
    "float32": "float32",
}
_OF_LLAMA = {
    "mpx bfloat16": "bfloat16",
    "mpx delayed": "delayed",
    "mpx current": "current",
    "mpx, stored": "delayed, FP8 weights",
    **_PEERS,
    "bfloat16": "naive bfloat16",
}
_PANELS = (
    (VIT, _OF_VIT, "memory", "memory of a ViT's step\nrelative to float32"),
    (LLAMA, _OF_LLAMA, "roof", "roofline time of a Llama's step\nrelative to bfloat16"),
    (LLAMA, _OF_LLAMA, "memory", "memory of the same\nrelative to bfloat16"),
)


def picture(path: Path, colours: dict[str, str], folder: Path) -> None:
    """Bars of the table's shares; ours in colour."""
    import matplotlib.pyplot as plt

    of_text = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    style = dict.fromkeys(of_text, colours["text"]) | {"font.size": 9}
    style |= dict.fromkeys(("axes.facecolor", "figure.facecolor"), colours["face"])
    style["axes.edgecolor"] = colours["grid"]
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 3, figsize=(10, 2.4), layout="constrained")
        for axis, (step, arms, key, title) in zip(axes, _PANELS, strict=True):
            found, (*names, base) = step.shares(folder), arms
            names = [*names[::-1], base]
            values = [found[arms[name]][key] for name in names]
            ours = [name.startswith("mpx") for name in names]
            fill = [OURS if mine else colours["other"] for mine in ours]
            axis.bar_label(axis.barh(names, values, color=fill), fmt="%.2f", padding=3)
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
