"""`python -m rigs.clients`: measure, write the results and the page, judge.

python -m rigs.clients                        # everything
python -m rigs.clients --only gemma mamba_2   # packages, modules or programs
python -m rigs.clients --page                 # the page again, from the results
python -m rigs.clients --show numpyro_svi --seeds 24   # print errors, write nothing
python -m rigs.clients --carriers gemma_3     # which weight's products carry them
"""

import argparse
import sys

from . import goals, page, runner
from .carriers import carriers
from .measure import measure
from .record import SEEDS


def main() -> int:
    """Returns 1 if a goal is not met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--part", choices=runner.PARTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--show", nargs="+", metavar="NAME")
    parser.add_argument("--carriers", nargs="+", metavar="NAME")
    parser.add_argument("--seeds", type=int, help="default: each program's own")
    arguments = parser.parse_args()
    if arguments.show or arguments.carriers:
        show(arguments.show, arguments.carriers, arguments.seeds)
        return 0
    results = runner.read()
    if not arguments.page:
        measure_all(results, arguments)
    results["programs"] = runner.with_words(results["programs"], runner.clients())
    runner.write(results)
    results = runner.read()  # with the digits that were written
    page.write(results)
    judged = goals.judge(results)
    for goal in judged:
        print("met   " if goal.met else "MISSED", goal.text)
    return not all(goal.met for goal in judged)


def measure_all(results: dict, arguments: argparse.Namespace) -> None:
    """Measures what was asked for; each part is written as soon as it is there."""
    everything = runner.clients()
    for part in runner.PARTS:
        if arguments.part not in (None, part):
            continue
        options = {"seeds": arguments.seeds} if part == "programs" else {}
        found = runner.run(arguments.only, part, options, arguments.jobs, print)
        results[part] = runner.merge(results[part], found, list(everything))
        packages = [client.package for _, client in everything.values()]
        results["versions"] = runner.versions(packages)
        runner.write(results)


def show(names: list[str] | None, carried: list[str] | None, seeds: int | None) -> None:
    """Prints gradient errors, or those of one weight's products at a time."""
    for name, (_, client) in runner.clients(names or []).items():
        record = measure(client, seeds=seeds, costs=False)
        for part, found in record.items():
            if isinstance(found, dict) and "gradient" in found:
                kinds = found.get("products", "")
                print(f"{name:30} {part:15} {found['gradient']:.2e} {kinds}")
            elif isinstance(found, dict) and "error" in found:
                print(f"{name:30} {part:15} {found['error']}")
    for name, (_, client) in runner.clients(carried or []).items():
        for parameter, error in carriers(client, "current", seeds or SEEDS):
            print(f"{name:30} {error:.3f} {parameter}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
