"""Prints which tests look at a line of `mpx`.

    python -m tests.of mpx/_autocast/_travel.py:120
    python -m tests.of mpx/_autocast/_travel.py:120 --run

The first prints the tests of the line's area (`tests/areas.py`) as a command. The
second runs these tests once with a recorder (`tests/reached.py`) and prints those that
reach the line, quickest first. The record of each area is kept in `.reached_cache/`.
Later calls read it at once, also after an edit: the line is then looked up in the files
as they were recorded.

If JAX or mpx caches a result, the first test of a process computes it. Later tests that
need the same line are then missing from the list.
"""

import argparse
import difflib
import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import reached
from tests.areas import AREAS, ROOT, area_of

CACHE = ROOT / ".reached_cache"


def line_before(old: str, new: str, line: int) -> int:
    """Returns the line of an old text that became a line of a new one."""
    match = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), False)
    for _, i, i_end, j, j_end in match.get_opcodes():
        if j < line <= j_end:
            return max(1, min(i + line - j, i_end))
    return line


def state_of(root: Path) -> str:
    """Returns a digest of `mpx` and the tests."""
    mpx, tests = (sorted((root / part).rglob("*.py")) for part in ("mpx", "tests"))
    digest = hashlib.sha256()
    for file in (*mpx, *tests, root / "conftest.py"):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def record(area: str, processes: int) -> Path:
    """Runs the tests of an area with the recorder, unless the record is up to date."""
    folder, state = _folder(area), state_of(ROOT)
    if _state(folder) != state:
        shutil.rmtree(folder, ignore_errors=True)
        reached.record(ROOT, folder, AREAS[area].split(), processes)
        shutil.copytree(ROOT / "mpx", folder / "mpx")
        (folder / "state").write_text(state)
    return folder


def _folder(area: str) -> Path:
    return CACHE / area.replace("/", "+")


def _state(folder: Path) -> str:
    """Returns the digest that a record was made of; empty if there is no record."""
    path = folder / "state"
    return path.read_text() if path.exists() else ""


def tests_of(folder: Path, file: str, line: int) -> list[str]:
    """Returns the tests of a record that reach a line; "" is an import."""
    if not (folder / file).exists():  # added or renamed since
        return [""]
    old = (folder / file).read_text()
    _, key = reached.where(file, old, line_before(old, (ROOT / file).read_text(), line))
    return reached.read(folder).get(key, []) if key else [""]


def show(folder: Path, tests: list[str], most: int) -> None:
    """Prints tests, and the command that runs them."""
    seconds = reached.seconds_of(folder)
    total = sum(seconds[test] for test in tests)
    print(f"{len(tests)} tests reach it in {total:.1f} s, the quickest first:")
    for test in tests[:most]:
        print(f"    {seconds[test]:6.2f} s  {test}")
    if len(tests) > most:
        print(f"    and {len(tests) - most} more (--most)")
    (folder / "tests").write_text("\n".join(tests))
    print(f"    python -m pytest -x @{(folder / 'tests').relative_to(ROOT)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tests of a line; returns 1 if none reaches it."""
    parser = argparse.ArgumentParser(prog="python -m tests.of", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("place", metavar="FILE:LINE")
    parser.add_argument("--run", action="store_true", help="record what tests reach")
    parser.add_argument("--processes", type=int, default=2, help="of --run")
    parser.add_argument("--most", type=int, default=20, help="tests that are printed")
    given = parser.parse_args(arguments)
    name, _, number = given.place.partition(":")
    path = Path(name).resolve()
    if not path.is_relative_to(ROOT / "mpx") or path.suffix != ".py" or not number:
        parser.error(f"FILE:LINE must be a line of a file in mpx/; got {given.place}")
    file, source = path.relative_to(ROOT).as_posix(), path.read_text()
    if not 1 <= (line := int(number)) <= len(source.splitlines()):
        parser.error(f"{file} has {len(source.splitlines())} lines; got {number}")
    area = area_of(file)
    folder = record(area, given.processes) if given.run else _folder(area)
    recorded = _state(folder)
    name, _ = reached.where(file, source, line)
    print(f"{file}:{line}, in {name or 'the module'}, of the area {area}.")
    tests = tests_of(folder, file, line) if recorded else [""]
    if recorded and recorded != state_of(ROOT):
        print("Recorded before the last edit; --run records again.")
    if "" in tests:
        why = "importing mpx runs it" if recorded else "--run finds those that reach it"
        print(f"All tests of this area; {why}:")
        print(f"    python -m pytest {file} {AREAS[area]}")
    elif tests:
        show(folder, tests, given.most)
    else:
        print("No test of this area reaches it.")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
