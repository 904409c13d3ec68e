"""What dynamic loss scaling moves: bytes added by the scale, the check and the skip.

Question: how many more bytes does the float16 step move with dynamic loss scaling than
the same float16 step without any, in mpx, the published MPX and JMP?

Where activations dominate (large batches) nobody notices; with a small batch the
parameters dominate, and every extra pass over them shows. Each library is compared
with its own step without scaling, and both steps of ours are also in the table in
bytes, so that a costly baseline cannot hide a costly scaling.
"""

from __future__ import annotations

from typing import Any

from . import compiling
from .results import Results
from .tables import Goal, Table, megabytes, signed_percent
from .targets import TARGETS

# (library, its arm with scaling, its arm without)
PAIRS = (
    ("mpx", "mpx float16", "mpx float16 unscaled"),
    ("MPX", "MPX float16", "MPX float16 unscaled"),
    ("JMP", "JMP float16", "JMP float16 unscaled"),
)
BATCHES: dict[str, tuple[int, ...]] = {"base": (8,), "desktop": (256,)}


def run(
    found: Results,
    compiler: compiling.Compiler,
    target: str,
    blocks: int,
    progress: Any,
) -> None:
    """Compiles both steps of every library for a target."""
    ours = [arm for pair in PAIRS[:1] for arm in pair[1:]]
    peers = [arm for pair in PAIRS[1:] for arm in pair[1:]]
    compiler.count(
        found,
        target,
        {
            "ours": compiling.cases_of(BATCHES, ours, blocks, (1,)),
            "peers": compiling.cases_of(BATCHES, peers, blocks, (1,)),
        },
        progress,
    )


def added(found: Results, problem: str, target: str) -> dict[str, tuple[int, int]]:
    """Traffic without and with scaling, of every library."""
    traffic = {}
    for library, scaled, unscaled in PAIRS:
        pair = [
            compiling.find(found.records, problem=problem, target=target, arm=arm)
            for arm in (unscaled, scaled)
        ]
        if all(record is not None and record["counts"] for record in pair):
            traffic[library] = tuple(record["counts"]["traffic"] for record in pair)
    return traffic


def tables(found: Results) -> list[Table]:
    """One row per model, target and library."""
    rows = []
    for problem, target, batch in _setups(found):
        for library, (without, with_) in added(found, problem, target).items():
            rows.append(
                [
                    f"{problem}, batch {batch}, {TARGETS[target].title}",
                    library,
                    megabytes(without),
                    megabytes(with_),
                    signed_percent(with_ / without - 1),
                ]
            )
    blocks = sorted({record["blocks"] for record in found.records})
    return [
        Table(
            title="Traffic added by dynamic loss scaling, "
            f"{' or '.join(map(str, blocks))} blocks, float16",
            columns=["compiled for", "library", "without, MB", "with, MB", "added"],
            rows=rows,
        )
    ]


def _setups(found: Results) -> list[tuple[str, str, int]]:
    return list(
        dict.fromkeys((r["problem"], r["target"], r["batch"]) for r in found.records)
    )


def goals(found: Results) -> list[Goal]:
    """Mpx adds no more than the published MPX."""
    made = []
    for problem, target, batch in _setups(found):
        traffic = added(found, problem, target)
        if not {"mpx", "MPX"} <= traffic.keys():
            continue
        ours, peer = (traffic[name][1] - traffic[name][0] for name in ("mpx", "MPX"))
        made.append(
            Goal(
                f"traffic added by dynamic loss scaling at most MPX's: {problem}, "
                f"batch {batch}, {TARGETS[target].title}: "
                f"{megabytes(ours)} MB, MPX {megabytes(peer)} MB",
                ours <= peer,
            )
        )
    return made
