"""A training that is killed again and again, and ends as one that was left alone.

The processes are forked from one that has imported everything, and has not yet looked
for devices: most of a short life would be imports.
"""

import dataclasses
import json
import logging
import multiprocessing
import random
import shutil
import time
from pathlib import Path
from typing import Any

import jax

from examples.gpt import load_data, train
from examples.runs import RunFolder, make_mesh

from .small import CONFIG

PRECISION = "float16"  # with loss scaling, skipped steps and dropout's random streams
STEPS_PER_LIFE = 4
UNFINISHED = "*.orbax-checkpoint-tmp"


def config_in(folder: Path, steps: int) -> Any:
    resumes = (folder / "checkpoints").exists()
    return dataclasses.replace(
        CONFIG, steps=steps, checkpoint_every=2, run_dir=folder, resume=resumes
    )


def live(folder: Path, steps: int, devices: int) -> None:
    """Trains, from the newest checkpoint if there is one, to the end."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax says what it does not do
    config = config_in(folder, steps)
    mesh = make_mesh({"fsdp": devices}, jax.devices()[:devices])
    data = load_data(config)
    train(config, PRECISION, data, mesh=mesh, folder=RunFolder(config))


@dataclasses.dataclass
class Kills:
    """What came of a training that was killed.

    Attributes:
        positions: The checkpoint that was the newest at each kill.
        while_saving: Kills after which a checkpoint was left that is not complete.
        resumed_equal: Resumes whose metrics are those of the whole run, to the byte.
        ends_equal: Whether all arrays of the last checkpoint are, too.
    """

    positions: list[int] = dataclasses.field(default_factory=list)
    while_saving: int = 0
    resumed_equal: int = 0
    ends_equal: bool = False

    def summary(self) -> str:
        return (
            f"{len(self.positions)} kills, {self.while_saving} of them while a "
            f"checkpoint was written; {self.resumed_equal} resumes with the metrics of "
            "the run that was not killed, to the byte; "
            f"{'all' if self.ends_equal else 'NOT all'} arrays equal at the end"
        )


def killed(folder: Path, count: int, seed: int = 0, devices: int = 2) -> Kills:
    """Kills a training at random moments, and compares it with one left alone."""
    choose = random.Random(seed)
    steps = STEPS_PER_LIFE * count + 4
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def start(name: str) -> Any:
        process = context.Process(target=live, args=(folder / name, steps, devices))
        process.start()
        return process

    whole = start("whole")
    whole.join()
    expected = (folder / "whole" / "metrics.csv").read_bytes()
    parts, found = folder / "parts", Kills()
    for index in range(count):
        before, process = newest(parts), start("parts")
        while process.is_alive() and newest(parts) <= before:
            time.sleep(0.002)
        # Every second one is killed while it writes the next checkpoint.
        while index % 2 and process.is_alive() and not is_saving(parts):
            time.sleep(0.001)
        time.sleep(choose.uniform(0, 0.05 if index % 2 else 0.2))
        process.kill()
        process.join()
        found.resumed_equal += begins_as(parts / "metrics.csv", expected)
        found.while_saving += is_saving(parts)
        found.positions.append(newest(parts))
    last = start("parts")
    last.join()
    is_same = (parts / "metrics.csv").read_bytes() == expected
    ends = [record(folder / name, steps) for name in ("whole", "parts")]
    found.ends_equal = is_same and ends[0] == ends[1]
    shutil.rmtree(parts)
    return found


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 without one."""
    found = (folder / "checkpoints" / PRECISION).glob("[0-9]*")
    return max((int(path.name) for path in found if path.name.isdigit()), default=0)


def is_saving(folder: Path) -> bool:
    return any(folder.glob(f"checkpoints/*/{UNFINISHED}"))


def begins_as(metrics: Path, expected: bytes) -> bool:
    """Whether all whole lines are those of another run."""
    lines = metrics.read_bytes() if metrics.exists() else b""
    return expected.startswith(lines[: lines.rfind(b"\n") + 1])


def record(folder: Path, step: int) -> dict[str, int]:
    path = folder / "checkpoints" / PRECISION / str(step) / "record" / "metadata"
    return json.loads(path.read_text())["digests"]
