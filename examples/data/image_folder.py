"""ImageNet, or any other images, in a folder per class.

    ROOT/train/CLASS/NAME.JPEG
    ROOT/val/CLASS/NAME.JPEG

Files are decoded with Pillow in Grain's background threads. Training images are cropped
at random and mirrored as in Szegedy et al. (2015), test images are cropped at the
center of their shorter side.
"""

import functools
import math
from pathlib import Path

import grain.python as grain
import numpy as np
from PIL import Image

from ..runs.errors import SetupError
from .pipeline import Batch, ImageData, pad_batch, shuffled

SUFFIXES = {".jpeg", ".jpg", ".png"}
# Mean and standard deviation of ImageNet's red, green and blue in [0, 1], the numbers
# that PyTorch's published ImageNet recipes use.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
ADVICE = (
    "Give the root of the data set with `--data-path`: `ROOT/train/CLASS/NAME.JPEG` "
    "and `ROOT/val/CLASS/NAME.JPEG`, one folder per class in both (ImageNet-1k: 1,000 "
    "classes such as `n01440764`, 1,281,167 and 50,000 images)."
)


def load_image_folder(
    root: Path | None, *, size: int, batch_size: int, seed: int
) -> ImageData:
    """Lists the images below a folder and prepares their pipeline.

    Args:
        root: holds `train` and `val`.
        size: side of the square that images are cropped to.
        batch_size: images in a batch.
        seed: fixes the order and the augmentation of the training images.
    """
    if root is None:
        raise SetupError(f"`--preset imagenet` needs a `--data-path`. {ADVICE}")
    train_files, train_labels, classes = list_images(root / "train")
    test_files, test_labels, test_classes = list_images(root / "val")
    unknown = sorted(set(test_classes) - set(classes))
    if unknown:
        raise SetupError(
            f"Image folder: {root / 'val'} has classes that {root / 'train'} has not: "
            f"{', '.join(unknown[:5])} ({len(unknown)} in all). {ADVICE}"
        )
    # A class may be missing in `val`, so its labels are counted anew in `train`'s list.
    position = {name: label for label, name in enumerate(classes)}
    renumber = np.array([position[name] for name in test_classes], np.int32)
    test_labels = renumber[test_labels]

    def train_image(index: int, random: np.random.Generator) -> Batch:
        image = random_crop(read_image(train_files[index]), random, size)
        return {"image": standardize(image), "label": train_labels[index]}

    def test_image(index: int) -> Batch:
        image = center_crop(read_image(test_files[index]), size)
        return {"image": standardize(image), "label": test_labels[index]}

    train = shuffled(len(train_files), seed).random_map(train_image)
    test = grain.MapDataset.range(len(test_files)).map(test_image).batch(batch_size)
    notes = () if len(classes) == 1000 else (f"{root} has {len(classes)} classes.",)
    return ImageData(
        name="ImageNet" if len(classes) == 1000 else f"images in {root}",
        image_shape=(size, size, 3),
        classes=len(classes),
        train_size=len(train_files),
        test_size=len(test_files),
        train=train.batch(batch_size),
        test=test.map(functools.partial(pad_batch, size=batch_size)),
        notes=notes,
    )


def list_images(folder: Path) -> tuple[list[Path], np.ndarray, list[str]]:
    """Lists a part's files with their labels, and the names of the classes, sorted."""
    if not folder.is_dir():
        raise SetupError(f"Image folder: there is no folder {folder}. {ADVICE}")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise SetupError(
            f"Image folder: {folder} has no folders, one per class, in it. (ImageNet's "
            f"validation archive unpacks flat: sort its images by class.) {ADVICE}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(
            path
            for path in (folder / name).iterdir()
            if path.suffix.lower() in SUFFIXES
        )
        if not found:
            raise SetupError(
                f"Image folder: {folder / name} holds no .JPEG, .jpg or .png file. "
                f"{ADVICE}"
            )
        files.extend(found)
        labels.extend([label] * len(found))
    return files, np.array(labels, np.int32), classes


def read_image(path: Path) -> Image.Image:
    """Decodes one file to RGB."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError) as error:  # Pillow's PNG reader raises SyntaxError
        raise SetupError(
            f"Image folder: {path} is damaged or no image ({error}). Replace the file "
            "or remove it."
        ) from error


def random_crop(
    image: Image.Image, random: np.random.Generator, size: int
) -> Image.Image:
    """Cuts out 8% to 100% of the area at an aspect ratio of 3/4 to 4/3."""
    width, height = image.size
    area = width * height * random.uniform(0.08, 1.0)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    crop_width = min(width, max(1, round(math.sqrt(area * ratio))))
    crop_height = min(height, max(1, round(math.sqrt(area / ratio))))
    left = int(random.integers(0, width - crop_width + 1))
    top = int(random.integers(0, height - crop_height + 1))
    box = (left, top, left + crop_width, top + crop_height)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Cuts out the central square of 7/8 of the shorter side (224 of 256 pixels)."""
    width, height = image.size
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BILINEAR, box)


def standardize(image: Image.Image) -> np.ndarray:
    """Scales to zero mean and unit deviation, float32 (height, width, 3)."""
    pixels = np.asarray(image, np.float32) / 255
    return (pixels - MEAN) / DEVIATION
