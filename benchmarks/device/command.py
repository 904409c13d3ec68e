"""`python -m benchmarks device`: its options, which need no package that may lack."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..peers import environment as peers
from . import plan, tables
from .session import Session

BUDGET_S = 1500.0
OUT = Path("runs/bench")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, or the end of the program with an explanation."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks device",
        description="Measures what only a GPU can tell, in order of worth. Every "
        "answer is at once in OUT/device-NAME.json, and a further call goes on there.",
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=plan.PARTS, default=plan.PARTS, help="which")
    add("--budget-s", type=float, default=BUDGET_S, help="seconds for this call")
    add("--out", type=Path, default=OUT, help=f"folder of the results ({OUT})")
    add("--fresh", action="store_true", help="measure again what is there")
    add("--peers", type=Path, help="folder with the published MPX and JMP")
    add("--commit", help="what is measured, where git cannot tell")
    add("--platform", choices=("gpu", "cpu"), default="gpu", help="cpu: to try it")
    add("--tiny", action="store_true", help="sizes for a trial on a CPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measures; returns 1 where a goal was missed, 2 after an error."""
    start = time.monotonic()
    options = parse(arguments)
    console = Console()
    session = Session(
        console=console,
        out=options.out,
        command=shlex.join(["python", "-m", "benchmarks", "device", *arguments]),
        commit=options.commit or commit(),
        until=start + options.budget_s,
        platform=options.platform,
        sizes=plan.TINY if options.tiny else plan.FULL,
        peers=peers.existing(options.peers),
        fresh=options.fresh,
    )
    try:
        found = session.run(options.parts)
    except RuntimeError as error:
        console.print(f"Error: {error}", markup=False)
        return 2
    if found is None:
        return 0
    for table in tables.tables(found):
        console.print(table.rich())
    for goal in (goals := list(tables.goals(found))):
        console.print(f"{'met' if goal.met else 'NOT MET'}: {goal.text}", markup=False)
    left = session.left(found, options.parts)
    more = f"; {left} cases are left, the same command goes on" if left else ""
    console.print(f"{options.out / found.name}.json after {_seconds(start)} s{more}")
    return 0 if all(goal.met for goal in goals) else 1


def _seconds(start: float) -> int:
    return round(time.monotonic() - start)


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    found = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"]):
        try:
            result = subprocess.run(
                ["git", *command, *(["--untracked-files=no"] if found else [])],
                cwd=peers.REPOSITORY,
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        found.append(result.stdout.strip())
    return found[0] + ("-changed" if found[1] else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
