"""CIFAR-100 in its "binary version" (Krizhevsky, 2009).

A record is one byte of coarse label (0 to 19), one byte of fine label (0 to 99) and
3,072 bytes of pixels: 32x32 red, then green, then blue, row by row. `train.bin` holds
50,000 records, `test.bin` 10,000.
"""

from pathlib import Path

import numpy as np

from ..runs.errors import SetupError
from .pipeline import ImageData, array_data, random_mirror, random_shift

RECORD_BYTES = 2 + 3 * 32 * 32
RECORDS = {"train.bin": 50_000, "test.bin": 10_000}
ADVICE = (
    "Unpack the archive of CIFAR-100's binary version (`cifar-100-binary.tar.gz`, from "
    "https://www.cs.toronto.edu/~kriz/cifar.html) and give its folder with "
    "`--data-path`: it must hold `train.bin` (50,000 records of 3,074 bytes: "
    "153,700,000 bytes) and `test.bin` (10,000 records: 30,740,000 bytes)."
)


def load_cifar100(folder: Path | None, *, batch_size: int, seed: int) -> ImageData:
    """Reads the two files in a folder, or in `cifar-100-binary` below it."""
    if folder is None:
        raise SetupError(f"`--preset cifar100` needs a `--data-path`. {ADVICE}")
    if not (folder / "train.bin").exists() and (folder / "cifar-100-binary").is_dir():
        folder = folder / "cifar-100-binary"
    train, test = read_records(folder / "train.bin"), read_records(folder / "test.bin")
    notes = tuple(
        f"{folder / name} holds {len(found[1]):,} of CIFAR-100's {expected:,} images."
        for (name, expected), found in zip(RECORDS.items(), (train, test), strict=True)
        if len(found[1]) != expected
    )
    return array_data(
        "CIFAR-100",
        train,
        test,
        classes=100,
        batch_size=batch_size,
        seed=seed,
        augment=shift_and_mirror,
        notes=notes,
    )


def shift_and_mirror(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """The usual augmentation of CIFAR: shifts of up to 4 pixels, mirroring."""
    return random_mirror(random_shift(images, random, pixels=4), random)


def read_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images, uint8 (n, 32, 32, 3), and fine labels of one file."""
    if not path.is_file():
        raise SetupError(f"CIFAR-100: there is no file {path}. {ADVICE}")
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise SetupError(
            f"CIFAR-100: {path} is damaged or cut off: its size must be a multiple of "
            f"{RECORD_BYTES:,} bytes, one record; got {size:,} bytes. {ADVICE}"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, RECORD_BYTES)
    coarse, fine = records[:, 0], records[:, 1]
    wrong = np.flatnonzero((coarse >= 20) | (fine >= 100))
    if wrong.size:
        first = wrong[0]
        raise SetupError(
            f"CIFAR-100: {path} is damaged or another data set: labels must be below "
            f"20 (coarse) and 100 (fine); record {first:,} has {coarse[first]} and "
            f"{fine[first]}. {ADVICE}"
        )
    images = records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), fine.astype(np.int32)
