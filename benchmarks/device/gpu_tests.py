"""The tests that need a GPU, run there, with a record for every one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..peers.environment import REPOSITORY
from ..processes import WorkerError, read_lines

FOLDER = "tests/gpu"
_OUTCOME = re.compile(rf"^({FOLDER}/.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
_REASON = re.compile(rf"^(?:FAILED|ERROR) ({FOLDER}/.+?) - (.*)")


def run(
    platform: str, passed: Sequence[str], until: float, only: str = ""
) -> Iterator[dict[str, Any]]:
    """Yields a record per test, again for one that failed, and one at the end.

    Args:
        platform: `"gpu"`, or `"cpu"` to run them where there is none.
        passed: Tests that need not run again.
        until: When to stop, on the monotonic clock.
        only: An expression of pytest's `-k`.
    """
    # Without the project's options: the checker of annotations need not be there, and
    # a warning of a driver is no reason to fail.
    options = ["-o", "addopts=", "--import-mode=importlib", "-W", "default"]
    options += ["-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
    options += ["--any-device"] if platform == "cpu" else []
    options += ["-k", only] if only else []
    options += [f"--deselect={test}" for test in passed]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", FOLDER, *options],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu"},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    last = ""
    try:
        for line in read_lines(process, lambda: until - time.monotonic()):
            last = line.strip() or last
            if found := _OUTCOME.match(line):
                yield {"test": found[1], "outcome": found[2].lower()}
            elif found := _REASON.match(line):
                yield {"test": found[1], "outcome": "failed", "reason": found[2]}
    except WorkerError as error:
        yield {"error": str(error), "unfinished": True}
        return
    # 5: all of them have passed before.
    if process.returncode in (0, 1, 5):
        yield {"finished": True}
    else:
        yield {"error": f"pytest ended with {process.returncode}: {last}"}
