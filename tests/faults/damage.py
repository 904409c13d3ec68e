"""Checkpoints whose bits were flipped, whose files were cut off or lost."""

import dataclasses
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.gpt import arrays_of, initial_state
from examples.runs import SetupError, make_mesh, replicated
from examples.runs.checkpoint import Checkpoints

from .small import CONFIG

POSITION = 7


@dataclasses.dataclass
class Outcome:
    """What came of one damaged file.

    Attributes:
        file: Its path in the checkpoint.
        error: What was said; None if the checkpoint was read.
        is_intact: Whether what was read is what was saved, bit for bit.
    """

    file: str
    error: str | None
    is_intact: bool

    @property
    def is_silent(self) -> bool:
        """Other numbers than were saved, and no word of it."""
        return self.error is None and not self.is_intact

    @property
    def is_named(self) -> bool:
        """Whether the error says which file, or array; the file has the same name."""
        if self.error is None:
            return True
        parts = self.file.split("/")
        return (parts[1] if parts[0] == "state" else parts[0]) in self.error


class Saved:
    """A checkpoint of a small GPT in FP8, saved over eight devices."""

    def __init__(self, folder: Path, devices: int | None = None) -> None:
        self.folder = folder
        self.mesh = make_mesh(devices=jax.devices()[:devices])
        texts = np.zeros((CONFIG.batch_size, CONFIG.model.context + 1), np.uint8)
        with jax.set_mesh(self.mesh):
            nodes, scaling = initial_state(CONFIG, "delayed", texts)
        scaling = jax.device_put(scaling, replicated(self.mesh))
        self.state = arrays_of(nodes), scaling
        with Checkpoints(folder, CONFIG, "delayed") as checkpoints:
            checkpoints.save(POSITION, self.state)

    @property
    def path(self) -> Path:
        return self.folder / "checkpoints" / "delayed" / str(POSITION)

    def files(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*") if path.is_file())

    def read(self, damaged: Path) -> Outcome:
        """Reads the checkpoint again, of which one file was damaged."""
        file = damaged.relative_to(self.path).as_posix()
        try:
            with Checkpoints(self.folder, CONFIG, "delayed") as checkpoints:
                found, _ = checkpoints.restore(self.state)
        except SetupError as error:
            return Outcome(file, str(error), True)
        return Outcome(file, None, same(found, self.state))


def same(a: Any, b: Any) -> bool:
    def bits(x: Any) -> bytes:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and bits(x) == bits(y) for x, y in pairs)


def flips(saved: Saved, count: int, seed: int = 0) -> Iterator[Outcome]:
    """Flips one bit at a time: of a random file, somewhere in it."""
    choose = random.Random(seed)
    files = [path for path in saved.files() if path.stat().st_size]
    for _ in range(count):
        path = choose.choice(files)
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        yield saved.read(path)
        path.write_bytes(content)


def cuts(saved: Saved, count: int, seed: int = 1) -> Iterator[Outcome]:
    """Cuts one file off at a time, at a random place, or removes it."""
    choose = random.Random(seed)
    files = [path for path in saved.files() if path.stat().st_size]
    for index in range(count):
        path = choose.choice(files)
        content = path.read_bytes()
        path.unlink()
        if index % 2:
            path.write_bytes(content[: choose.randrange(len(content))])
        yield saved.read(path)
        path.write_bytes(content)


def summary(found: Iterable[Outcome]) -> str:
    outcomes = list(found)
    errors = [o for o in outcomes if o.error is not None]
    return (
        f"{len(outcomes)} damaged files: {sum(o.is_silent for o in outcomes)} silent, "
        f"{len(errors)} errors of which {sum(o.is_named for o in errors)} name the "
        f"file or the array, {len(outcomes) - len(errors)} harmless"
    )
