"""Compiling a list of cases for a target, on both sides, and keeping the counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .. import processes, results
from ..counter import TARGETS
from ..peers.environment import Peers


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
        part: Any,
        target: str,
        cases: Sequence[dict[str, Any]],
        progress: Progress,
    ) -> None:
        """Adds a record for every case to `found`.

        Args:
            found: takes records and versions.
            part: the module that builds and counts them; see `parts`.
            target: a name of `targets.TARGETS`.
            cases: their fields.
            progress: shows how far it is.
        """
        task = progress.add_task(f"{found.name} for {target}", total=len(cases))
        for side in get_args(processes.Side):
            ours = [case for case in cases if processes.side_of(_arm(case)) == side]
            if not ours:
                continue
            # One worker for all: JAX starts once, and what is shared is traced once.
            request = {
                "task": "count",
                "target": target,
                "steps": part.__name__.rpartition(".")[2],
                "cases": ours,
                "known": sorted(
                    (p, by) for p, on, by in self.known.counts if on == target
                ),
            }
            answers = processes.ask(side, request, self.peers, libraries=self.libraries)
            versions = next(answers)["versions"]
            found.versions[side] = versions
            by = results.compiler(versions, TARGETS[target].platform)
            for answer in answers:
                self._add(found, answer, target, by)
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
        of = {"target": target, "program": program, "compiler": by}
        counts = self.known.counts[program, target, by]
        found.records.append({**answer["case"], **of, "counts": counts})


def make_progress(console: Any) -> Progress:
    """A progress bar for compilations."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=console, transient=True)


def _arm(case: dict[str, Any]) -> str:
    return case.get("arm", "")
