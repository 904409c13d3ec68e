"""How images become batches.

The batch of a step is a function of the seed and the step and of nothing else, because
Grain's `MapDataset` has random access: item `i` is the batch of step `i`. So every
precision sees the same batches, and the data position that a checkpoint must keep is
one integer.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import grain.python as grain
import numpy as np

Batch = dict[str, np.ndarray]
"""`image`: float32 (batch, height, width, channels), standardized.
`label`: int32 (batch,); -1 marks padding in the last test batch."""

Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ImageData:
    """A data set, ready to train on."""

    name: str
    image_shape: tuple[int, int, int]
    classes: int
    train_size: int
    test_size: int
    train: grain.MapDataset
    """Item `i` is the batch of step `i`, without end."""
    test: grain.MapDataset
    """The test batches, once through, without augmentation."""
    notes: tuple[str, ...] = ()
    """What a person should know about what was found."""

    @property
    def summary(self) -> str:
        """How many images there are."""
        return (
            f"{self.train_size:,} images to train on, {self.test_size:,} held out, "
            f"{self.classes} classes"
        )


def batches(
    dataset: grain.MapDataset,
    workers: int = 2,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Batch]:
    """Prepares the batches of some positions in background threads."""
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    prepared = iter(dataset.slice(slice(start, None)).to_iter_dataset(options))
    return itertools.islice(prepared, None if stop is None else stop - start)


def shuffled(size: int, seed: int) -> grain.MapDataset:
    """Indices below `size` in a new random order at every pass, without end."""
    return grain.MapDataset.range(size).seed(seed).shuffle().repeat()


def pad_batch(batch: Batch, size: int) -> Batch:
    """Fills the last test batch up, so that every batch has one shape."""
    missing = size - len(batch["label"])
    image, label = batch["image"], batch["label"]
    return {
        "image": np.concatenate([image, np.repeat(image[:1], missing, axis=0)]),
        "label": np.concatenate([label, np.full(missing, -1, np.int32)]),
    }


def array_data(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    *,
    classes: int,
    batch_size: int,
    seed: int,
    augment: Augment,
    notes: tuple[str, ...] = (),
) -> ImageData:
    """Makes a data set of images that fit in memory.

    Args:
        name: for people.
        train: images, uint8 or float (n, height, width, channels), and labels.
        test: the same, held out.
        classes: the number of classes.
        batch_size: images in a batch.
        seed: fixes the order and the augmentation of the training images.
        augment: changes a batch of raw training images at random.
        notes: what a person should know.
    """
    mean = train[0].mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = train[0].std(axis=(0, 1, 2), dtype=np.float64)

    def standardize(images: np.ndarray) -> np.ndarray:
        return ((images - mean) / deviation).astype(np.float32)

    def train_batch(indices: np.ndarray, random: np.random.Generator) -> Batch:
        images = augment(train[0][indices], random)
        return {"image": standardize(images), "label": train[1][indices]}

    def test_batch(indices: np.ndarray) -> Batch:
        batch = {"image": standardize(test[0][indices]), "label": test[1][indices]}
        return pad_batch(batch, batch_size)

    return ImageData(
        name=name,
        image_shape=train[0].shape[1:],
        classes=classes,
        train_size=len(train[0]),
        test_size=len(test[0]),
        train=shuffled(len(train[0]), seed).batch(batch_size).random_map(train_batch),
        test=grain.MapDataset.range(len(test[0])).batch(batch_size).map(test_batch),
        notes=notes,
    )


def random_shift(
    images: np.ndarray, random: np.random.Generator, pixels: int
) -> np.ndarray:
    """Shifts every image by up to `pixels` in each direction; zeros come in."""
    count, height, width, _ = images.shape
    border = ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0))
    padded = np.pad(images, border)
    top, left = random.integers(0, 2 * pixels + 1, size=(2, count))
    rows = (top[:, None] + np.arange(height))[:, :, None]
    columns = (left[:, None] + np.arange(width))[:, None, :]
    return padded[np.arange(count)[:, None, None], rows, columns]


def random_mirror(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Mirrors every second image, on average, left to right."""
    mirrored = random.random(len(images)) < 0.5
    return np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
