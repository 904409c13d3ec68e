"""Compiling a list of cases for a target, on both sides, and keeping the counts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .. import processes, results
from ..peers.environment import Peers
from .targets import TARGETS

Record = dict[str, Any]


@dataclasses.dataclass
class Compiler:
    """Compiles cases, one at a time.

    Attributes:
        peers: the peers' environment.
        known: counts of programs compiled before.
        libraries: a folder with the target's compiler, where it is not installed.
        compiled: how many programs were compiled.
        reused: how many were known.
    """

    peers: Peers
    known: results.KnownCounts
    libraries: Path | None = None
    compiled: int = 0
    reused: int = 0

    def count(
        self,
        found: results.Results,
        target_name: str,
        sides: Mapping[processes.Side, Sequence[dict[str, Any]]],
        progress: Progress,
        *,
        steps: str = "vit",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Adds a record for every case to `found`.

        Args:
            found: takes records and versions.
            target_name: a name of `targets.TARGETS`.
            sides: the cases of each environment, as fields of `steps.Case`.
            progress: shows how far it is.
            steps: what they are cases of, a name of `worker.STEPS`.
            variables: further environment variables.
        """
        total = sum(map(len, sides.values()))
        task = progress.add_task(f"{found.name} for {target_name}", total=total)
        platform = TARGETS[target_name].platform
        for side, cases in sides.items():
            if not cases:
                continue
            # One worker for all: JAX starts once, and what is shared is traced once.
            request = {
                "task": "count",
                "target": target_name,
                "steps": steps,
                "cases": list(cases),
                "known": sorted(
                    (program, by)
                    for program, target, by in self.known.counts
                    if target == target_name
                ),
            }
            answers = processes.ask(
                side,
                request,
                self.peers,
                libraries=self.libraries,
                variables=variables,
            )
            versions = next(answers)["versions"]
            found.versions[side] = versions
            by = results.compiler(versions, platform)
            for answer in answers:
                self._add(found, answer, target_name, by)
                progress.advance(task)
        progress.remove_task(task)

    def _add(
        self, found: results.Results, answer: dict[str, Any], target: str, by: str
    ) -> None:
        program = answer["program"]
        if "counts" in answer:
            self.compiled += 1
            self.known.add(program, target, by, answer["counts"])
        else:
            self.reused += 1
        found.records.append(
            {
                **answer["case"],
                "target": target,
                "program": program,
                "compiler": by,
                "counts": self.known.counts[program, target, by],
            }
        )


def make_progress(console: Any) -> Progress:
    """A progress bar for compilations."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
    )


def cases_of(
    problems: dict[str, Sequence[int]],
    arms: Sequence[str],
    blocks: int,
    devices: Sequence[int],
) -> list[dict[str, Any]]:
    """The product of problems with their batches, device counts and arms."""
    return [
        {
            "problem": problem,
            "arm": arm,
            "batch": batch,
            "blocks": blocks,
            "devices": count,
        }
        for problem, batches in problems.items()
        for count, batch, arm in itertools.product(devices, batches, arms)
    ]


def find(records: Sequence[Record], **fields: Any) -> Record | None:
    """The record with these fields, or None."""
    for record in records:
        if all(record.get(name) == value for name, value in fields.items()):
            return record
    return None
