"""The configuration of a run, its three presets and the command line.

Every field of `Config` is an option of the command line: `batch_size` is
`--batch-size`, `model.width` is `--model.width`. A preset is only a set of defaults.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from .errors import SetupError

Precision = Literal["float32", "float16", "bfloat16"]
Preset = Literal["digits", "cifar100", "imagenet"]

PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")


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


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """Dynamic loss scaling; float16 only."""

    initial: float = 2.0**15
    """First loss scale."""
    period: int = 2000
    """Finite steps in a row after which the scale doubles."""
    maximum: float = 2.0**24
    """Upper bound. May exceed float16's largest number, as the loss is float32."""
    max_skipped_in_a_row: int = 50
    """Stop with a diagnosis after so many skipped steps in a row."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a Vision Transformer in float32, float16 and bfloat16."""

    preset: Preset
    """Data set and defaults; only digits needs no `--data-path`."""
    steps: int
    """Training steps (optimizer updates)."""
    batch_size: int
    """Images per step, over all devices and micro-batches."""
    learning_rate: float
    """Peak of the warmup-cosine schedule."""
    warmup_steps: int
    """Steps of linear warmup."""
    weight_decay: float
    """AdamW's weight decay, on matrices only."""
    model: ModelConfig
    scaling: ScalingConfig = ScalingConfig()
    precision: Precision | Literal["all"] = "all"
    """Of the forward and backward pass; `all` trains the same model in each."""
    accumulate: int = 1
    """Micro-batches per step; the gradient is their mean."""
    clip: float | None = None
    """Clip the unscaled gradient to this global norm."""
    seed: int = 0
    """Seed of the initial model, of dropout and of the order of the data."""
    data_path: Path | None = None
    """Where the data set lies (cifar100, imagenet)."""
    image_size: int = 224
    """Side of the square that imagenet's images are cropped to."""
    workers: int = 2
    """Threads that prepare batches."""
    fold: int = 0
    """Which of five stratified folds of the digits is held out for the test."""
    run_dir: Path | None = None
    """Where results and checkpoints go; default `runs/PRESET`."""
    resume: bool = False
    """Continue the run in the run folder from its last checkpoint."""
    overwrite: bool = False
    """Start anew although the run folder holds an unfinished run."""
    log_every: int = 20
    """Steps between two looks at the metrics; the device is not waited for between."""
    checkpoint_every: int = 200
    """Steps between two checkpoints, each with a test of the model."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir or Path("runs") / self.preset

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions to train, in order."""
        return PRECISIONS if self.precision == "all" else (self.precision,)

    def validate(self) -> "Config":
        """Returns itself, or raises a `SetupError` that names the option to change."""
        for option in ("steps", "batch_size", "accumulate", "log_every", "workers"):
            _require(getattr(self, option) >= 1, self, option, "must be at least 1")
        _require(self.checkpoint_every >= 1, self, "checkpoint_every", "must be >= 1")
        _require(self.learning_rate > 0, self, "learning_rate", "must be positive")
        _require(self.weight_decay >= 0, self, "weight_decay", "must not be negative")
        _require(self.warmup_steps >= 0, self, "warmup_steps", "must not be negative")
        _require(self.clip is None or self.clip > 0, self, "clip", "must be positive")
        _require(0 <= self.fold < 5, self, "fold", "must be 0, 1, 2, 3 or 4")
        _require(
            self.batch_size % self.accumulate == 0,
            self,
            "accumulate",
            f"must divide --batch-size {self.batch_size}",
        )
        model = self.model
        for option in ("patch", "width", "hidden", "blocks", "heads"):
            _require(getattr(model, option) >= 1, model, option, "must be at least 1")
        _require(
            model.width % model.heads == 0,
            model,
            "heads",
            f"must divide --model.width {model.width}",
        )
        _require(0 <= model.dropout < 1, model, "dropout", "must lie in [0, 1)")
        return self


def _require(holds: bool, config: object, option: str, rule: str) -> None:
    if not holds:
        prefix = "--model." if isinstance(config, ModelConfig) else "--"
        value = getattr(config, option)
        name = prefix + option.replace("_", "-")
        raise SetupError(f"`{name}` {rule}; got {value}.")


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
