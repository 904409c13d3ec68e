"""Plants small faults in `mpx`, one at a time, and says which ones tests notice.

    python -m tests.planted --seed 0 --count 40

A fault is drawn from the syntax of the package: a condition that always or never holds,
one of the two parts of an `and` or `or`, one side of a conditional expression, a
statement that is left out. The quick tests of its area run once, without faults, to
find which of them it could change (`tests/reached.py`). Then it is planted in a copy,
never in this checkout, and those tests run until one fails. Prints two lines for each:
the verdict, the file with the line, what was changed; the test that noticed.

A fault that nothing notices is a test that is missing, or a line that nobody needs.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import reached
from tests.areas import AREAS, ROOT, files_of

# Those that see most, of many that a fault could change.
SHARP = "tests/autocast/test_emitted.py"
QUIET = ["-q", "-n2", "-p", "no:cacheprovider", "--no-header"]


class Fault(NamedTuple):
    """A node that is replaced, by what, and what that is in words.

    It can change a test where `decisive` is evaluated, as `held` or not.
    """

    node: ast.AST
    new: str
    words: str
    decisive: ast.AST
    held: bool


def faults_in(source: str) -> Iterator[Fault]:
    """The faults that may be planted in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp):
            for value in (True, False):
                words = f"the condition is {value}"
                yield Fault(node.test, str(value), words, node.test, not value)
        elif isinstance(node, ast.BoolOp):
            is_and = isinstance(node.op, ast.And)
            for i, left_out in enumerate(node.values):
                rest = [v for j, v in enumerate(node.values) if j != i]
                word = " and " if is_and else " or "
                text = word.join(f"({ast.unparse(v)})" for v in rest)
                words = f"without `{ast.unparse(left_out)[:60]}`"
                yield Fault(node, f"({text})", words, left_out, not is_and)
        elif isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield Fault(node, "pass", "left out", node, True)


def replaced(source: str, node: ast.AST, new: str) -> str:
    """The source with other text in the place of a node."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        ahead = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(ahead)

    start = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
    end = offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return source[:start] + new + source[end:]


Drawn = tuple[str, Path, Fault]


def drawn(seed: int, count: int, areas: list[str]) -> list[Drawn]:
    """Faults, drawn from all of these areas."""
    every = [
        (area, file, fault)
        for area in areas
        for file in files_of(area)
        for fault in faults_in(file.read_text())
    ]
    return random.Random(seed).sample(every, count)


def tests_for(found: Drawn, records: dict[tuple[str, bool], list[str]]) -> list[str]:
    """The tests that a fault could change."""
    area, file, fault = found
    place = reached.place_of(file.relative_to(ROOT).as_posix(), fault.decisive)
    tests = records.get((place, fault.held), [])
    if "" in tests:  # an import
        return AREAS[area].split()
    ours = tuple(AREAS[area].split())
    tests = [test for test in tests if test.startswith(ours)]
    return sorted(tests, key=lambda test: not test.startswith(SHARP))


def first_failure(copy: Path, tests: list[str], patience: int) -> str | None:
    """The first line about a test that fails; None: none does."""
    arguments = copy / "arguments"  # too many for a command
    arguments.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", *QUIET, "-x", f"@{arguments}"]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {patience} s"
    lines = done.stdout.splitlines()
    failed = [x for x in lines if x.startswith(("FAILED", "ERR"))]
    return (failed or ["an error"])[0] if done.returncode else None


def try_one(copy: Path, tests: list[str], file: Path, fault: Fault, told: int) -> bool:
    """Plants a fault in the copy, and says whether tests notice within `told` s."""
    # From the copy, so that this checkout may change meanwhile.
    there = copy / file.relative_to(ROOT)
    source = there.read_text()
    there.write_text(replaced(source, fault.node, fault.new))
    try:
        by = first_failure(copy, tests, told) if tests else None
    finally:
        there.write_text(source)
    line = getattr(fault.node, "lineno", 0)
    verdict = "noticed " if by else "NOT SEEN"
    print(f"{verdict} {file.relative_to(ROOT)}:{line}: {fault.words}", flush=True)
    unseen = f"{len(tests)} tests reach {ast.unparse(fault.node)[:120]}"
    print(f"         {(by or unseen)[:150]}", flush=True)
    return by is not None


def main() -> int:
    """Plants the faults; returns 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--skip", type=int, default=0, help="the first so many")
    parser.add_argument("--areas", nargs="+", default=list(AREAS), choices=list(AREAS))
    parser.add_argument("--tests", nargs="+", help="in place of those of the area")
    parser.add_argument("--patience", type=int, default=1200, help="seconds for each")
    parser.add_argument("--most", type=int, default=150, help="tests for each")
    parser.add_argument("--record", type=Path, help="what tests reach, kept or to keep")
    told = parser.parse_args()
    found = drawn(told.seed, told.count, told.areas)[told.skip :]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(
                ".venv*", ".git", ".reached_cache", "runs", "site"
            ),
        )
        kept = told.record or Path(folder) / "record"
        if not told.tests and not any(kept.glob("*.json")):
            tests = {test for area, _, _ in found for test in AREAS[area].split()}
            reached.record(copy, kept.resolve(), sorted(tests))
        records = reached.read(kept)
        noticed = []
        for each in found:
            tests = told.tests or tests_for(each, records)[: told.most]
            noticed.append(try_one(copy, tests, *each[1:], told.patience))
    print(f"{sum(noticed)} of {len(noticed)} noticed")
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
