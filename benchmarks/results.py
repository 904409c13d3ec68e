"""Results on disk: one JSON file per benchmark, with all that a number depends on.

Compiling is deterministic: the same program and the same compiler give the same counts.
So a compiled case keeps the fingerprint of its program, and a later run compiles only
what has changed since; `--fresh` compiles everything again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COMMITTED = Path(__file__).resolve().parent / "results"


@dataclasses.dataclass
class Results:
    """What one benchmark found.

    Attributes:
        name: of the benchmark, and of its file.
        command: that made it.
        device: that it was measured on, or compiled for.
        versions: of the packages in each environment.
        records: one per measured case; their fields are the benchmark's own.
        notes: what a reader must know, such as what was not run and why.
    """

    name: str
    command: str
    device: str
    versions: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Writes `NAME.json` and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        # One record a line, so that a change shows as the lines that changed.
        head = dataclasses.asdict(self)
        records = ",\n".join("  " + json.dumps(r) for r in head.pop("records"))
        text = json.dumps(head, indent=1).rstrip("\n}")
        # At once, so that whoever is killed meanwhile leaves the one before.
        new = path.with_name(f"{path.name}.new")
        new.write_text(f'{text},\n "records": [\n{records}\n ]\n}}\n')
        return new.replace(path)

    def counts_by(
        self, *names: str, arm: str = "arm"
    ) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
        """Counts of each arm, by the fields that are the same for arms to compare.

        Args:
            *names: of these fields; a record that lacks one is left out, and so is one
                of what did not fit into the device's memory.
            arm: the field that tells the arms apart.
        """
        made: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for record in self.records:
            if record.keys() >= {*names, arm} and record.get("counts") is not None:
                setup = tuple(record[name] for name in names)
                made.setdefault(setup, {})[record[arm]] = record["counts"]
        return made

    def versions_line(self) -> str:
        """The versions as one sentence."""
        merged: dict[str, dict[str, None]] = {}
        for versions in self.versions.values():
            for name, version in versions.items():
                merged.setdefault(name, {})[version] = None
        return ", ".join(
            f"{name} {' and '.join(each)}" for name, each in merged.items()
        )


def read(name: str, folder: Path = COMMITTED) -> Results | None:
    """Reads `NAME.json`; None where there is none."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    return Results(**json.loads(path.read_text()))


def read_all(name: str, folder: Path = COMMITTED) -> list[Results]:
    """What was found under a name; of `device`, on every device."""
    names = [path.stem for path in sorted(folder.glob("device-*.json"))]
    every = (read(one, folder) for one in (names if name == "device" else [name]))
    return [found for found in every if found is not None]


def compiler(versions: dict[str, str], platform: str) -> str:
    """The version of what compiles for a platform.

    On TPU that is `libtpu` alone; on CUDA the compiler is in the plugin, which has
    the version of jaxlib.
    """
    name = "libtpu" if platform == "tpu" else "jaxlib"
    return f"{name} {versions.get(name, 'unknown')}"


class KnownCounts:
    """Counts of programs compiled before, by program, target and compiler.

    Reads them from results, and from a log that every new one is appended to at once,
    so that an interrupted run is not lost.
    """

    def __init__(self, folders: Iterable[Path], log: Path):
        """Reads all results in `folders` and the log; nothing if there are none."""
        self.log = log
        self.counts: dict[tuple[str, str, str], dict[str, Any] | None] = {}
        for folder in folders:
            for path in sorted(folder.glob("*.json")):
                self._read(json.loads(path.read_text()).get("records", ()))
            for path in sorted(folder.glob("*.jsonl")):
                self._read(map(json.loads, path.read_text().splitlines()))

    def _read(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            if {"program", "target", "compiler", "counts"} <= record.keys():
                key = (record["program"], record["target"], record["compiler"])
                self.counts[key] = record["counts"]

    def add(
        self, program: str, target: str, by: str, counts: dict[str, Any] | None
    ) -> None:
        """Remembers the counts of a program; None if it does not fit."""
        self.counts[program, target, by] = counts
        record = {"program": program, "target": target, "compiler": by}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as file:
            file.write(json.dumps({**record, "counts": counts}) + "\n")
