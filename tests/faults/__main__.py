"""The long campaigns: `python -m tests.faults`, some minutes on two cores.

Prints one line of figures for each, which tests/faults/NOTES.md has.
"""

import argparse
import importlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="of the soak")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    importlib.import_module("conftest")  # the devices and flags of the tests
    logging.getLogger("absl").setLevel(logging.ERROR)
    # Reads that Orbax leaves behind where one has failed.
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore", RuntimeWarning)
    from . import damage, kills, soak

    def report(name: str, campaign: Callable[[], str]) -> None:
        start = time.perf_counter()
        text = campaign()
        print(f"{name}: {text} ({time.perf_counter() - start:.0f} s)", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if given.steps:
            report("soak", lambda: soak.soak(given.steps).summary())
        if given.kills:
            path = Path(folder) / "kills"
            run = lambda: kills.killed(path, given.kills, given.seed)  # noqa: E731
            report("kills", lambda: run().summary())
        if given.flips:
            saved = damage.Saved(Path(folder) / "damage")
            count = saved, given.flips, given.seed
            report("flipped bits", lambda: damage.summary(damage.flips(*count)))
            report("cut or lost files", lambda: damage.summary(damage.cuts(*count)))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    main()
