"""Half precision against a naive cast: models of many kinds, compiled for an H100.

Naive is what one writes without a library: all weights and inputs in bfloat16, weights
of the optimizer in float32. Our arms leave the model as it is. All check gradients.
Bytes are counted by `kernels`, in which a scan's slice of an array counts as a slice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..models.plain import Case, title
from ..models.various import SETUPS
from ..results import Results
from ..steps import CHECKED
from ..tables import Goal, Table, megabytes, ratio
from . import kernels, program
from .compiling import Compiler
from .residuals import DEFAULT, HALF

TARGET = "h100"
NAIVE = CHECKED.name
ARMS = (NAIVE, DEFAULT, HALF)
CASES = [Case(TARGET, *setup, arm) for setup in SETUPS for arm in ARMS]
# Of naive, at most.
WHAT = ("temporaries", "traffic")
LIMITS = {DEFAULT: 1.08, HALF: 1.03}


def run(found: Results, compiler: Compiler, progress: Any) -> None:
    """Compiles all cases."""
    cases = [dataclasses.asdict(case) for case in CASES]
    compiler.count(found, TARGET, {"ours": cases}, progress, steps="half")


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step."""
    del fields
    counts, found = program.count(compiled), kernels.kernels_of(compiled.as_text())
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
            setup = record["model"], record["blocks"], record["batch"]
            made.setdefault(setup, {})[record["arm"]] = record["counts"]
    return made


def tables(found: Results) -> list[Table]:
    """A row for each model."""
    rows = []
    for (model, blocks, batch), counts in _counts(found).items():
        naive, *ours = (counts[arm] for arm in ARMS)
        row = [f"{title(model)}, blocks {blocks}, batch {batch}"]
        row += [megabytes(naive["temporaries"]), megabytes(naive["traffic"])]
        for one in ours:
            row += [ratio(one[what] / naive[what]) for what in WHAT]
        rows.append(row)
    if not rows:
        return []
    return [
        Table(
            title="Half precision against a naive cast, compiled for an H100",
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
            notes=[
                "Ratios to the naive cast; below 1 is better. *Default* is "
                '`mpx.autocast(loss)`, *half stream* has `residual_stream="half"`.'
            ],
        )
    ]


def goals(found: Results) -> list[Goal]:
    """Close to the naive cast, or better."""
    made = []
    for setup, counts in _counts(found).items():
        for arm, limit in LIMITS.items():
            for what in WHAT:
                share = counts[arm][what] / counts[NAIVE][what]
                text = f"{what} of {arm} at most {limit} of naive's: {share:.2f}"
                made.append(Goal(f"{text}: {title(setup[0])}", share <= limit))
    return made
