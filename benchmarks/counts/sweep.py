"""Memory and traffic over the batch size: Figures 2 and 3 of the MPX paper.

Question: how much memory does one training step need, and how many bytes does it move,
in float32, float16 and bfloat16, for the paper's two Vision Transformers: the small one
on one device, both data-parallel on four?

The paper measured an RTX 4070 and four H100. Here the step is compiled for a device
that need not be there (see `targets`) and the numbers are read from the executable.
Bytes moved stand in for step time, which `time` measures where a GPU is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..counter import TARGETS
from ..models.plain import Case, title
from ..results import Results
from ..tables import Goal, Table, megabytes, ratio
from .program import compile as compile, count as count
from .residuals import build as build

ARMS = ("float32", "mpx float16", "mpx bfloat16", "MPX float16")
# Images per step and device; four devices get four times as many, as data-parallel
# training is meant. Below these sizes a TPU keeps whole activations on the chip.
BATCHES: dict[str, tuple[int, ...]] = {
    "desktop, mean": (64, 128, 256, 512),
    "base, mean": (8, 16, 32, 64),
}
# Models, and the devices that share a batch: the larger one is counted on four alone.
SETUPS = (("desktop, mean", 1), ("desktop, mean", 4), ("base, mean", 4))
BLOCKS = 2  # 12 take minutes for each program
WHAT = ("memory", "traffic")
# Per device; activations dominate there, and "as good as MPX" is judged there.
REFERENCE = {"desktop, mean": 256, "base, mean": 64}

Setup = tuple[str, int, int]
"""Model, blocks, devices: one column of the picture."""


def total_batches(model: str, devices: int) -> tuple[int, ...]:
    """Images per step over all devices."""
    return tuple(devices * batch for batch in BATCHES[model])


CASES = [
    Case("v5e", model, BLOCKS, batch, arm, devices)
    for model, devices in SETUPS
    for batch, arm in itertools.product(total_batches(model, devices), ARMS)
]


def _setups(found: Results) -> dict[Setup, dict[str, dict[int, dict[str, Any]]]]:
    """Of each setup and arm, counts over the batch size."""
    made: dict[Setup, dict[str, dict[int, dict[str, Any]]]] = {}
    every = found.counts_by("model", "blocks", "devices", "batch")
    for (*setup, batch), counts in every.items():
        for arm in counts.keys() & {*ARMS} if "float32" in counts else ():
            series = made.setdefault(tuple(setup), {arm: {} for arm in ARMS})
            series[arm][batch] = counts[arm]
    return made


def tables(found: Results) -> Iterator[Table]:
    """One table per model and device count: float32 absolute, the others as ratios."""
    for (model, blocks, devices), series in _setups(found).items():
        rows = []
        for batch, base in series["float32"].items():
            row = [str(batch), *(megabytes(base[what]) for what in WHAT)]
            for arm in ARMS[1:]:
                row += _ratios(base, series[arm].get(batch))
            rows.append(row)
        heads = [f"{arm}: {what}" for arm in ARMS[1:] for what in WHAT]
        yield Table(
            f"{title(model)}, {blocks} blocks, {_where(found)}, {_devices(devices)}",
            ["batch", "float32 memory, MB", "traffic, MB", *heads],
            rows,
            ["Per device. Ratios are float32 to the arm; higher is better."],
        )


def _ratios(base: dict[str, Any], counts: dict[str, Any] | None) -> list[str]:
    if counts is None:
        return ["does not fit", ""]
    return [ratio(base[what] / counts[what]) for what in WHAT]


def _where(found: Results) -> str:
    names = {TARGETS[record["target"]].title for record in found.records}
    return f"compiled for {' and '.join(sorted(names))}"


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices, data-parallel"


def goals(found: Results) -> Iterator[Goal]:
    """Mpx float16 is as good as the published MPX, where activations dominate."""
    for (model, blocks, devices), series in _setups(found).items():
        batch = devices * REFERENCE[model]
        ours, peer = (series[x].get(batch) for x in ("mpx float16", "MPX float16"))
        for what in WHAT if ours and peer else ():
            share = ours[what] / peer[what] - 1
            text = f"{what} of mpx float16 at most MPX's (within 1%): {model}, "
            text += f"{blocks} blocks, batch {batch}, {_devices(devices)}: "
            yield Goal(f"{text}{100 * share:+.2f}%", share <= 0.01)


_COLORS = dict(zip(ARMS, ("#444444", "#d1495b", "#30638e", "#edae49"), strict=True))
_STYLES = dict(zip(ARMS, ("o-", "s-", "D-", "x--"), strict=True))


def picture(found: Results, path: Path) -> None:
    """Draws memory and traffic over the batch size, a column per model and devices."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    setups = _setups(found)
    figure, axes = pyplot.subplots(
        2,
        len(setups),
        figsize=(3.6 * len(setups), 6.2),
        squeeze=False,
        layout="constrained",
    )
    for column, (setup, series) in enumerate(setups.items()):
        for row, what in enumerate(WHAT):
            _draw(axes[row][column], setup, series, what)
        model, blocks, devices = setup
        axes[0][column].set_title(
            f"{model.partition(',')[0]} ViT, {blocks} blocks, {_devices(devices)}",
            fontsize=9,
        )
        axes[1][column].set_xlabel("batch size")
    axes[0][0].set_ylabel("memory per device, MB")
    axes[1][0].set_ylabel("bytes moved per device and step, MB")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"One training step, {_where(found)}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _draw(axis: Any, setup: Setup, series: dict[str, Any], what: str) -> None:
    for arm, counts in series.items():
        if counts:
            axis.plot(
                list(counts),
                [one[what] / 1e6 for one in counts.values()],
                _STYLES[arm],
                color=_COLORS[arm],
                label=arm,
                markersize=5,
            )
    batches = total_batches(setup[0], setup[2])
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
