"""The command line: `python -m examples.vit`."""

import functools
import sys

from ..common.command import Stop, main, train_all
from ..common.display import Display
from .config import Config, parse_config, passes_over_data
from .datasets import ImageData, load_data
from .train import labels_of, train


def run(config: Config, display: Display, stop: Stop) -> None:
    """Trains every precision, then writes and prints what came out."""
    data = load_data(config)
    labels = labels_of(config, data)

    def train_one(precision, **options):
        return train(config, precision, data, **options)

    introduce = functools.partial(display.introduce, labels, *describe(config, data))
    train_all(config, labels, display, stop, train_one, introduce)


def describe(config: Config, data: ImageData) -> tuple[str, str, tuple[str, ...]]:
    """The data, the run, and what to note about them."""
    model, passes = config.model, passes_over_data(config, data.train_size)
    images = (
        f"{data.train_size:,} images to train on, {data.test_size:,} held out, "
        f"{data.classes} classes"
    )
    details = (
        f"width {model.width}, hidden {model.hidden}, blocks {model.blocks}, "
        f"heads {model.heads}, patch {model.patch} · "
        f"{config.steps:,} steps of {config.batch_size} images ({passes:.3g} passes)"
    )
    return images, details, data.notes


if __name__ == "__main__":
    sys.exit(
        main(
            lambda display, stop: run(parse_config(), display, stop),
            module="examples.vit",
            target="train",
        )
    )
