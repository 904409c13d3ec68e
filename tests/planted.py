"""Plants small faults in the core, one at a time, and says which ones tests notice.

    python -m tests.planted --seed 0 --count 40

A fault is drawn from the syntax of the package: a condition that always or never holds,
one of the two parts of an `and` or `or`, one side of a conditional expression, a
statement that is left out. It is planted in a copy, never in this checkout, and the
quick tests of its area run until one fails. Prints one line for each: the verdict, the
file with the line, what was changed, and the test that noticed.

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

ROOT = Path(__file__).resolve().parents[1]
# Which tests look at which part of the package, those first that see most.
AREAS = {
    "_autocast": "tests/autocast/test_emitted.py tests/test_inference.py "
    "tests/test_weight_amaxes.py tests/test_recipe_state.py "
    "tests/autocast",
    "_program": "tests/program tests/autocast/test_emitted.py tests/autocast",
    "_quantize": "tests/quantize tests/autocast/test_emitted.py tests/reference",
    "_recipe_state": "tests/test_recipe_state.py tests/test_weight_amaxes.py "
    "tests/autocast/test_emitted.py tests/test_recipe_scaling.py",
    "_scaling": "tests/test_recipe_scaling.py tests/test_inference.py "
    "tests/test_init_scaling.py",
    "_grad": "tests/grad tests/test_bad_gradients.py",
    "_loss_scaling": "tests/test_loss_scaling.py tests/test_state.py tests/grad",
    "_master_weights.py": "tests/master_weights tests/test_stored_weights.py",
    "_stored_weights.py": "tests/test_stored_weights.py tests/test_stored_products.py",
    "_optimizer.py": "tests/test_optimizer.py tests/test_step_checks.py",
}


def parts_of(area: str) -> list[Path]:
    """The files of an area."""
    path = ROOT / "mpx" / area
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


Fault = tuple[ast.AST, str, str]


def faults_in(source: str) -> Iterator[Fault]:
    """Nodes that may be replaced, by what, and what that is in words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp):
            for value in ("True", "False"):
                yield node.test, value, f"the condition is {value}"
        elif isinstance(node, ast.BoolOp):
            for i, left_out in enumerate(node.values):
                rest = [v for j, v in enumerate(node.values) if j != i]
                word = " and " if isinstance(node.op, ast.And) else " or "
                text = word.join(f"({ast.unparse(v)})" for v in rest)
                yield node, f"({text})", f"without `{ast.unparse(left_out)[:60]}`"
        elif isinstance(node, ast.AugAssign):
            yield node, "pass", "left out"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "pass", "left out"


def replaced(source: str, node: ast.AST, new: str) -> str:
    """The source with other text in the place of a node."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        ahead = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(ahead)

    start = offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
    end = offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return source[:start] + new + source[end:]


def drawn(seed: int, count: int, areas: list[str]) -> list[tuple[str, Path, Fault]]:
    """Faults, drawn from all of these areas."""
    every = [
        (area, file, fault)
        for area in areas
        for file in parts_of(area)
        for fault in faults_in(file.read_text())
    ]
    return random.Random(seed).sample(every, count)


def try_one(
    copy: Path, tests: list[str], file: Path, fault: Fault, patience: int
) -> bool:
    """Plants a fault in the copy, and says whether tests notice."""
    node, new, what = fault
    there, source = copy / file.relative_to(ROOT), file.read_text()
    there.write_text(replaced(source, node, new))
    line = getattr(node, "lineno", 0)
    options = ["-q", "-x", "-n2", "-p", "no:cacheprovider", "--no-header"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=patience,
        )
        failed = [
            x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERR"))
        ]
        noticed, by = done.returncode != 0, (failed or ["an error"])[0]
    except subprocess.TimeoutExpired:
        noticed, by = True, f"no end within {patience} s"
    finally:
        there.write_text(source)
    verdict = "noticed " if noticed else "NOT SEEN"
    print(f"{verdict} {file.relative_to(ROOT)}:{line}: {what}", flush=True)
    print(f"         {by[:150] if noticed else ast.unparse(node)[:150]}", flush=True)
    return noticed


def main() -> int:
    """Plants the faults; returns 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--areas", nargs="+", default=list(AREAS), choices=list(AREAS))
    parser.add_argument("--tests", nargs="+", help="in place of those of the area")
    parser.add_argument("--patience", type=int, default=1200, help="seconds for each")
    told = parser.parse_args()
    found = drawn(told.seed, told.count, told.areas)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "runs", "site")
        )
        noticed = []
        for area, file, fault in found:
            tests = told.tests or AREAS[area].split()
            noticed.append(try_one(copy, tests, file, fault, told.patience))
    print(f"{sum(noticed)} of {len(noticed)} noticed")
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
