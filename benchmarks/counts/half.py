"""Half precision against a naive cast: models of many kinds, for an H100 and a TPU.

Naive is what one writes without a library: all weights and inputs in bfloat16, weights
of the optimizer in float32. Our arms leave the model as it is. All check gradients.
For a GPU bytes are counted by `kernels`, in which a scan's slice of an array counts as
a slice; for a TPU, where only models with loops are asked for, those that cross the
chip's edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS, counter
from ..models.plain import Case, title
from ..models.various import SETUPS
from ..results import Results
from ..steps import CHECKED
from ..tables import Goal, Table, megabytes, ratio
from . import program
from .residuals import DEFAULT, HALF, build as build

TARGET, TPU = "h100", "v5e"
SETUP = ("target", "model", "blocks", "batch")
NAIVE = CHECKED.name
ARMS = (NAIVE, DEFAULT, HALF)
# A scan in half precision on purpose, by a rule.
SCAN, SCANNED = "autocast bfloat16, half scan", ("state space 1024", 4, 8)
TPU_SETUPS = (("llama, scan", 4, 4), ("lstm", 2, 64))
CASES = [Case(TARGET, *setup, arm) for setup in SETUPS for arm in ARMS]
CASES += [Case(TPU, *setup, arm) for setup in TPU_SETUPS for arm in ARMS]
CASES += [Case(TARGET, *SCANNED, SCAN)]
# Of naive, at most.
WHAT = ("temporaries", "traffic")
LIMITS = {
    TARGET: {DEFAULT: 1.08, HALF: 1.03},
    TPU: {DEFAULT: 1.05, HALF: 1.05},
}


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step."""
    counts, text = program.count(compiled), compiled.as_text()
    bytes_held = {"memory": counts.memory, "temporaries": counts.temporaries}
    if TARGETS[fields["target"]].platform == "tpu":
        off_chip = program.operand_and_result_bytes(text, on_chip=False)
        return {**bytes_held, "traffic": off_chip}
    found = counter.kernels_of(text)
    times = sum(kernel.times for kernel in found)
    return {**bytes_held, "traffic": counter.traffic(found), "kernels": times}


def tables(found: Results) -> Iterator[Table]:
    """A row for each model."""
    rows: list[list[str]] = []
    notes = [
        "Ratios to the naive cast; below 1 is better. *Default* is "
        '`mpx.autocast(loss)`, *half stream* has `residual_stream="half"`. '
        "A TPU's traffic is what crosses the chip's edge."
    ]
    for (target, model, blocks, batch), counts in found.counts_by(*SETUP).items():
        naive, *ours = (counts[arm] for arm in ARMS)
        if SCAN in counts:
            by_rule = " and ".join(ratio(counts[SCAN][x] / naive[x]) for x in WHAT)
            notes += [
                "The gated state space model with a half stream and `mpx.Rule("
                'mpx.Precision.HALF, primitive=("add", "mul"))` takes '
                f"{by_rule}, and has the naive cast's digits in its scan."
            ]
        where = "" if target == TARGET else f"{TARGETS[target].title}: "
        row = [f"{where}{title(model)}, blocks {blocks}, batch {batch}"]
        row += [megabytes(naive[what]) for what in WHAT]
        rows.append(
            row + [ratio(one[what] / naive[what]) for one in ours for what in WHAT]
        )
    if rows:
        yield Table(
            "Half precision against a naive cast, compiled for an H100 and a TPU",
            "step | naive: temporaries, MB | traffic, MB | default: temporaries | "
            "traffic | half stream: temporaries | traffic",
            rows,
            notes,
        )


def goals(found: Results) -> Iterator[Goal]:
    """Close to the naive cast, or better."""
    for setup, counts in found.counts_by(*SETUP).items():
        for arm, limit in LIMITS[setup[0]].items():
            for what in WHAT:
                share = counts[arm][what] / counts[NAIVE][what]
                text = f"{what} of {arm} at most {limit} of naive's: {share:.2f}"
                model = f"{title(setup[1])}, {TARGETS[setup[0]].title}"
                yield Goal(f"{text}: {model}", share <= limit)
