"""Running each benchmark: what it asks of the workers, what it prints and writes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from . import processes, results
from .counts import (
    activations as activation_counts,
    attention as attention_counts,
    autocast as autocast_counts,
    compiling,
    eight_bits,
    half,
    monitor,
    products as product_counts,
    recipes as recipe_counts,
    residuals as residual_counts,
    scaling as scaling_traffic,
    sweep,
    whole_steps,
    wire,
)
from .counts.targets import TARGETS
from .models.frameworks import UNITS
from .numerics import errors, folds, recipes
from .peers import environment as peers
from .tables import Goal, Table
from .time import autocast as autocast_host, compiling as compile_time, host_table

# What is counted for an H100, in one file.
CUDA = (sweep, autocast_counts, scaling_traffic)
WORKLOADS = (eight_bits, product_counts, half)
HOST = (host_table, autocast_host)


@dataclasses.dataclass
class Session:
    """One run of the command.

    Attributes:
        console: what is printed goes there.
        out: folder of the results.
        command: the command line, for the results.
        log: every count is appended there as soon as it is known.
        known_in: folders whose counts need not be compiled again.
        goals: what was to be shown, so far.
    """

    console: Console
    out: Path
    command: str
    log: Path
    known_in: Sequence[Path] = ()
    goals: list[Goal] = dataclasses.field(default_factory=list)
    _peers: peers.Peers | None = None

    @property
    def peers(self) -> peers.Peers:
        """The peers' environment, made at first use."""
        if self._peers is None:
            self._peers = peers.prepare(self.console.print)
        return self._peers

    def sweep(self, target: str, blocks: int) -> None:
        """Memory and traffic over the batch size."""
        found = self._compiled("sweep", target)
        if found is None:
            return
        with self._compiling() as (compiler, progress):
            sweep.run(found, compiler, target, blocks, progress)
        self._show(found, sweep.tables(found), sweep.goals(found))
        path = self.out / "sweep.png"
        sweep.picture(found, path)
        self.console.print(f"Picture {path}")

    def scaling(self, target: str, blocks: int) -> None:
        """Traffic added by dynamic loss scaling."""
        found = self._compiled("scaling", target)
        if found is None:
            return
        with self._compiling() as (compiler, progress):
            scaling_traffic.run(found, compiler, target, blocks, progress)
        self._show(found, scaling_traffic.tables(found), scaling_traffic.goals(found))

    def autocast(self, target: str) -> None:
        """Memory and traffic where autocast casts."""
        found = self._compiled("autocast", target)
        if found is None:
            return
        with self._compiling() as (compiler, progress):
            autocast_counts.run(found, compiler, target, progress)
        self._show(found, autocast_counts.tables(found), autocast_counts.goals(found))

    def cuda(self, libraries: Path) -> None:
        """Sweep and scaling for an H100, with all the blocks there are time for."""
        found = self._results("cuda", f"compiled for {TARGETS['h100'].title}")
        with self._compiling() as (compiler, progress):
            compiler.libraries = peers.prepare_cuda(libraries, self.console.print)
            sweep.run_reference(found, compiler, "h100", progress)
            autocast_counts.run(found, compiler, "h100", progress)
            scaling_traffic.run(found, compiler, "h100", 4, progress)
        self._show(
            found,
            [table for part in CUDA for table in part.tables(found)],
            [goal for part in CUDA for goal in part.goals(found)],
        )

    def recipe_counts(self, libraries: Path) -> None:
        """Which units recipes run on, for every device that has some."""
        found = self._compiled("recipe-counts", "tpu7x")
        if found is None:
            return
        titles = [TARGETS[name].title for name in UNITS]
        found.device = f"compiled for {', '.join(titles)}"
        with self._compiling() as (compiler, progress):
            cuda = peers.prepare_cuda(libraries, self.console.print)
            for target in UNITS:
                is_cuda = TARGETS[target].platform == "cuda"
                compiler.libraries = cuda if is_cuda else None
                recipe_counts.run(found, compiler, target, progress)
                activation_counts.run(found, compiler, target, progress)
        with self.console.status("bytes kept"):
            _, *answers = processes.ask("ours", {"task": "kept"}, None)
        found.records += [answer["kept"] for answer in answers]
        parts = (recipe_counts, activation_counts)
        self._show(
            found,
            [table for part in parts for table in part.tables(found)],
            [goal for part in parts for goal in part.goals(found)],
        )

    def residuals(self, libraries: Path) -> None:
        """What steps keep where autocast recomputes, for a GPU and a TPU."""
        found = self._compiled("residuals", "v5e")
        if found is None:
            return
        targets = sorted({setup[0] for setup in residual_counts.SETUPS})
        titles = ", ".join(TARGETS[name].title for name in targets)
        found.device = f"compiled for {titles}"
        with self._compiling() as (compiler, progress):
            cuda = peers.prepare_cuda(libraries, self.console.print)
            for target in targets:
                is_cuda = TARGETS[target].platform == "cuda"
                compiler.libraries = cuda if is_cuda else None
                residual_counts.run(found, compiler, target, progress)
        self._show(found, residual_counts.tables(found), residual_counts.goals(found))

    def attention(self, libraries: Path) -> None:
        """What attention in one kernel saves, compiled for an H100."""
        title = TARGETS[attention_counts.TARGET].title
        found = self._results("attention", f"compiled for {title}")
        with self._compiling() as (compiler, progress):
            compiler.libraries = peers.prepare_cuda(libraries, self.console.print)
            attention_counts.run(found, compiler, progress)
        tables, goals = attention_counts.tables(found), attention_counts.goals(found)
        self._show(found, tables, goals)

    def workloads(self, libraries: Path) -> None:
        """Steps in 8 bits beside the peers', in half precision beside a naive cast."""
        targets = tuple(dict.fromkeys(case.target for case in eight_bits.CASES))
        titles = ", ".join(TARGETS[name].title for name in (*targets, half.TPU))
        found = self._results("workloads", f"compiled for {titles}")
        with self._compiling() as (compiler, progress):
            compiler.libraries = peers.prepare_cuda(libraries, self.console.print)
            for target in targets:
                eight_bits.run(found, compiler, target, progress)
                product_counts.run(found, compiler, target, progress)
            half.run(found, compiler, half.TARGET, progress)
            compiler.libraries = None
            half.run(found, compiler, half.TPU, progress)
        self._show(
            found,
            [table for part in WORKLOADS for table in part.tables(found)],
            [goal for part in WORKLOADS for goal in part.goals(found)],
        )

    def whole_steps(self, libraries: Path) -> None:
        """Whole steps of large models under every recipe, beside the peers'."""
        targets = tuple(whole_steps.ARMS)
        titles = ", ".join(TARGETS[name].title for name in targets)
        found = self._results("whole-steps", f"compiled for {titles}")
        with self._compiling() as (compiler, progress):
            compiler.libraries = peers.prepare_cuda(libraries, self.console.print)
            for target in targets:
                whole_steps.run(found, compiler, target, progress)
        with self.console.status("fingerprints without a compiler"):
            found.records += whole_steps.portable_records()
        self._show(found, whole_steps.tables(found), whole_steps.goals(found))

    def wire(self, libraries: Path) -> None:
        """What steps on several devices send, for GPUs and TPUs."""
        found = self._compiled("wire", "v5e")
        if found is None:
            return
        titles = (TARGETS[name].title for name in wire.TARGETS_OF_WIRE)
        found.device = f"compiled for {', '.join(titles)}"
        with self._compiling() as (compiler, progress):
            cuda = peers.prepare_cuda(libraries, self.console.print)
            for target in wire.TARGETS_OF_WIRE:
                is_cuda = TARGETS[target].platform == "cuda"
                compiler.libraries = cuda if is_cuda else None
                wire.run(found, compiler, target, progress)
        self._show(found, wire.tables(found), wire.goals(found))

    def monitor(self, libraries: Path) -> None:
        """What watching a step costs, compiled for an H100."""
        found = self._results(
            "monitor", f"compiled for {TARGETS[monitor.TARGET].title}"
        )
        with self._compiling() as (compiler, progress):
            compiler.libraries = peers.prepare_cuda(libraries, self.console.print)
            monitor.run(found, compiler, progress)
        self._show(found, monitor.tables(found), monitor.goals(found))

    def compile_time(self, libraries: Path) -> None:
        """CPU seconds that the compiler takes, for an H100."""
        found = self._results("compile-time", f"measured on {_processor()}")
        libraries = peers.prepare_cuda(libraries, self.console.print)
        request = {"task": "compile time", "rounds": compile_time.ROUNDS}
        with self.console.status("compile time"):
            answers = processes.ask("ours", request, None, libraries=libraries)
            found.versions["ours"] = next(answers)["versions"]
            found.records = compile_time.records(answers)
        self._show(found, compile_time.tables(found), compile_time.goals(found))

    def host(self, rounds: int) -> None:
        """CPU seconds to trace and to lower."""
        found = self._results("host", f"measured on {_processor()}")
        sides = itertools.product(host_table.RECIPES, host_table.ARMS.items())
        for recipe, (side, arms) in sides:
            request = {
                "task": "host",
                "rounds": rounds,
                "cases": [host_table.case(arm, recipe) for arm in arms],
            }
            with self.console.status(f"host cost, {side}: {', '.join(arms)}"):
                answers = processes.ask(side, request, self.peers)
                found.versions[side] = next(answers)["versions"]
                found.records += host_table.records(side, recipe, answers)
        blocks = autocast_host.BLOCKS
        request = {"task": "autocast host", "rounds": rounds, "blocks": blocks}
        with self.console.status("host cost, autocast"):
            _, *answers = processes.ask("ours", request, self.peers)
            found.records += autocast_host.records(answers)
        self._show(
            found,
            [table for part in HOST for table in part.tables(found)],
            [goal for part in HOST for goal in part.goals(found)],
        )

    def folds(self, seeds: Sequence[int], steps: int | None) -> None:
        """Accuracy over five folds."""
        found = self._results("folds", f"measured on {_processor()}")
        request = {
            "task": "folds",
            "folds": folds.FOLDS,
            "seeds": list(seeds),
            "precisions": folds.PRECISIONS,
            "steps": steps,
        }
        answers = processes.ask(
            "ours", request, None, compile_only=False, variables=self._cache()
        )
        found.versions["ours"] = next(answers)["versions"]
        total = len(folds.FOLDS) * len(folds.PRECISIONS) * len(request["seeds"])
        with compiling.make_progress(self.console) as progress:
            task = progress.add_task("folds: models", total=total)
            for answer in answers:
                found.records.append(answer["run"])
                progress.advance(task)
        self._show(found, folds.tables(found), folds.goals(found))

    def recipes(self, seeds: int, steps: int) -> None:
        """The loss of a GPT under every recipe; goes on where it was interrupted."""
        device = f"measured on {_processor()}"
        found = results.read("recipes", self.out) or self._results("recipes", device)
        found.command, found.device = self.command, device
        found.records = [r for r in found.records if r["steps"] == steps]
        runs = recipes.missing(found, seeds, steps)
        request = {"task": "recipes", "runs": runs, "steps": steps}
        answers = processes.ask(
            "ours", request, None, compile_only=False, variables=self._cache()
        )
        found.versions["ours"] = next(answers)["versions"]
        with compiling.make_progress(self.console) as progress:
            task = progress.add_task("recipes: models", total=len(runs))
            for answer in answers:
                found.records.append(answer["run"])
                found.write(self.out)
                progress.advance(task)
        self._show(found, recipes.tables(found), recipes.goals(found))
        path = self.out / "recipes.png"
        recipes.picture(found, path)
        self.console.print(f"Picture {path}")

    def errors(self) -> None:
        """Relative errors of products of outlier-heavy data."""
        found = self._results("errors", f"measured on {_processor()}")
        request = {"task": "errors", "seeds": errors.SEEDS}
        with self.console.status("errors of products"):
            answers = processes.ask("ours", request, None)
            found.versions["ours"] = next(answers)["versions"]
            found.records += (answer["run"] for answer in answers)
        self._show(found, errors.tables(found), errors.goals(found))

    def _cache(self) -> dict[str, str]:
        """Variables for seeds that share their programs: each is compiled once."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.log.parent.resolve() / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def summarize(self) -> int:
        """Prints which goals are met; returns the exit status."""
        for goal in self.goals:
            mark = "[green]met[/]    " if goal.met else "[red]NOT MET[/]"
            self.console.print(f"{mark} {goal.text}", soft_wrap=True, highlight=False)
        return 0 if all(goal.met for goal in self.goals) else 1

    def _results(self, name: str, device: str) -> results.Results:
        return results.Results(name, self.command, device)

    def _compiled(self, name: str, target: str) -> results.Results | None:
        """Empty results for a TPU target; None, with the reason, without a compiler."""
        if self.peers.libtpu is None and not _has_libtpu():
            self.console.print(
                f"[yellow]{name}: not run. There is no TPU compiler (`libtpu`) for "
                "this machine; it comes as a wheel for Linux on x86-64 and Arm: "
                '`pip install "jax[tpu]"`.[/]'
            )
            return None
        return self._results(name, f"compiled for {TARGETS[target].title}")

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[tuple[compiling.Compiler, Progress]]:
        """A compiler with a progress bar; says at the end what it compiled."""
        known = results.KnownCounts(self.known_in, self.log)
        compiler = compiling.Compiler(self.peers, known)
        with compiling.make_progress(self.console) as progress:
            yield compiler, progress
        self.console.print(
            f"{compiler.compiled} programs compiled, {compiler.reused} unchanged since "
            "they were last compiled (`--fresh` compiles them again)."
        )

    def _show(
        self, found: results.Results, tables: Sequence[Table], goals: Sequence[Goal]
    ) -> None:
        for table in tables:
            self.console.print(table.rich())
        self.console.print(found.versions_line(), soft_wrap=True, highlight=False)
        self.console.print(f"Results {found.write(self.out)}\n")
        self.goals += goals


def _has_libtpu() -> bool:
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


def _processor() -> str:
    """The processor in words, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cores of {name}"


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        yield from path.read_text().splitlines()
