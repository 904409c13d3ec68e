"""The table of `step_time`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from .problems import PROBLEMS
from .results import Results
from .tables import Table, ratio

ARMS = {
    "ours": ("float32", "mpx float16", "mpx bfloat16"),
    "peers": ("float32", "MPX float16", "JMP float16"),
}
BATCHES = {"desktop": 256, "base": 64}
CHAIN = 10
"""Steps between two looks at the clock."""


def case(problem: str, batch: int, arm: str) -> dict[str, Any]:
    """A complete model on one device."""
    blocks = PROBLEMS[problem].blocks
    return {"problem": problem, "arm": arm, "batch": batch, "blocks": blocks}


def records(
    side: str, problem: str, batch: int, answers: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A record per arm with all its samples, in the order of the rounds."""
    rounds = [answer["round"] for answer in answers]
    return [
        {
            **case(problem, batch, column[0]["arm"]),
            "side": side,
            "seconds": [round(sample["seconds"], 7) for sample in column],
        }
        for column in zip(*rounds, strict=True)
    ]


def tables(found: Results) -> list[Table]:
    """A row per model, batch and arm."""
    rows = []
    for record in found.records:
        base = next(
            r
            for r in found.records
            if r["arm"] == "float32"
            and (r["side"], r["problem"]) == (record["side"], record["problem"])
        )
        pairs = zip(base["seconds"], record["seconds"], strict=True)
        speedup = statistics.median(b / seconds for b, seconds in pairs)
        rows.append(
            [
                f"{record['problem']}, batch {record['batch']}",
                record["arm"],
                f"{1000 * statistics.median(record['seconds']):.2f}",
                ratio(speedup),
            ]
        )
    return [
        Table(
            title=f"Step time, 12 blocks, {found.device}",
            columns=["model", "arm", "ms per step", "float32 to arm"],
            rows=rows,
            notes=["Medians of alternating rounds of 10 chained steps."],
        )
    ]
