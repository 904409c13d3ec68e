"""scikit-learn's 1,797 handwritten digits of 8x8 pixels; they come with the package.

They are a copy of the test part of the UCI Optical Recognition of Handwritten Digits
data set (Alpaydin and Kaynak, 1998).
"""

import numpy as np
import scipy.ndimage
import sklearn.datasets
from sklearn.model_selection import StratifiedKFold

from .pipeline import ImageData, array_data

FOLDS = 5
# Fixed, so that `--seed` changes the training and not what it is measured on.
SPLIT_SEED = 0


def load_digits(fold: int, *, batch_size: int, seed: int) -> ImageData:
    """Trains on four of five stratified folds and holds out one."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8, 1)
    labels = np.asarray(labels, np.int32)
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=SPLIT_SEED)
    train, test = list(splitter.split(images, labels))[fold]
    return array_data(
        "handwritten digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        classes=10,
        batch_size=batch_size,
        seed=seed,
        augment=distort,
    )


def distort(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Turns, scales and shifts every image a little, as hands do.

    By up to 10 degrees, 10% and 0.3 pixels; a whole pixel of eight is too much.
    """
    count, height, width, _ = images.shape
    center = np.array([height - 1, width - 1]) / 2
    angles = np.deg2rad(random.uniform(-10, 10, count))
    scales = np.exp(random.uniform(-0.1, 0.1, count))
    shifts = random.uniform(-0.3, 0.3, (count, 2))
    distorted = np.empty_like(images)
    for index, (angle, scale) in enumerate(zip(angles, scales, strict=True)):
        sine, cosine = np.sin(angle) / scale, np.cos(angle) / scale
        matrix = np.array([[cosine, -sine], [sine, cosine]])
        offset = center - matrix @ center + shifts[index]
        distorted[index, ..., 0] = scipy.ndimage.affine_transform(
            images[index, ..., 0], matrix, offset, order=1
        )
    return distorted
