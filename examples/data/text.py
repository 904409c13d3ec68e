"""The standard library's own source text, as bytes.

It comes with every Python, so nothing is downloaded. Which files it has depends on
Python's version; which of them are held out depends on their names only, so that no
file is on both sides and the split is the same in every run. The batch of a step is a
function of the seed and the step and of nothing else.
"""

import dataclasses
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..runs.errors import SetupError

# What is installed beside the library, and tests: odd texts, and half of it.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
END = b"\0"  # after each file; source text has no zero byte
HELD_OUT = 10  # one file of so many


@dataclasses.dataclass(frozen=True)
class TextData:
    """Text to train on, and text to test on."""

    name: str
    train: np.ndarray
    """uint8, all files one after the other."""
    test: np.ndarray
    """uint8 (texts, length), taken evenly from the held-out files."""
    train_files: int
    test_files: int
    test_size: int
    """Bytes in the held-out files."""

    @property
    def summary(self) -> str:
        """How much text there is."""
        return (
            f"{len(self.train) / 1e6:.1f} MB in {self.train_files} files to train on, "
            f"{self.test_size / 1e6:.1f} MB in {self.test_files} files held out"
        )

    def batch(self, position: int, *, size: int, seed: int) -> np.ndarray:
        """The batch of a step: uint8 (size, length), from random places."""
        random = np.random.default_rng((seed, position))
        length = self.test.shape[1]
        starts = random.integers(0, len(self.train) - length + 1, size)
        return self.train[starts[:, None] + np.arange(length)]

    def batches(
        self, size: int, seed: int, start: int, stop: int
    ) -> Iterator[np.ndarray]:
        """The batches of some steps, which Grain prepares in the background."""
        import grain.python as grain  # here: benchmarks import the examples without it

        from .pipeline import batches

        steps = grain.MapDataset.range(stop)
        made: Any = steps.map(lambda step: self.batch(int(step), size=size, seed=seed))
        prepared: Any = batches(made, start=start, stop=stop)
        return prepared

    def test_batches(self, size: int) -> Iterator[np.ndarray]:
        """The texts of the test in batches of one size; what is left over is not."""
        for index in range(max(len(self.test) // size, 1)):
            yield self.test[
                np.arange(index * size, (index + 1) * size) % len(self.test)
            ]


def load_text(folder: Path | None, *, length: int, test_texts: int) -> TextData:
    """Reads all Python files of a folder.

    Args:
        folder: the folder; None for the standard library of this Python.
        length: bytes of a text.
        test_texts: at most so many texts to test on.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(root).parts)
    )
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in files:
        parts[is_held_out(path)].append((root / path).read_bytes() + END)
    train, test = (
        np.frombuffer(b"".join(parts[held_out]), np.uint8) for held_out in (False, True)
    )
    if min(len(train), len(test)) < length:
        raise SetupError(
            f"{root} has too little text: {len(train):,} bytes to train on and "
            f"{len(test):,} held out, in {len(files)} Python files; a text has "
            f"{length} bytes. Name another folder with `--data-path`."
        )
    return TextData(
        name="Python's standard library" if folder is None else str(root),
        train=train,
        test=cut(test, length, test_texts),
        train_files=len(parts[False]),
        test_files=len(parts[True]),
        test_size=len(test),
    )


def is_held_out(path: Path) -> bool:
    """Whether a file is for the test, by its name below the root."""
    return zlib.crc32(path.as_posix().encode()) % HELD_OUT == 0


def cut(text: np.ndarray, length: int, count: int) -> np.ndarray:
    """Cuts at most `count` texts out of a long one, evenly, that do not overlap."""
    count = min(count, len(text) // length)
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return text[starts[:, None] + np.arange(length)]
