"""Does half precision cost accuracy? Five folds of all 1,797 digits, paired.

Question: how far is the test accuracy of float16 and bfloat16 from that of float32?

Every image is held out exactly once per seed. A pair is one fold and one seed, trained
in both precisions by the code of `examples.vit_explicit` from the same initial model
with the same batches in the same order, so that the difference of the two accuracies
holds nothing but precision and the chaos that any rounding sets off.

The interval is Student's t over the pairs' differences, at 95%. Its limits: the
training sets of two folds share three quarters of their images, so pairs of one seed
are not quite independent (Dietterich 1998, "Approximate Statistical Tests for Comparing
Supervised Classification Learning Algorithms").
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..results import Results
from ..tables import Goal, Table

FOLDS = (0, 1, 2, 3, 4)
PRECISIONS = ("float32", "float16", "bfloat16")
LIMIT = 0.5
"""Percentage points within which the whole interval must lie."""
LEVEL = 0.95


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one answer per trained model; runs in a worker.

    Args:
        request: `folds`, `seeds`, `precisions`, and `steps` (None: the preset's).
    """
    from examples.vit import load_data
    from examples.vit_explicit import PRESETS, train

    for seed in request["seeds"]:
        for fold in request["folds"]:
            config = dataclasses.replace(PRESETS["digits"], seed=seed, fold=fold)
            if request["steps"] is not None:
                config = dataclasses.replace(config, steps=request["steps"])
            config = dataclasses.replace(config, checkpoint_every=config.steps)
            data = load_data(config)
            for precision in request["precisions"]:
                start = time.perf_counter()
                result, _ = train(config, precision, data)
                yield {
                    "run": {
                        "fold": fold,
                        "seed": seed,
                        "precision": precision,
                        "steps": config.steps,
                        "correct": round(result.test_accuracy * data.test_size),
                        "images": data.test_size,
                        "final_loss": round(result.final_loss, 4),
                        "skipped": result.skipped,
                        "seconds": round(time.perf_counter() - start, 1),
                    }
                }


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, all in the unit of the samples."""

    mean: float
    low: float
    high: float

    def lies_within(self, limit: float) -> bool:
        return -limit <= self.low and self.high <= limit


def mean_interval(samples: Sequence[float], level: float = LEVEL) -> Interval:
    r"""Student's t interval of a mean: $\bar d \pm t_{n-1} s / \sqrt n$.

    >>> mean_interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.48..., high=4.48...)

    Raises:
        ValueError: with fewer than two samples, there is no interval.
    """
    if len(samples) < 2:
        raise ValueError(
            "`mean_interval(samples)` needs at least two samples; got "
            f"{len(samples)}. Run more folds or seeds."
        )
    from scipy.stats import t

    mean = statistics.fmean(samples)
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    reach = float(t.ppf((1 + level) / 2, len(samples) - 1)) * error
    return Interval(mean, mean - reach, mean + reach)


def differences(records: Sequence[dict[str, Any]], precision: str) -> list[float]:
    """Accuracy minus that of float32 in points, one per pair of fold and seed."""
    accuracy = {
        (r["seed"], r["fold"], r["precision"]): 100 * r["correct"] / r["images"]
        for r in records
    }
    return [
        accuracy[seed, fold, precision] - value
        for (seed, fold, base), value in accuracy.items()
        if base == "float32" and (seed, fold, precision) in accuracy
    ]


def tables(found: Results) -> list[Table]:
    """A row per precision: accuracy over all held-out images, and the interval."""
    rows = []
    for precision in PRECISIONS:
        runs = [r for r in found.records if r["precision"] == precision]
        if not runs:
            continue
        by_run = [100 * r["correct"] / r["images"] for r in runs]
        share = sum(r["correct"] for r in runs) / sum(r["images"] for r in runs)
        row = [precision, f"{100 * share:.2f}%"]
        row += [f"{min(by_run):.2f}% to {max(by_run):.2f}%"]
        row += [str(sum(r["skipped"] for r in runs)), "", ""]
        samples = differences(found.records, precision)
        if precision != "float32" and len(samples) > 1:
            interval = mean_interval(samples)
            between = f"[{interval.low:+.3f}, {interval.high:+.3f}]"
            row[-2:] = [f"{interval.mean:+.3f}", between]
        rows.append(row)
    folds, seeds = ({r[name] for r in found.records} for name in ("fold", "seed"))
    steps = " or ".join(map(str, sorted({r["steps"] for r in found.records})))
    return [
        Table(
            f"Test accuracy on held-out digits: {len(folds)} folds x {len(seeds)} "
            f"seeds, {steps} steps each",
            "precision | accuracy | single models | skipped steps | "
            "difference to float32, points | 95% interval",
            rows,
        )
    ]


def goals(found: Results) -> Iterator[Goal]:
    """Both intervals lie within the limit, and every precision is above 95%."""
    for precision in PRECISIONS:
        runs = [r for r in found.records if r["precision"] == precision]
        if runs:
            share = sum(r["correct"] for r in runs) / sum(r["images"] for r in runs)
            text = f"{precision} is right on more than 95% of held-out digits: "
            yield Goal(f"{text}{100 * share:.2f}%", share > 0.95)
        samples = differences(found.records, precision)
        if precision != "float32" and len(samples) > 1:
            interval = mean_interval(samples)
            text = f"95% interval of the difference of {precision} to float32 within "
            text += f"{LIMIT} points: [{interval.low:+.3f}, {interval.high:+.3f}]"
            yield Goal(text, interval.lies_within(LIMIT))
