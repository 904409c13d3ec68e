"""What do half and low precision cost a training? A GPT in each, paired.

Question: how far is the final validation loss in a precision from that in float32?

A pair is one seed: float32 and another from the same initial weights, with the same
batches in the same order, by the code of `examples.gpt`. A gap is relative to the loss
in float32. The interval is Student's t over the pairs' gaps, at 95%.

Without a device that has the formats they are emulated, which computes the same
products of the same quantized operands; only the sums are rounded differently.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..results import Results, read
from ..tables import Goal, Table
from .interval import mean_interval

SEEDS = 10
STEPS = 200
ARMS = ("float32", "float16", "bfloat16")
ARMS += ("delayed", "current", "row-wise", "block", "mxfp8", "nvfp4", "int8")
# With the residual stream and the scores that TPUs have by default.
ON_TPU = "bfloat16, TPU"
ARMS += (ON_TPU,)
# In percent of the loss in float32; the whole interval must lie within.
LIMITS = {arm: 1.5 if arm == "nvfp4" else 0.5 for arm in ARMS[1:]}
POINTS = 30  # of a curve
# Small enough for two CPU cores: eight arms of ten seeds in less than an hour.
SIZE = {"context": 64, "width": 64, "hidden": 256, "blocks": 2, "heads": 4}
BATCH = 16


TRAINS = True


def requests(options: Any, found: Results) -> list[dict[str, Any]]:
    """One, for what is left to do: it goes on where it was interrupted."""
    steps, earlier = options.recipe_steps, read(found.name, options.out)
    if earlier is not None:
        found.records = [r for r in earlier.records if r["steps"] == steps]
        found.versions = earlier.versions
    return [{"runs": missing(found, options.recipe_seeds, steps), "steps": steps}]


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per trained model; runs in a worker.

    Args:
        request: `runs`, pairs of seed and arm, and `steps`.
    """
    import mpx
    from examples.gpt import Config, ModelConfig, load_data, train

    steps = request["steps"]
    for seed, arm in request["runs"]:
        config = Config(
            steps=steps,
            batch_size=BATCH,
            model=ModelConfig(**SIZE),
            seed=seed,
            checkpoint_every=steps,
        )
        start = time.perf_counter()
        target = "tpu v5e" if arm == ON_TPU else None
        with mpx.autocast(target=target, ambient=True):
            result, rows = train(config, arm.removesuffix(", TPU"), load_data(config))
        yield {
            "run": {
                "arm": arm,
                "seed": seed,
                "steps": steps,
                "loss": result.test_loss,
                "skipped": result.skipped,
                "curve": thinned([row.loss for row in rows]),
                "seconds": round(time.perf_counter() - start, 1),
            }
        }


