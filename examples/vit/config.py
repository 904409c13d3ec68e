"""The configuration of a run, its three presets and the command line.

A preset is only a set of defaults. What every example has too is in
`examples.common.config`.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..common.config import RunConfig, ScalingConfig, require

Preset = Literal["digits", "cifar100", "imagenet"]
Style = Literal["explicit", "autocast"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the Vision Transformer."""

    patch: int
    """Side of a square patch in pixels."""
    width: int
    """Features of a token."""
    hidden: int
    """Hidden neurons of the residual MLP blocks."""
    blocks: int
    """Number of blocks, each an attention and an MLP block."""
    heads: int
    """Attention heads; must divide the width."""
    dropout: float = 0.0
    """Probability of dropping an activation at the end of each residual branch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Trains a Vision Transformer in float32, float16 and bfloat16."""

    preset: Preset
    """Data set and defaults; only digits needs no `--data-path`."""
    batch_size: int
    """Images per step, over all devices and micro-batches."""
    model: ModelConfig
    style: Style = "explicit"
    """Of half precision: by hand in the model, or by `mpx.autocast` around the loss of
    a model that knows nothing of it. Recipes are always of the second style."""
    data_path: Path | None = None
    """Where the data set lies (cifar100, imagenet)."""
    image_size: int = 224
    """Side of the square that imagenet's images are cropped to."""
    workers: int = 2
    """Threads that prepare batches."""
    fold: int = 0
    """Which of five stratified folds of the digits is held out for the test."""

    @property
    def default_folder(self) -> str:
        """The name of the run folder below `runs`."""
        suffix = "" if self.style == "explicit" else f"-{self.style}"
        return self.preset + suffix

    def validate(self) -> "Config":
        """Returns itself, or raises a `SetupError` that names the option to change."""
        super().validate()
        require(self.workers >= 1, self, "workers", "must be at least 1")
        require(0 <= self.fold < 5, self, "fold", "must be 0, 1, 2, 3 or 4")
        model = self.model
        for option in ("patch", "width", "hidden", "blocks", "heads"):
            require(getattr(model, option) >= 1, model, option, "must be at least 1")
        require(
            model.width % model.heads == 0,
            model,
            "heads",
            f"must divide --model.width {model.width}",
        )
        require(0 <= model.dropout < 1, model, "dropout", "must lie in [0, 1)")
        return self


# AdamW with linear warmup and cosine decay, as "How to train your ViT?" (Steiner et
# al. 2021, section 3) has it, at the sizes of the MPX paper (section 5).
PRESETS: dict[str, Config] = {
    "digits": Config(
        preset="digits",
        steps=800,
        batch_size=64,
        learning_rate=2e-3,
        warmup_steps=50,
        weight_decay=0.05,
        model=ModelConfig(patch=2, width=64, hidden=200, blocks=3, heads=4),
        # A short run: a short period shows the scale searching its place.
        scaling=ScalingConfig(period=50),
    ),
    "cifar100": Config(
        preset="cifar100",
        steps=40_000,
        batch_size=256,
        learning_rate=1e-3,
        warmup_steps=2_000,
        weight_decay=0.05,
        clip=1.0,
        workers=4,
        checkpoint_every=1_000,
        model=ModelConfig(
            patch=4, width=256, hidden=800, blocks=12, heads=4, dropout=0.1
        ),
    ),
    "imagenet": Config(
        preset="imagenet",
        steps=375_000,  # 300 passes at batch size 1,024
        batch_size=1_024,
        learning_rate=1e-3,
        warmup_steps=10_000,
        weight_decay=0.1,
        clip=1.0,
        workers=32,
        checkpoint_every=5_000,
        model=ModelConfig(
            patch=16, width=768, hidden=3072, blocks=12, heads=12, dropout=0.1
        ),
    ),
}


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line: first `--preset`, then everything over its defaults."""
    import tyro  # here: a model and its sizes need no command line

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="digits")
    preset = first.parse_known_args(arguments)[0].preset
    default = PRESETS.get(preset, PRESETS["digits"])  # tyro explains a wrong name
    config = tyro.cli(
        Config, prog="python -m examples.vit", default=default, args=arguments
    )
    return config.validate()


def passes_over_data(config: Config, train_size: int) -> float:
    """How often the run sees every training image."""
    return config.steps * config.batch_size / train_size
