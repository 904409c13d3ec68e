"""What the compiled step needs where autocast casts, beside casts written by hand.

The model of the autocast arms is the plain one, without a call of mpx. The explicit
arms are those of the sweep. Both settings of the residual stream are shown: in float32,
autocast's default, and in half precision, as every model with casts by hand has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS
from ..models.problems import PROBLEMS
from ..results import Results
from ..tables import Goal, Table
from . import compiling
from .residuals import WHAT, against
from .sweep import build as build, count as count

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


def _counts(found: Results) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Counts of each arm, for each target and number of blocks."""
    every = found.counts_by("target", "blocks", "problem", "batch", "devices")
    return {
        (target, blocks): counts
        for (target, blocks, *rest), counts in every.items()
        if rest == [PROBLEM, BATCH, 1] and blocks == BLOCKS.get(target, 2)
    }


def tables(found: Results) -> Iterator[Table]:
    """One table for each target."""
    for (target, blocks), counts in _counts(found).items():
        if "float32" not in counts or not any("autocast" in arm for arm in counts):
            continue
        yield Table(
            title=f"{PROBLEMS[PROBLEM].title}, {blocks} blocks, batch {BATCH}, "
            f"Adam, compiled for {TARGETS[target].title}",
            columns="arm | memory, MB | float32 / arm | traffic, MB | ratio",
            rows=[
                [arm, *against(counts["float32"], counts[arm])]
                for arm in (*OUR_ARMS, *PEER_ARMS)
                if arm in counts
            ],
            notes=["Higher ratios are better."],
        )


# An arm of autocast, and the arm with casts by hand that it is judged by. The published
# MPX casts to float16 only.
PAIRS = (
    ("autocast bfloat16, half stream", "mpx bfloat16"),
    ("autocast float16, half stream", "MPX float16"),
)


def goals(found: Results) -> Iterator[Goal]:
    """With a half stream autocast needs no more than casts by hand."""
    for (target, blocks), counts in _counts(found).items():
        for (arm, peer), what in itertools.product(PAIRS, WHAT):
            if counts.keys() >= {arm, peer}:
                share = counts[arm][what] / counts[peer][what] - 1
                text = f"{what} of {arm} at most that of {peer} (within 1%): {blocks} "
                text += f"blocks, {TARGETS[target].title}: {100 * share:+.2f}%"
                yield Goal(text, share <= 0.01)
