"""The options that every run has.

Every field of a configuration is an option of the command line: `batch_size` is
`--batch-size`, `model.width` is `--model.width`.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import jax

import mpx

from ..precisions import DTYPES, RECIPES, Dtype, Precision, Recipe
from .errors import SetupError


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

    def make(self) -> mpx.DynamicLossScaling:
        """The loss scaling, or a `SetupError`."""
        try:
            return mpx.DynamicLossScaling(
                self.initial, period=self.period, max_loss_scaling=self.maximum
            )
        except ValueError as error:
            raise SetupError(f"`--scaling.*`: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run: the same model trained in every precision."""

    steps: int
    """Training steps (optimizer updates)."""
    batch_size: int
    """Examples per step, over all devices and micro-batches."""
    learning_rate: float
    """Peak of the warmup-cosine schedule."""
    warmup_steps: int
    """Steps of linear warmup."""
    weight_decay: float
    """AdamW's weight decay, on matrices only."""
    model: Any
    """The sizes of a transformer: `width`, `heads` and others, and `dropout`."""
    scaling: ScalingConfig = ScalingConfig()
    precision: Dtype | Literal["all"] = "all"
    """Of the forward and backward pass; `all` trains the same model in each."""
    recipe: tuple[Recipe | Literal["all"], ...] = ()
    """Train it in bfloat16 with quantized linear layers, too: once for each of these;
    `all` are all of them."""
    accumulate: int = 1
    """Micro-batches per step; the gradient is their mean."""
    clip: float | None = None
    """Clip the unscaled gradient to this global norm."""
    seed: int = 0
    """Seed of the initial model, of dropout and of the order of the data."""
    run_dir: Path | None = None
    """Where results and checkpoints go; default: a folder below `runs`."""
    resume: bool = False
    """Continue the run in the run folder from its last checkpoint."""
    overwrite: bool = False
    """Start anew although the run folder holds an unfinished run."""
    blame: int | None = None
    """Train nothing: make this skipped step of the run in the run folder again, and say
    what went bad in it."""
    monitor: int | None = None
    """Every so many steps, look at how large the numbers of the step are (GPT)."""
    log_every: int = 20
    """Steps between two looks at the metrics; the device is not waited for between."""
    checkpoint_every: int = 200
    """Steps between two checkpoints, each with a test of the model."""

    @property
    def default_folder(self) -> str:
        """The name of the run folder below `runs`."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir or Path("runs") / self.default_folder

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions to train, in order."""
        dtypes = DTYPES if self.precision == "all" else (self.precision,)
        everything = "all" in self.recipe
        return *dtypes, *(r for r in RECIPES if everything or r in self.recipe)

    def validate(self) -> Self:
        """Returns itself, or raises a `SetupError` that names the option to change."""
        for option in ("steps", "batch_size", "accumulate", "log_every"):
            require(getattr(self, option) >= 1, self, option, "must be at least 1")
        is_period = self.monitor is None or self.monitor >= 1
        require(is_period, self, "monitor", "must be at least 1")
        is_step = self.blame is None or self.blame >= 1
        require(is_step, self, "blame", "must be the number of a step")
        require(self.checkpoint_every >= 1, self, "checkpoint_every", "must be >= 1")
        require(self.learning_rate > 0, self, "learning_rate", "must be positive")
        require(self.weight_decay >= 0, self, "weight_decay", "must not be negative")
        require(self.warmup_steps >= 0, self, "warmup_steps", "must not be negative")
        require(self.clip is None or self.clip > 0, self, "clip", "must be positive")
        require(
            self.batch_size % self.accumulate == 0,
            self,
            "accumulate",
            f"must divide --batch-size {self.batch_size}",
        )
        jax.eval_shape(self.scaling.make)  # which looks for no devices yet
        self._validate_model()
        return self

    def _validate_model(self) -> None:
        model = self.model
        for field in dataclasses.fields(model):
            if field.name != "dropout":
                is_size = getattr(model, field.name) >= 1
                require(is_size, model, field.name, "must be at least 1")
        rule = f"must divide --model.width {model.width}"
        require(model.width % model.heads == 0, model, "heads", rule)
        require(0 <= model.dropout < 1, model, "dropout", "must lie in [0, 1)")


def require(holds: bool, config: object, option: str, rule: str) -> None:
    """Raises a `SetupError` about one option unless a rule holds."""
    if not holds:
        prefix = "--" if isinstance(config, RunConfig) else "--model."
        value = getattr(config, option)
        name = prefix + option.replace("_", "-")
        raise SetupError(f"`{name}` {rule}; got {value}.")


Config = TypeVar("Config", bound=RunConfig)


def parse_options(
    presets: Mapping[str, Config], arguments: Sequence[str] | None = None
) -> Config:
    """Reads the command line: `--preset`, then everything over its defaults.

    Args:
        presets: by name; the first is the usual one.
        arguments: those of the program by default.
    """
    import tyro  # here: benchmarks import the examples without it

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    usual = next(iter(presets))
    first.add_argument("--preset", default=usual)
    preset = first.parse_known_args(arguments)[0].preset
    default = presets.get(preset, presets[usual])  # tyro explains a wrong name
    return tyro.cli(type(default), default=default, args=arguments).validate()
