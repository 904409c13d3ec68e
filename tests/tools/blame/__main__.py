"""`python -m tests.tools.blame`: plants faults, replays steps, says what was named.

python -m tests.tools.blame --faults 300 --seed 0    # the corpus
python -m tests.tools.blame --faults 60 --peers      # and what JAX's own tools name
python -m tests.tools.blame --clean                  # 50 steps with nothing bad
python -m tests.tools.blame --verdicts               # 60 verdicts, 20 of each
python -m tests.tools.blame --costs                  # beside the gradient's
"""

import argparse
import collections
import importlib
import os
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")


class Table:
    """How many are right, by what they have in common."""

    def __init__(self) -> None:
        self._right: collections.Counter[str] = collections.Counter()
        self._all: collections.Counter[str] = collections.Counter()

    def add(self, keys: Iterable[str], is_right: bool) -> None:
        for key in keys:
            self._all[key] += 1
            self._right[key] += is_right

    def show(self) -> None:
        for key, count in self._all.items():
            print(f"{key:40} {self._right[key]:4} of {count}")


def planted(arguments: argparse.Namespace) -> None:
    from .corpus import faults
    from .peers import PEERS, mistakes

    table = Table()
    chosen = enumerate(faults(arguments.faults, arguments.seed))
    for number, fault in chosen:
        if arguments.only not in fault.name:
            continue
        try:
            report = fault.step().blame()
            wrong = fault.mistakes(report)
        except Exception as error:
            report, wrong = None, [f"{type(error).__name__}: {str(error)[:200]}"]
        kinds = (fault.container, fault.plant, fault.direction, fault.precision, "all")
        table.add(kinds, not wrong)
        if wrong:
            print(f"{number:3} {fault.name}: {', '.join(wrong)}", flush=True)
        if wrong and arguments.show:
            print(report, flush=True)
        for peer in PEERS if arguments.peers else ():
            said = mistakes(fault, peer)
            table.add([f"{peer}: operation"], not said or said == ["line"])
            table.add([f"{peer}: operation and line"], not said)
    table.show()


def verdicts(steps: Iterable[tuple[str, Any, Any]]) -> None:
    table = Table()
    for name, step, wanted in steps:
        verdict = step.blame().verdict
        table.add([wanted.value, "all"], verdict is wanted)
        if verdict is not wanted:
            print(f"{name}: {verdict.value} and not {wanted.value}", flush=True)
    table.show()


def costs() -> None:
    from .costs import measure

    for is_scan in (False, True):
        print(measure(is_scan), flush=True)


def main() -> None:
    like = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(
        "python -m tests.tools.blame", None, __doc__, **like
    )
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--show", action="store_true", help="the reports of mistakes")
    for name in ("--peers", "--clean", "--verdicts", "--costs"):
        parser.add_argument(name, action="store_true")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.costs:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
        costs()
    else:
        importlib.import_module("conftest")  # the devices and flags of the tests
        from .corpus import clean_steps, verdict_steps

        if arguments.clean:
            verdicts(clean_steps())
        elif arguments.verdicts:
            verdicts(verdict_steps(arguments.seed))
        else:
            planted(arguments)
    print(f"{time.perf_counter() - begin:.0f} s")


main()
