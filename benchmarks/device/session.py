"""The process that asks: part after part within a budget, and writes what it hears."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import processes, results
from ..peers.environment import Peers
from . import plan, tables
from .plan import ABOUT, Case, Sizes

# Seconds in which a case must be done: compiling for longer is an error of its own.
PATIENCE = 240.0
# What is begun must have time to end.
LEAST = 10.0
NO_PEERS = (
    "the published MPX and JMP are not here: `make bench` installs them, and "
    "`--peers FOLDER` takes a folder that has them"
)


@dataclasses.dataclass
class Session:
    """One call of the command.

    Attributes:
        console: What is printed goes there.
        out: Folder of the results.
        command: The command line, for the results.
        commit: What was measured.
        until: When to stop, on the monotonic clock.
        platform: `"gpu"`; `"cpu"` in tests.
        sizes: How large everything is.
        peers: Where the peers are; None if they are not here.
        fresh: Measure also what an earlier call has.
    """

    console: Console
    out: Path
    command: str
    commit: str
    until: float
    platform: str = "gpu"
    sizes: Sizes = plan.FULL
    peers: Peers | None = None
    fresh: bool = False

    def run(self, parts: Sequence[str]) -> results.Results | None:
        """Measures what is missing of some parts; None where there is no device."""
        found = self._begin()
        if found is None:
            return None
        for part in parts:
            until = min(self.until, time.monotonic() + plan.SECONDS[part])
            self._measure(found, part, until)
        return found

    def left(self, found: results.Results, parts: Sequence[str]) -> int:
        """How many cases of some parts have not been measured."""
        return sum(len(self._missing(found, part)) for part in parts)

    # --- The device, and what is known of it ------------------------------------------

    def _begin(self) -> results.Results | None:
        """What an earlier call found on this device, or nothing yet."""
        answers = self._ask([ABOUT], min(self.until, time.monotonic() + PATIENCE))
        versions, device, *rest = answers
        name = device["device"]
        if name is None:
            self.console.print("[yellow]device: not run, JAX finds no GPU here.[/]")
            return None
        file = f"device-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}"
        found = None if self.fresh else self._known(file)
        if found is None:
            found = results.Results(file, self.command, f"measured on {name}")
        elif found.versions["ours"] != versions["versions"]:
            raise RuntimeError(
                f"{file}.json was measured with {found.versions['ours']}; got "
                f"{versions['versions']}. `--fresh` measures everything again."
            )
        found.versions["ours"] = versions["versions"]
        self._save(found, ABOUT, rest[-1]["record"])
        return found

    def _known(self, file: str) -> results.Results | None:
        """From the folder of the results, else what is committed."""
        return results.read(file, self.out) or results.read(file)

    # --- Parts ------------------------------------------------------------------------

    def _missing(self, found: results.Results, part: str) -> list[Case]:
        """Cases without an answer; those that were not finished come last."""
        known = {Case.of(r): r for r in found.records if r["part"] == part}
        cases = plan.cases(part, self.sizes)
        new = [case for case in cases if case not in known or "skipped" in known[case]]
        return new + [
            case for case in cases if case in known and known[case].get("unfinished")
        ]

    def _measure(self, found: results.Results, part: str, until: float) -> None:
        todo = self._missing(found, part)
        while todo and time.monotonic() < until - LEAST:
            batch = _first_of(todo)
            if batch[0].side == "peers" and self.peers is None:
                for case in batch:
                    self._save(found, case, {"skipped": NO_PEERS})
                del todo[: len(batch)]
                continue
            done = self._work(found, batch, until)
            if not done:
                break
            todo = [case for case in todo if case not in done]

    def _work(
        self, found: results.Results, batch: list[Case], until: float
    ) -> list[Case]:
        """Has one worker measure cases; gives those that now have a record."""
        done: list[Case] = []
        running: Case | None = None
        try:
            for answer in self._ask(batch, until):
                if "versions" in answer:
                    found.versions[batch[0].side] = answer["versions"]
                elif "started" in answer:
                    running = batch[answer["started"]]
                elif "case" in answer:
                    case = batch[answer["case"]]
                    self._save(found, case, answer["record"])
                    done.append(case)
                    running = None
        except processes.WorkerError as error:
            # What ran is to blame; if nothing did, no case of this worker can. But not
            # where time was over.
            record: dict[str, Any] = {"error": " ".join(str(error).split())[-400:]}
            is_over = time.monotonic() >= until
            if running is None and is_over:
                return done
            if is_over:
                record["unfinished"] = True
            for case in batch if running is None else [running]:
                if case not in done:
                    self._save(found, case, record)
                    done.append(case)
        return done

    def _ask(self, cases: Sequence[Case], until: float) -> Iterator[dict[str, Any]]:
        names = ("PYTHONPATH",)  # what the machine needs to find its packages
        variables = {name: os.environ[name] for name in names if name in os.environ}
        variables |= _cache()
        if self.platform == "cpu":
            variables["JAX_PLATFORMS"] = "cpu"
        request = {
            "task": "device.measure",
            "platform": self.platform,
            "sizes": dataclasses.asdict(self.sizes),
            "cases": [dataclasses.asdict(case) for case in cases],
            "seconds": until - LEAST - time.monotonic(),
        }
        return processes.ask(
            cases[0].side,
            request,
            self.peers,
            compile_only=False,
            variables=variables,
            patience=lambda: min(PATIENCE, until - time.monotonic()),
        )

    # --- Results ----------------------------------------------------------------------

    def _save(self, found: results.Results, case: Case, record: dict[str, Any]) -> None:
        """Puts a record in the place of the one before, and writes all."""
        fields = {k: v for k, v in dataclasses.asdict(case).items() if v}
        whole = json.loads(json.dumps({**fields, **record, "commit": self.commit}))
        places = [i for i, r in enumerate(found.records) if Case.of(r) == case]
        if places:
            found.records[places[0]] = whole
        else:
            found.records.append(whole)
        found.command = self.command
        found.write(self.out)
        self._say(tables.name(case), whole)

    def _say(self, what: str, record: dict[str, Any]) -> None:
        text = tables.in_short(record)
        self.console.print(f"{what}: {text}", soft_wrap=True, highlight=False)


def _cache() -> dict[str, str]:
    """Variables for programs that are compiled once, also where a run goes on."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or "runs/bench/programs"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(Path(folder).resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def _first_of(todo: list[Case]) -> list[Case]:
    """The cases that the next worker is asked for."""
    sides = [case.side for case in todo]
    other = next((i for i, side in enumerate(sides) if side != sides[0]), len(todo))
    return todo[:other]
