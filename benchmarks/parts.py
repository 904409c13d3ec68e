"""Running each benchmark: what it asks of the workers, what it prints and writes.

A benchmark is modules, each with its tables and its goals. Of what is *counted*, a
module has besides

* `CASES`, dataclasses with a `target`, or `cases(target, blocks)`, their fields;
* `build(fields, devices)`, the step, and `count(compiled, fields)`, its record;
* if need be `VARIABLES` of the worker's environment, `compile_with(lower)` for what
  else is asked of the compiler, and `more_records()`.

What is *measured* has a function here, and in its module a `measure(request)` that
runs in a worker.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import processes, published, results
from .counter import TARGETS
from .counts import (
    compiling,
    eight_bits,
    few_bits as few_bits_counts,
    half,
    monitor,
    products,
    residuals,
    sweep,
    whole_steps,
    wire,
)
from .numerics import errors, few_bits, folds, recipes
from .peers import environment as peers
from .tables import Goal, Table
from .time import autocast as autocast_host, compiling as compile_time, host

COUNTED: dict[str, tuple[Any, ...]] = {
    "sweep": (sweep,),
    "residuals": (residuals,),
    "workloads": (eight_bits, half, products),
    "whole-steps": (whole_steps,),
    "wire": (wire,),
    "few-bits": (few_bits_counts,),
    "monitor": (monitor,),
}
PARTS: dict[str, tuple[Any, ...]] = COUNTED | {
    "host": (host, autocast_host),
    "compile-time": (compile_time,),
    "folds": (folds,),
    "recipes": (recipes,),
    "errors": (errors,),
    "published": (published,),
    "few-bits-trainings": (few_bits,),
}
PICTURES = ("sweep", "recipes")


def tables(found: results.Results, parts: Sequence[Any]) -> list[Table]:
    """Those of some modules, one after the other."""
    return [table for part in parts for table in part.tables(found)]


def goals(found: results.Results, name: str) -> list[Goal]:
    """What a benchmark must show, and whether it does."""
    return [goal for part in PARTS[name] for goal in part.goals(found)]


def cases_of(part: Any, target: str, blocks: int) -> list[dict[str, Any]]:
    """The fields of what a module compiles for a target."""
    if hasattr(part, "cases"):
        return part.cases(target, blocks)
    return [dataclasses.asdict(case) for case in part.CASES if case.target == target]


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

    def count(self, name: str, target: str, blocks: int) -> None:
        """Compiles the programs of a benchmark, and counts.

        Args:
            name: of `COUNTED`.
            target: that those are compiled for which say none.
            blocks: of the Vision Transformers.
        """
        parts = COUNTED[name]
        named = [case.target for part in parts for case in getattr(part, "CASES", ())]
        targets = [TARGETS[one] for one in dict.fromkeys(named or [target])]
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
                cases = cases_of(part, one.name, blocks)
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

    def compile_time(self) -> None:
        """CPU seconds that the compiler takes, for an H100."""
        libraries = peers.prepare_cuda(self.cuda, self.console.print)
        request = {"task": "compile time", "rounds": compile_time.ROUNDS}
        found = self._results("compile-time")
        answers = self._answers(found, "ours", request, libraries=libraries)
        found.records = compile_time.records(answers)
        self._show(found)

    def host(self, rounds: int) -> None:
        """CPU seconds to trace and to lower."""
        found = self._results("host")
        for recipe, (side, arms) in itertools.product(host.RECIPES, host.ARMS.items()):
            cases = [host.case(arm, recipe) for arm in arms]
            request = {"task": "host", "rounds": rounds, "cases": cases}
            answers = self._answers(found, side, request, peers=self.peers)
            found.records += host.records(side, recipe, answers)
        blocks = autocast_host.BLOCKS
        request = {"task": "autocast host", "rounds": rounds, "blocks": blocks}
        answers = self._answers(found, "ours", request, peers=self.peers)
        found.records += autocast_host.records(answers)
        self._show(found)

    def folds(self, seeds: Sequence[int], steps: int | None) -> None:
        """Accuracy over five folds."""
        request = {
            "task": "folds",
            "folds": folds.FOLDS,
            "seeds": list(seeds),
            "precisions": folds.PRECISIONS,
            "steps": steps,
        }
        total = len(folds.FOLDS) * len(folds.PRECISIONS) * len(seeds)
        self._runs(self._results("folds"), request, total, **self._training())

    def recipes(self, seeds: int, steps: int) -> None:
        """The loss of a GPT under every recipe; goes on where it was interrupted."""
        new = self._results("recipes")
        found = results.read("recipes", self.out) or new
        found.command, found.device = new.command, new.device
        found.records = [r for r in found.records if r["steps"] == steps]
        runs = recipes.missing(found, seeds, steps)
        request = {"task": "recipes", "runs": runs, "steps": steps}
        self._runs(found, request, len(runs), **self._training())

    def errors(self) -> None:
        """Relative errors of products of outlier-heavy data."""
        request = {"task": "errors", "seeds": errors.SEEDS}
        runs = len(errors.DATA) * len(errors.ARMS) + len(errors.WITH_TECHNIQUES)
        self._runs(self._results("errors"), request, errors.SEEDS * runs)

    def published(self) -> None:
        """What is forecast, beside speed-ups that others have measured."""
        libraries = peers.prepare_cuda(self.cuda, self.console.print)
        found = self._results("published", "compiled for NVIDIA H100, H200, B200, B300")
        request = {"task": "published"}
        self._runs(found, request, len(published.STEPS), libraries=libraries)

    def few_bits(self) -> None:
        """The losses of trainings with moments in 8 bits."""
        runs = few_bits.runs()
        request = {"task": "few bits", "runs": runs, "steps": few_bits.STEPS}
        found = self._results("few-bits-trainings")
        self._runs(found, request, 2 * len(runs), compile_only=False)

    def summarize(self) -> int:
        """Prints which goals are met; returns the exit status."""
        for goal in self.goals:
            mark = "[green]met[/]    " if goal.met else "[red]NOT MET[/]"
            self.console.print(f"{mark} {goal.text}", soft_wrap=True, highlight=False)
        return 0 if all(goal.met for goal in self.goals) else 1

    def _results(self, name: str, device: str = "") -> results.Results:
        device = device or f"measured on {_processor()}"
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

    def _answers(
        self,
        found: results.Results,
        side: processes.Side,
        request: dict[str, Any],
        peers: peers.Peers | None = None,
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """What a worker answers, after its versions."""
        answers = processes.ask(side, request, peers, **options)
        found.versions[side] = next(answers)["versions"]
        with self.console.status(f"{found.name}: {request['task']}, {side}"):
            yield from answers

    def _runs(
        self,
        found: results.Results,
        request: dict[str, Any],
        total: int,
        **options: Any,
    ) -> None:
        """Adds a record for each run of a worker, and writes what is there at once."""
        answers = processes.ask("ours", request, None, **options)
        found.versions["ours"] = next(answers)["versions"]
        with compiling.make_progress(self.console) as progress:
            task = progress.add_task(f"{found.name}: runs", total=total)
            for answer in answers:
                found.records.append(answer["run"])
                found.write(self.out)
                progress.advance(task)
        self._show(found)

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


def _processor() -> str:
    """The processor in words, and how many of its cores this process may use."""
    name, about = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    for line in about.read_text().splitlines() if about.is_file() else ():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cores of {name}"
