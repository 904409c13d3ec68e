"""Runs the sweep: `python -m rigs.sweep --help`."""

import argparse
import fnmatch
import os
import sys
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rigs.sweep import page, results
from rigs.sweep.case import Case
from rigs.sweep.cases import all_cases
from rigs.sweep.explained import find_reason
from rigs.sweep.measure import Result, measure


def main(arguments: list[str] | None = None) -> int:
    """Measures the chosen cases, prints what is wrong, and writes the results."""
    chosen = _parse(arguments)
    cases = _choose(chosen.group, chosen.name, chosen.part)
    found = []
    for i, case in enumerate(cases):
        try:
            result = measure(case)
        except Exception as error:  # the case itself cannot run: say so, and go on
            result = Result(case.name, "broken", {}, note=repr(error)[:500])
        found.append(result)
        _print(result, f"{i + 1}/{len(cases)}", chosen.verbose)
    command = "python -m rigs.sweep " + " ".join(arguments or sys.argv[1:])
    rows = {r.name: results.to_row(r) for r in found}
    print("\n" + page.to_markdown(rows))
    seconds = sum(r.seconds for r in found)
    print(f"\n{seconds:.0f} CPU-seconds, {seconds / max(len(found), 1):.2f} a case")
    out = chosen.out or (None if chosen.name else results.RESULTS)
    if out is not None:
        results.write(found, command.strip(), all_cases(), out)
    if out == results.RESULTS:
        page.write_page(results.read()["cases"], page.PAGE)
    wrong = [r for r in found if page.judge(r.name, r.verdict) in ("wrong", "broken")]
    return 1 if wrong else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rigs.sweep", description=__doc__)
    parser.add_argument("--group", help="cases of one library, such as numpy")
    parser.add_argument("--name", help="a pattern of names, such as 'numpy.t*/plain'")
    parser.add_argument("--part", default="1/1", help="one of several parts: 2/4")
    parser.add_argument(
        "--out",
        type=Path,
        help="the file of results, merged; rigs/sweep/results.json without --name",
    )
    parser.add_argument("--verbose", action="store_true", help="print right cases, too")
    return parser.parse_args(arguments)


def _choose(group: str | None, name: str | None, part: str) -> list[Case]:
    cases: Iterable[Case] = all_cases().values()
    cases = [c for c in cases if group in (None, c.group)]
    cases = [c for c in cases if name is None or fnmatch.fnmatch(c.name, name)]
    index, parts = map(int, part.split("/"))
    return cases[index - 1 :: parts]


def _print(result: Result, progress: str, verbose: bool) -> None:
    if result.verdict == "right" and not verbose:
        print(f"\r{progress} {result.name:60.60}", end="", flush=True)
        return
    verdict = page.judge(result.name, result.verdict)
    print(f"\r{progress} {verdict} {result.name} ({result.seconds:.1f} s)")
    for dtype, e in result.errors.items():
        value = f"value {e.value[0]:.1e}, ideal {e.value[1]:.1e}"
        gradient = f"gradient {e.gradient[0]:.1e}, ideal {e.gradient[1]:.1e}"
        print(f"    {dtype:8} {e.verdict:9} {value}; {gradient}; worst {e.where}")
    if result.note:
        print(f"    {result.note}")
    if reason := find_reason(result.name):
        print(f"    {reason}")


if __name__ == "__main__":
    sys.exit(main())
