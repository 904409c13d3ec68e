"""Starting processes and gathering their records; none can lose those of the others."""

import importlib.metadata
import json
import os
import platform
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .exports import EXPORTED
from .programs import PACKAGES, programs_of
from .record import PRECISIONS, Client

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PARTS = ("programs", "layouts", "exports")
SECONDS = 1800
"""How long a program may take; a machine that does other things is slow."""

# A computation of eight devices for layouts, of one for the others, on a CPU.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "KERAS_BACKEND": "jax",
    "USE_TORCH": "0",
    "USE_TF": "0",
}
_EIGHT = "--xla_force_host_platform_device_count=8"


def clients(only: list[str] | None = None) -> dict[str, tuple[str, Client]]:
    """All programs by name, with their modules, in the order of the table.

    Args:
        only: Names of programs, packages or modules; None is all.
    """
    return {
        name: (module, found)
        for module in PACKAGES
        for name, found in programs_of(module).items()
        if only is None or {name, module, found.package} & set(only)
    }


class _Worker:
    """A process that measures programs of one module."""

    def __init__(self, module: str, programs: list[str], task: str, options: Any):
        environment = os.environ | _ENVIRONMENT
        # Compile times are those of programs that were never compiled before.
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        if task == "layouts":
            environment["XLA_FLAGS"] = _EIGHT
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rigs.clients.worker"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        request = {"module": module, "programs": programs, "task": task}
        request["options"] = options
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()
        assert self.process.stdin is not None
        json.dump(request, self.process.stdin)
        self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-20:], line]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends or says nothing for too long."""
        while True:
            try:
                line = self.lines.get(timeout=SECONDS)
            except queue.Empty:
                self.process.kill()
                self.errors = [f"took more than {SECONDS} seconds"]
                return
            if line is None:
                self.process.wait()
                return
            yield json.loads(line)


def measure_module(
    module: str, programs: list[str], task: str, options: Any
) -> Iterator[dict[str, Any]]:
    """Records of programs of one module; a process that dies costs one of them."""
    left = list(programs)
    while left:
        worker = _Worker(module, list(left), task, options)
        at = left[0]
        for line in worker:
            at = line.get("begin", at)
            if "record" in line:
                left.remove(line["program"])
                yield {"program": line["program"], **line["record"]}
                at = left[0] if left else at
        if left:
            words = " ".join("".join(worker.errors[-3:]).split())[-300:]
            left.remove(at)
            yield {"program": at, "error": f"the process ended: {words}"}


def run(
    only: list[str] | None,
    task: str,
    options: Any,
    jobs: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measures programs, several modules at a time, and returns their records."""
    chosen = clients(only)
    if task == "layouts":
        chosen = {n: pair for n, pair in chosen.items() if pair[1].layouts}
    if task == "exports":
        chosen = {n: pair for n, pair in chosen.items() if n in EXPORTED}
    waiting: queue.Queue[tuple[str, list[str]]] = queue.Queue()
    for module in PACKAGES:
        names = [n for n, (m, _) in chosen.items() if m == module]
        if names:
            waiting.put((module, names))
    records: list[dict[str, Any]] = []

    def work() -> None:
        while True:
            try:
                module, names = waiting.get_nowait()
            except queue.Empty:
                return
            for record in measure_module(module, names, task, options):
                client = chosen[record["program"]][1]
                records.append({"package": client.package, **record})
                say(f"{task}: {len(records)}/{len(chosen)} {record['program']}")

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = list(chosen)
    return sorted(records, key=lambda r: order.index(r["program"]))


def versions(packages: list[str]) -> dict[str, str]:
    """Of Python, of JAX and of packages."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", *sorted(set(packages))):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read(path: Path = RESULTS) -> dict[str, Any]:
    """The results of a run; empty ones where there are none."""
    none = {"versions": {}, **{part: [] for part in PARTS}}
    return none | (json.loads(path.read_text()) if path.is_file() else {})


def with_words(records: list[Any], clients: dict[str, Any]) -> list[Any]:
    """Records with what the programs say today, less what they no longer run in."""
    found = []
    for record in records:
        words = clients[record["program"]][1].words
        gone = set(PRECISIONS) - set(words["precisions"])
        kept = {k: v for k, v in record.items() if k not in gone}
        found.append({**kept, **words})
    return found


def merge(before: list[Any], new: list[Any], order: list[str]) -> list[Any]:
    """Records with new ones in place of old ones; those of programs that went, go."""
    found = {r["program"]: r for r in [*before, *new]}
    return [found[name] for name in order if name in found]


def write(results: dict[str, Any], path: Path = RESULTS) -> None:
    """Writes results, one record a line."""
    lines = [f' "versions": {json.dumps(results["versions"])}']
    for part in PARTS:
        records = ",\n".join("  " + json.dumps(_rounded(r)) for r in results[part])
        lines.append(f' "{part}": [\n{records}\n ]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rounded(value: Any) -> Any:
    """Numbers with the digits that say something, texts without this folder."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, str):
        # The environment may be a link to that of another folder.
        return re.sub(r"(/[^/\s:]+)*/(?=\.venv)", "", value).replace(f"{ROOT}/", "")
    return float(f"{value:.3g}") if isinstance(value, float) else value
