"""Half precision against a naive cast: models of many kinds, for an H100 and a TPU.

Naive is what one writes without a library: all weights and inputs in bfloat16, weights
of the optimizer in float32. Our arms leave the model as it is. All check gradients.
For a GPU bytes are counted by `kernels`, in which a scan's slice of an array counts as
a slice; for a TPU, where only models with loops are asked for, those that cross the
chip's edge.
"""

from __future__ import annotations

from typing import Any

from ..models.plain import Case, title
from ..models.various import SETUPS
from ..results import Results
from ..steps import CHECKED
from ..tables import Goal, Table, megabytes, ratio
from . import kernels, program
from .residuals import DEFAULT, HALF, build as build
from .targets import TARGETS

TARGET, TPU = "h100", "v5e"
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
    if TARGETS[fields["target"]].platform == "tpu":
        return {
            "memory": counts.memory,
            "temporaries": counts.temporaries,
            "traffic": program.operand_and_result_bytes(text, on_chip=False),
        }
    found = kernels.kernels_of(text)
    return {
        "memory": counts.memory,
        "temporaries": counts.temporaries,
        "traffic": kernels.traffic(found),
        "kernels": sum(kernel.times for kernel in found),
    }


def _counts(found: Results) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    made: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in found.records:
        if "model" in record and record["counts"] is not None:
            setup = tuple(record[x] for x in ("target", "model", "blocks", "batch"))
            made.setdefault(setup, {})[record["arm"]] = record["counts"]
    return made


def tables(found: Results) -> list[Table]:
    """A row for each model."""
    rows: list[list[str]] = []
    notes = [
        "Ratios to the naive cast; below 1 is better. *Default* is "
        '`mpx.autocast(loss)`, *half stream* has `residual_stream="half"`. '
        "A TPU's traffic is what crosses the chip's edge."
    ]
    for (target, model, blocks, batch), counts in _counts(found).items():
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
        row += [megabytes(naive["temporaries"]), megabytes(naive["traffic"])]
        for one in ours:
            row += [ratio(one[what] / naive[what]) for what in WHAT]
        rows.append(row)
    if not rows:
        return []
    return [
        Table(
            title="Half precision against a naive cast, compiled for an H100 and a TPU",
            columns=[
                "step",
                "naive: temporaries, MB",
                "traffic, MB",
                "default: temporaries",
                "traffic",
                "half stream: temporaries",
                "traffic",
            ],
            rows=rows,
            notes=notes,
        )
    ]


def goals(found: Results) -> list[Goal]:
    """Close to the naive cast, or better."""
    made = []
    for setup, counts in _counts(found).items():
        for arm, limit in LIMITS[setup[0]].items():
            for what in WHAT:
                share = counts[arm][what] / counts[NAIVE][what]
                text = f"{what} of {arm} at most {limit} of naive's: {share:.2f}"
                model = f"{title(setup[1])}, {TARGETS[setup[0]].title}"
                made.append(Goal(f"{text}: {model}", share <= limit))
    return made
