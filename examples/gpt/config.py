"""The options of the GPT example; what every example has is in `common.config`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..common.config import RunConfig, ScalingConfig, require


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the GPT."""

    context: int = 64
    """Bytes that the model sees."""
    width: int = 96
    """Features of a byte."""
    hidden: int = 384
    """Hidden neurons of the MLPs."""
    blocks: int = 4
    """Number of blocks, each attention and an MLP."""
    heads: int = 4
    """Attention heads; must divide the width."""
    dropout: float = 0.0
    """Probability of dropping an activation at the end of each residual branch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Trains a small GPT in float32 and, under autocast, in float16 and bfloat16."""

    steps: int = 600
    """Training steps (optimizer updates)."""
    batch_size: int = 32
    """Texts per step, over all devices and micro-batches."""
    learning_rate: float = 6e-3
    """Peak of the warmup-cosine schedule."""
    warmup_steps: int = 40
    """Steps of linear warmup."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices only."""
    model: ModelConfig = ModelConfig()
    # A short run: a short period shows the scale searching its place.
    scaling: ScalingConfig = ScalingConfig(period=50)
    clip: float | None = 1.0
    """Clip the unscaled gradient to this global norm."""
    scan: bool = False
    """Run the blocks as one loop over their stacked weights."""
    remat: bool = False
    """Compute activations again for the backward pass, to save memory."""
    data_path: Path | None = None
    """A folder with Python files; default: the standard library of this Python."""
    test_texts: int = 1024
    """Texts of the held-out files to test on."""

    @property
    def default_folder(self) -> str:
        """The name of the run folder below `runs`."""
        return "gpt"

    @property
    def items_per_step(self) -> int:
        """Bytes."""
        return self.batch_size * self.model.context

    def validate(self) -> "Config":
        """Returns itself, or raises a `SetupError` that names the option to change."""
        super().validate()
        require(self.test_texts >= 1, self, "test_texts", "must be at least 1")
        model = self.model
        for option in ("context", "width", "hidden", "blocks", "heads"):
            require(getattr(model, option) >= 1, model, option, "must be at least 1")
        require(
            model.width % model.heads == 0,
            model,
            "heads",
            f"must divide --model.width {model.width}",
        )
        require(0 <= model.dropout < 1, model, "dropout", "must lie in [0, 1)")
        return self


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line."""
    import tyro  # here: a model and its sizes need no command line

    config = tyro.cli(Config, prog="python -m examples.gpt", args=arguments)
    return config.validate()
