"""What dynamic loss scaling moves: bytes added by the scale, the check and the skip.

Question: how many more bytes does the float16 step move with dynamic loss scaling than
the same float16 step without any, in mpx, the published MPX and JMP?

Where activations dominate (large batches) nobody notices; with a small batch the
parameters dominate, and every extra pass over them shows. Each library is compared
with its own step without scaling, and both steps are also in the table in bytes, so
that a costly baseline cannot hide a costly scaling.

On a TPU the compiler's "bytes accessed" counts every copy that it makes ahead of time
into the memory on the chip as traffic. Where it says which arrays are there, the table
also has the bytes that cross the chip's edge, which are what costs time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..counter import TARGETS
from ..results import Results
from ..tables import Goal, Table, megabytes, signed_percent
from . import compiling
from .sweep import build as build, count as count

# (library, its arm with scaling, its arm without)
PAIRS = (
    ("mpx", "mpx float16", "mpx float16 unscaled"),
    ("MPX", "MPX float16", "MPX float16 unscaled"),
    ("JMP", "JMP float16", "JMP float16 unscaled"),
)
BATCHES: dict[str, tuple[int, ...]] = {"base": (8,), "desktop": (256,)}


def cases(target: str, blocks: int) -> list[dict[str, Any]]:
    """Both steps of every library."""
    arms = [arm for pair in PAIRS for arm in pair[1:]]
    return compiling.cases_of(BATCHES, arms, blocks)


@dataclasses.dataclass(frozen=True)
class Setup:
    """One size of one model on one target."""

    problem: str
    target: str
    batch: int
    blocks: int

    def __str__(self) -> str:
        title = TARGETS[self.target].title
        return f"{self.problem}, batch {self.batch}, {self.blocks} blocks, {title}"


def setups(found: Results) -> list[Setup]:
    """Where a step without scaling was compiled, which only this benchmark does."""
    unscaled = {pair[2] for pair in PAIRS}
    names = [field.name for field in dataclasses.fields(Setup)]
    return list(
        dict.fromkeys(
            Setup(**{name: record[name] for name in names})
            for record in found.records
            if record["arm"] in unscaled
        )
    )


def traffic(
    found: Results, setup: Setup, what: str = "traffic"
) -> dict[str, tuple[int, int]]:
    """A count without and with scaling, of every library that has it."""
    by_library = {}
    for library, scaled, unscaled in PAIRS:
        pair = [
            compiling.find(found.records, **dataclasses.asdict(setup), arm=arm)
            for arm in (unscaled, scaled)
        ]
        moved = [r["counts"].get(what) for r in pair if r and r["counts"]]
        if len(moved) == 2 and None not in moved:
            by_library[library] = (moved[0], moved[1])
    return by_library


def tables(found: Results) -> list[Table]:
    """One row per model, target and library."""
    rows = []
    for setup in setups(found):
        off_chip = traffic(found, setup, "off_chip")
        for library, moved in traffic(found, setup).items():
            row = [str(setup), library]
            for pair in (moved, off_chip.get(library)):
                row += _cells(*pair) if pair else ["", "", ""]
            rows.append(row)
    return [
        Table(
            title="Traffic added by dynamic loss scaling, float16",
            columns="compiled for | library | without, MB | with, MB | added | "
            "off-chip without, MB | with, MB | added",
            rows=rows,
        )
    ]


def _cells(without: int, with_: int) -> list[str]:
    added = signed_percent(with_ / without - 1)
    return [megabytes(without), megabytes(with_), added]


# Two programs that do the same are scheduled differently by the compiler and differ by
# some kilobytes; less than this share of the step's traffic is no difference.
NOISE = 1e-3


def goals(found: Results) -> Iterator[Goal]:
    """Nothing more than what the published MPX adds."""
    for setup in setups(found):
        for what, title in (("traffic", "traffic"), ("off_chip", "off-chip traffic")):
            moved = traffic(found, setup, what)
            if moved.keys() >= {"mpx", "MPX"}:
                ours, peer = (
                    moved[name][1] - moved[name][0] for name in ("mpx", "MPX")
                )
                text = f"{title} added by dynamic loss scaling at most MPX's, within "
                text += (
                    f"{100 * NOISE:.1f}% of the step: {setup}: {megabytes(ours)} MB, "
                )
                text += f"MPX {megabytes(peer)} MB"
                yield Goal(text, ours <= peer + NOISE * moved["MPX"][0])
