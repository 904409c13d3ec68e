"""`python -m tests.tools.blame`: plants faults, replays steps, says what was named.

python -m tests.tools.blame --faults 300 --seed 0    # the corpus
python -m tests.tools.blame --faults 60 --peers      # and what JAX's own tools name
python -m tests.tools.blame --clean                  # 50 steps with nothing bad
python -m tests.tools.blame --verdicts               # 60 verdicts, 20 of each
python -m tests.tools.blame --costs                  # beside the gradient's
"""

import argparse
import collections
import os
import time
from collections.abc import Iterable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)


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


def clean() -> None:
    import mpx

    from .corpus import clean_steps

    table = Table()
    for name, step in clean_steps():
        verdict = step.blame().verdict
        table.add(["clean"], verdict is mpx.reports.Verdict.NOTHING)
        if verdict is not mpx.reports.Verdict.NOTHING:
            print(name, verdict, flush=True)
    table.show()


def verdicts(seed: int) -> None:
    from .corpus import verdict_steps

    table = Table()
    for name, step, wanted in verdict_steps(seed):
        verdict = step.blame().verdict
        table.add([wanted.value, "verdicts"], verdict is wanted)
        if verdict is not wanted:
            print(f"{name}: {verdict.value} and not {wanted.value}", flush=True)
    table.show()


def costs() -> None:
    from .costs import measure

    for is_scan in (False, True):
        print(measure(is_scan), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.blame",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--show", action="store_true", help="the reports of mistakes")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--verdicts", action="store_true")
    parser.add_argument("--costs", action="store_true")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.costs:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
        costs()
    else:
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
        if arguments.clean:
            clean()
        elif arguments.verdicts:
            verdicts(arguments.seed)
        else:
            planted(arguments)
    print(f"{time.perf_counter() - begin:.0f} s")


main()
