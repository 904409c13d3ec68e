"""Results of a sweep as a JSON file: one line a case, so that parts can be merged."""

import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rigs.sweep.measure import Result

RESULTS = Path(__file__).parent / "results.json"
_VERSIONS = ("jax", "jaxlib", "optax", "flax", "equinox", "dm-haiku")


def to_row(result: Result) -> dict[str, Any]:
    """Returns a result as JSON holds it: errors as (value, ideal, gradient, ideal)."""
    row: dict[str, Any] = {"verdict": result.verdict}
    for dtype, errors in result.errors.items():
        numbers = (*errors.value, *errors.gradient)
        row[dtype] = [_rounded(n) for n in numbers]
    if result.note:
        row["note"] = result.note
    return row


def _rounded(number: float) -> float | str:
    return float(f"{number:.1e}") if math.isfinite(number) else str(number)


def read(path: Path = RESULTS) -> dict[str, Any]:
    """Returns what a results file holds; nothing where there is none."""
    if not path.exists():
        return {"versions": {}, "commands": [], "cases": {}}
    return json.loads(path.read_text())


def write(
    results: Iterable[Result], command: str, known: Iterable[str], path: Path
) -> None:
    """Merges results into a file and drops cases that are not `known` any more."""
    held = read(path)
    rows = held["cases"] | {r.name: to_row(r) for r in results}
    rows = {name: rows[name] for name in known if name in rows}
    commands = sorted({*held["commands"], command})
    head = {"versions": versions(), "commands": commands}
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in rows.items())
    text = json.dumps(head, indent=1)[:-2] + ',\n "cases": {\n' + lines + "\n }\n}\n"
    path.write_text(text)


def versions() -> dict[str, str]:
    """Returns the versions that decide what is measured."""
    found = {name: importlib.metadata.version(name) for name in _VERSIONS}
    return {"python": platform.python_version()} | found
