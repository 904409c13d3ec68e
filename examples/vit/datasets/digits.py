"""scikit-learn's 1,797 handwritten digits of 8x8 pixels; they come with the package.

They are a copy of the test part of the UCI Optical Recognition of Handwritten Digits
data set (Alpaydin and Kaynak, 1998).
"""

import functools

import numpy as np
import sklearn.datasets
from sklearn.model_selection import StratifiedKFold

from ..config import Config
from .pipeline import ImageData, array_data, random_shift

FOLDS = 5
# Fixed, so that `--seed` changes the training and not what it is measured on.
SPLIT_SEED = 0


def load_digits(config: Config) -> ImageData:
    """Trains on four of five stratified folds and holds out fold `config.fold`."""
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = np.asarray(pixels, np.float32).reshape(-1, 8, 8, 1)
    labels = np.asarray(labels, np.int32)
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=SPLIT_SEED)
    train, test = list(splitter.split(images, labels))[config.fold]
    return array_data(
        "handwritten digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        classes=10,
        batch_size=config.batch_size,
        seed=config.seed,
        augment=functools.partial(random_shift, pixels=1),
    )
