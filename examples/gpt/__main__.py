"""The command line: `python -m examples.gpt`."""

import functools
import sys

from ..common.command import Stop, main, train_all
from ..common.display import Display
from .config import Config, parse_config
from .data import TextData, load_data
from .train import labels_of, train


def run(config: Config, display: Display, stop: Stop) -> None:
    """Trains every precision, then writes and prints what came out."""
    data = load_data(config)
    labels = labels_of(data)

    def train_one(precision, **options):
        return train(config, precision, data, **options)

    introduce = functools.partial(display.introduce, labels, *describe(config, data))
    train_all(config, labels, display, stop, train_one, introduce)


def describe(config: Config, data: TextData) -> tuple[str, str]:
    """The data and the run."""
    model = config.model
    text = (
        f"{len(data.train) / 1e6:.1f} MB in {data.train_files} files to train on, "
        f"{data.test_size / 1e6:.1f} MB in {data.test_files} files held out"
    )
    options = [name for name in ("scan", "remat") if getattr(config, name)]
    details = (
        f"width {model.width}, hidden {model.hidden}, blocks {model.blocks}, "
        f"heads {model.heads}{''.join(f', {name}' for name in options)} · "
        f"{config.steps:,} steps of {config.batch_size} texts of {model.context} bytes"
    )
    return text, details


if __name__ == "__main__":
    sys.exit(
        main(
            lambda display, stop: run(parse_config(), display, stop),
            module="examples.gpt",
            target="train-gpt",
        )
    )
