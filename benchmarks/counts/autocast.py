"""What the compiled step needs where autocast casts, beside casts written by hand.

The model of the autocast arms is the plain one, without a call of mpx. The explicit
arms are those of the sweep. Both settings of the residual stream are shown: in float32,
autocast's default, and in half precision, as every model with casts by hand has it.
"""

from __future__ import annotations

from typing import Any

from ..models.problems import PROBLEMS
from ..results import Results
from ..tables import Goal, Table, megabytes, ratio
from . import compiling
from .sweep import build as build, count as count
from .targets import TARGETS

OUR_ARMS = (
    "float32",
    "mpx float16",
    "mpx bfloat16",
    "autocast float16",
    "autocast bfloat16",
    "autocast float16, half stream",
    "autocast bfloat16, half stream",
)
PEER_ARMS = ("MPX float16",)
PROBLEM, BATCH = "desktop", 256
# What a compiler has time for: GPU compilers take seconds where TPU's take minutes.
BLOCKS = {"h100": 4}


def cases(target: str, blocks: int) -> list[dict[str, Any]]:
    """All arms."""
    blocks = BLOCKS.get(target, 2)
    return compiling.cases_of({PROBLEM: (BATCH,)}, (*OUR_ARMS, *PEER_ARMS), blocks)


def _counts(found: Results) -> dict[tuple[str, int], dict[str, Any]]:
    """Counts of each arm, for each target and number of blocks."""
    made: dict[tuple[str, int], dict[str, Any]] = {}
    for record in found.records:
        setup = (record["target"], record["blocks"])
        is_ours = (record["problem"], record["batch"]) == (PROBLEM, BATCH)
        is_ours = is_ours and record["devices"] == 1 and "counts" in record
        if is_ours and record["blocks"] == BLOCKS.get(record["target"], 2):
            made.setdefault(setup, {})[record["arm"]] = record["counts"]
    return made


def tables(found: Results) -> list[Table]:
    """One table for each target."""
    made = []
    for (target, blocks), counts in _counts(found).items():
        base = counts.get("float32")
        if base is None or not any(arm.startswith("autocast") for arm in counts):
            continue
        rows = [
            [
                arm,
                megabytes(counts[arm]["memory"]),
                ratio(base["memory"] / counts[arm]["memory"]),
                megabytes(counts[arm]["traffic"]),
                ratio(base["traffic"] / counts[arm]["traffic"]),
            ]
            for arm in (*OUR_ARMS, *PEER_ARMS)
            if counts.get(arm) is not None
        ]
        made.append(
            Table(
                title=f"{PROBLEMS[PROBLEM].title}, {blocks} blocks, batch {BATCH}, "
                f"Adam, compiled for {TARGETS[target].title}",
                columns=["arm", "memory, MB", "float32 / arm", "traffic, MB", "ratio"],
                rows=rows,
                notes=["Higher ratios are better."],
            )
        )
    return made


# An arm of autocast, and the arm with casts by hand that it is judged by. The published
# MPX casts to float16 only.
PAIRS = (
    ("autocast bfloat16, half stream", "mpx bfloat16"),
    ("autocast float16, half stream", "MPX float16"),
)


def goals(found: Results) -> list[Goal]:
    """With a half stream autocast needs no more than casts by hand."""
    made = []
    for (target, blocks), counts in _counts(found).items():
        for arm, peer in PAIRS:
            if counts.get(arm) is None or counts.get(peer) is None:
                continue
            for what in ("memory", "traffic"):
                share = counts[arm][what] / counts[peer][what] - 1
                made.append(
                    Goal(
                        f"{what} of {arm} at most that of {peer} (within 1%): "
                        f"{blocks} blocks, {TARGETS[target].title}: "
                        f"{100 * share:+.2f}%",
                        share <= 0.01,
                    )
                )
    return made
