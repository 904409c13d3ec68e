"""The data sets, all with one face: `ImageData`."""

from ..config import Config
from .cifar100 import load_cifar100 as load_cifar100
from .digits import load_digits as load_digits
from .image_folder import load_image_folder as load_image_folder
from .pipeline import Batch as Batch, ImageData as ImageData, batches as batches


def load_data(config: Config) -> ImageData:
    """Loads the data set of a preset, or raises a `SetupError` that says what to do."""
    if config.preset == "digits":
        return load_digits(config)
    if config.preset == "cifar100":
        return load_cifar100(config)
    return load_image_folder(config)
