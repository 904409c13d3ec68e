"""What the tests of the trainings share: one device, rows, stops, copies."""

import csv
import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from examples.runs import make_mesh


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def read_metrics(folder: Path):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def stop_before(position: int):
    """Asks to stop when `position` steps were made."""
    calls = iter(range(10**6))
    return lambda: next(calls) == position


def started(example, *arguments, stderr=subprocess.STDOUT, **variables):
    """The program of an example, as a user starts it."""
    kept = {k: v for k, v in os.environ.items() if k != "MAKELEVEL"}
    return subprocess.Popen(
        [sys.executable, "-m", f"examples.{example}", *arguments],
        cwd=Path(__file__).parents[2],
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def wait_for_rows(path: Path, count: int, process: subprocess.Popen) -> None:
    """Until a program has written more rows than `count`."""
    for _ in range(1800):
        if path.exists() and len(path.read_text().splitlines()) > count:
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError("".join(filter(None, process.communicate())))


@pytest.fixture
def late_failures(monkeypatch):
    """Reads that Orbax leaves behind when one of them fails, and does not wait for."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    time.sleep(0.5)
    gc.collect()  # some wait in cycles, and complain to the test that collects them
