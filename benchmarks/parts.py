"""Running each benchmark: what it asks of the workers, what it prints and writes.

A benchmark is modules, each with its tables and its goals. Of what is *counted*, a
module has besides

* `CASES`, dataclasses with a `target`;
* `build(fields, devices)`, the step, and `count(compiled, fields)`, its record;
* if need be `compile(lowered, fields)`, which may say more than a count, and
  `more_records()`.

Of what is *measured*, a module has `measure(request)`, which runs in a worker and
yields `{"run": record}`; and `requests(options, found)`, unless one empty request is
all. The workers of a request with `sides` take turns, answer by answer. If it `TRAINS`,
compiled programs are kept on disk; if `FOR_CUDA`, it compiles for GPUs, which
`COMPILED_FOR` names where nothing is measured at all.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import processes, published, results
from .counter import TARGETS
from .counts import (
    compiling,
    few_bits as few_bits_counts,
    half,
    monitor,
    products,
    residuals,
    sweep,
    whole_steps,
    whole_steps_tpu,
    wire,
)
from .numerics import errors, few_bits, recipes, streams
from .peers import environment as peers
from .tables import Goal, Table
from .time import compiling as compile_time, cpu, host

COUNTED: dict[str, tuple[Any, ...]] = {
    "sweep": (sweep,),
    "residuals": (residuals,),
    "workloads": (half, products),
    "whole-steps": (whole_steps,),
    "whole-steps-tpu": (whole_steps_tpu,),
    "wire": (wire,),
    "few-bits": (few_bits_counts,),
    "monitor": (monitor,),
}
MEASURED: dict[str, Any] = {
    "host": host,
    "cpu": cpu,
    "compile-time": compile_time,
    "recipes": recipes,
    "errors": errors,
    "streams": streams,
    "published": published,
    "few-bits-trainings": few_bits,
}
PARTS = COUNTED | {name: (part,) for name, part in MEASURED.items()}
PICTURES = ("sweep", "recipes")


def tables(found: results.Results, parts: Sequence[Any]) -> list[Table]:
    """Those of some modules, one after the other."""
    return [table for part in parts for table in part.tables(found)]


def goals(found: results.Results, name: str) -> list[Goal]:
    """What a benchmark must show, and whether it does."""
    return [goal for part in PARTS[name] for goal in part.goals(found)]


@dataclasses.dataclass
class Session:
    """One run of the command.

    Attributes:
        console: what is printed goes there.
        out: folder of the results.
        command: the command line, for the results.
        log: every count is appended there as soon as it is known.
        known_in: folders whose counts need not be compiled again.
        cuda: folder of JAX's CUDA plugin.
        goals: what was to be shown, so far.
    """

    console: Console
    out: Path
    command: str
    log: Path
    known_in: Sequence[Path] = ()
    cuda: Path = Path(".venv-cuda")
    goals: list[Goal] = dataclasses.field(default_factory=list)
    _peers: peers.Peers | None = None

    @property
    def peers(self) -> peers.Peers:
        """The peers' environment, made at first use."""
        if self._peers is None:
            self._peers = peers.prepare(self.console.print)
        return self._peers

    def count(self, name: str) -> None:
        """Compiles the programs of a benchmark of `COUNTED`, and counts."""
        parts = COUNTED[name]
        named = dict.fromkeys(case.target for part in parts for case in part.CASES)
        targets = [TARGETS[one] for one in named]
        titles = ", ".join(target.title for target in targets)
        found = self._results(name, f"compiled for {titles}")
        platforms = {target.platform for target in targets}
        if "tpu" in platforms and not self._has_libtpu():
            self.console.print(
                f"[yellow]{name}: not run. There is no TPU compiler (`libtpu`) for "
                "this machine; it comes as a wheel for Linux on x86-64 and Arm: "
                '`pip install "jax[tpu]"`.[/]'
            )
            return
        cuda = None
        if "cuda" in platforms:
            cuda = peers.prepare_cuda(self.cuda, self.console.print)
        known = results.KnownCounts(self.known_in, self.log)
        compiler = compiling.Compiler(self.peers, known)
        with compiling.make_progress(self.console) as progress:
            for one, part in itertools.product(targets, parts):
                compiler.libraries = cuda if one.platform == "cuda" else None
                here = [case for case in part.CASES if case.target == one.name]
                cases = [dataclasses.asdict(case) for case in here]
                compiler.count(found, part, one.name, cases, progress)
        self.console.print(
            f"{compiler.compiled} programs compiled, {compiler.reused} unchanged since "
            "they were last compiled (`--fresh` compiles them again)."
        )
        for part in parts:
            if hasattr(part, "more_records"):
                with self.console.status("what no compiler is needed for"):
                    found.records += part.more_records()
        self._show(found)

    def measure(self, name: str, options: Any) -> None:
        """Runs what is measured; writes each record as soon as it is known.

        Args:
            name: of `MEASURED`.
            options: of the command line.
        """
        part, worker = MEASURED[name], {}
        task = part.__name__.partition(".")[2]
        gpus = getattr(part, "COMPILED_FOR", "")
        found = self._results(name, gpus and f"compiled for {gpus}")
        if getattr(part, "FOR_CUDA", False):
            worker["libraries"] = peers.prepare_cuda(self.cuda, self.console.print)
        if getattr(part, "TRAINS", False):
            worker |= self._training()
        make = getattr(part, "requests", lambda *_: [{}])
        for request in make(options, found):
            sides = request.pop("sides", None) or [request.get("side", "ours")]
            worker["turns"] = len(sides) > 1
            workers = {
                side: processes.ask(
                    side,
                    {"task": task, **request, "side": side},
                    self.peers if side == "peers" else None,
                    **worker,
                )
                for side in sides
            }
            with self.console.status(f"{name}, {', '.join(sides)}"):
                for side, answer in processes.in_turns(workers):
                    if "versions" in answer:
                        found.versions[side] = answer["versions"]
                    if "run" in answer:
                        found.records.append(answer["run"])
                        found.write(self.out)
        self._show(found)

    def summarize(self) -> int:
        """Prints which goals are met; returns the exit status."""
        for goal in self.goals:
            mark = "[green]met[/]    " if goal.met else "[red]NOT MET[/]"
            self.console.print(f"{mark} {goal.text}", soft_wrap=True, highlight=False)
        return 0 if all(goal.met for goal in self.goals) else 1

    def _results(self, name: str, device: str = "") -> results.Results:
        device = device or f"measured on {cpu.processor()}"
        return results.Results(name, self.command, device)

    def _has_libtpu(self) -> bool:
        is_here = importlib.util.find_spec("libtpu") is not None
        return is_here or self.peers.libtpu is not None

    def _training(self) -> dict[str, Any]:
        """Options of a worker that trains: of many seeds a program is compiled once."""
        variables = {
            "JAX_COMPILATION_CACHE_DIR": str(self.log.parent.resolve() / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return {"compile_only": False, "variables": variables}

    def _show(self, found: results.Results) -> None:
        for table in tables(found, PARTS[found.name]):
            self.console.print(table.rich())
        self.console.print(found.versions_line(), soft_wrap=True, highlight=False)
        self.console.print(f"Results {found.write(self.out)}\n")
        self.goals += goals(found, found.name)
        if found.name in PICTURES:
            path = self.out / f"{found.name}.png"
            PARTS[found.name][0].picture(found, path)
            self.console.print(f"Picture {path}")