def thinned(losses: Sequence[float]) -> list[float]:
    """Means of at most `POINTS` equal parts of a curve.

    >>> thinned([1.0, 2.0])
    [1.0, 2.0]
    """
    length = -(-len(losses) // POINTS)
    parts = (losses[i : i + length] for i in range(0, len(losses), length))
    return [round(statistics.fmean(part), 4) for part in parts]


def missing(found: Results, seeds: int, steps: int) -> list[tuple[int, str]]:
    """The runs that are left to do; pairs of one seed stand together."""
    done = {(r["seed"], r["arm"]) for r in found.records if r["steps"] == steps}
    runs = [(seed, arm) for seed in range(seeds) for arm in ARMS]
    return [run for run in runs if run not in done]


def gaps(records: Sequence[dict[str, Any]], arm: str) -> list[float]:
    """The loss over that of float32 in percent, one number per seed."""
    losses = {(r["seed"], r["arm"]): r["loss"] for r in records}
    return [
        100 * (losses[seed, arm] / loss - 1)
        for (seed, base), loss in losses.items()
        if base == "float32" and (seed, arm) in losses
    ]


def tables(found: Results) -> list[Table]:
    """A row per arm: the loss, and how far it is from that of float32."""
    rows = []
    for arm in ARMS:
        losses = [r["loss"] for r in found.records if r["arm"] == arm]
        if not losses:
            continue
        row = [arm, f"{statistics.fmean(losses):.4f}", str(len(losses)), *[""] * 4]
        samples = gaps(found.records, arm)
        if arm != "float32" and len(samples) > 1:
            interval = mean_interval(samples)
            row[3:] = [
                f"{interval.mean:+.3f}%",
                f"[{interval.low:+.3f}%, {interval.high:+.3f}%]",
                f"{min(samples):+.3f}% to {max(samples):+.3f}%",
                f"{LIMITS[arm]}%",
            ]
        rows.append(row)
    steps = " or ".join(map(str, sorted({r["steps"] for r in found.records})))
    return [
        Table(
            f"Final validation loss of a GPT, nats per byte: width {SIZE['width']}, "
            f"{SIZE['blocks']} blocks, {steps} steps of {BATCH} texts of "
            f"{SIZE['context']} bytes",
            "arm | loss | seeds | gap to float32 | 95% interval | single seeds | goal",
            rows,
        )
    ]


def goals(found: Results) -> Iterator[Goal]:
    """The intervals lie within the limits."""
    for arm, limit in LIMITS.items():
        samples = gaps(found.records, arm)
        if len(samples) > 1:
            interval = mean_interval(samples)
            text = f"95% interval of the gap of {arm} to float32 within {limit}%, "
            text += (
                f"{len(samples)} seeds: [{interval.low:+.3f}%, {interval.high:+.3f}%]"
            )
            yield Goal(text, interval.lies_within(limit))


# Okabe and Ito (2008), and two more.
_COLORS = dict(
    zip(
        ARMS,
        "#999999 #0072B2 #E69F00 #009E73 #D55E00 #8B5A2B #CC79A7 #56B4E9 #000000 "
        "#6A3D9A #F0E442".split(),
        strict=True,
    )
)


def picture(found: Results, path: Path) -> None:
    """Draws training losses, and the gap of every seed with the intervals."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    arms = [arm for arm in ARMS if any(r["arm"] == arm for r in found.records)]
    for arm in arms:
        _draw_curve(left, found, arm)
    for place, arm in enumerate(arms[1:]):
        _draw_gaps(right, found, arm, place)
    left.set(xlabel="step", ylabel="nats per byte", yscale="log")
    left.set_title("Training loss, mean over the seeds", fontsize=10)
    left.set_yticks([2, 2.5, 3, 4, 5], ["2", "2.5", "3", "4", "5"])
    left.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.axvline(0, color=_COLORS["float32"], linewidth=1)
    right.set_yticks(range(len(arms) - 1), arms[1:])
    right.invert_yaxis()
    right.set_xlabel("% of the loss in float32")
    right.set_title(
        "Gap of the final validation loss: seeds, 95% interval, goal", fontsize=10
    )
    right.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _draw_curve(axis: Any, found: Results, arm: str) -> None:
    runs = [r for r in found.records if r["arm"] == arm]
    parts = zip(*(r["curve"] for r in runs), strict=True)
    curve = [statistics.fmean(part) for part in parts]
    length = runs[0]["steps"] / len(curve)
    steps = [(i + 0.5) * length for i in range(len(curve))]
    width = 5.0 if arm == "float32" else 1.2
    axis.plot(steps, curve, color=_COLORS[arm], linewidth=width, label=arm)


def _draw_gaps(axis: Any, found: Results, arm: str, place: int) -> None:
    samples, limit = gaps(found.records, arm), LIMITS[arm]
    axis.barh(place, 2 * limit, left=-limit, height=0.7, color="#EEEEEE", zorder=0)
    color = _COLORS[arm]
    axis.plot(samples, [place] * len(samples), "o", color=color, alpha=0.35, ms=4)
    if len(samples) > 1:
        interval = mean_interval(samples)
        axis.plot([interval.low, interval.high], [place, place], color=color, lw=2.5)
        axis.plot(interval.mean, place, "D", color=color, ms=6)
