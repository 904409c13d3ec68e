"""What a training loop tells about itself: metrics, checkpoints, speed.

The loop never waits for the device: metrics stay on it and are fetched together when
it is time to look at them.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

import mpx

from ..precisions import Precision
from .bad_steps import BadSteps
from .checkpoint import Checkpoints
from .config import RunConfig
from .display import Display, Show
from .folder import Result, Row, RunFolder

Metrics = dict[str, jax.Array]
"""Scalars on the device: `loss`, `accuracy`, `loss_scale`, `finite`, `skipped`."""

FINAL_STEPS = 20  # the final loss is their mean


def metrics_of(result: mpx.GradientResult, scaling: Any) -> Metrics:
    """The metrics of a step whose loss has the accuracy as `aux`.

    Args:
        result: what the gradient function returned.
        scaling: the loss scaling that the step was made with.
    """
    return {
        "loss": result.value,
        "accuracy": jnp.mean(result.aux),  # one number per micro-batch
        "loss_scale": scaling.loss_scale,
        "finite": result.finite,
        "skipped": result.scaling.skipped,
    }


class Interrupted(Exception):
    """Training stopped on request, with a checkpoint of all steps made."""

    def __init__(self, precision: Precision, position: int):
        super().__init__(f"{precision} stopped after step {position}")
        self.precision = precision
        self.position = position


class Score(NamedTuple):
    """How well a model does on held-out data."""

    accuracy: float
    loss: float


class Recorder(contextlib.ExitStack):
    """Records the training of one model in one precision.

    Attributes:
        position: steps made; also the index of the next batch.
        rows: the metrics of every step.
    """

    def __init__(
        self,
        config: RunConfig,
        precision: Precision,
        folder: RunFolder | None = None,
        display: Display | None = None,
    ):
        """Opens the record.

        Args:
            config: the run.
            precision: the precision that is trained.
            folder: takes metrics and checkpoints; without it nothing is written.
            display: shows the progress; without it nothing is printed.
        """
        super().__init__()
        self.config = config
        self.precision: Precision = precision
        self.folder = folder
        self.display = display or Display(quiet=True)
        self.checkpoints: Checkpoints | None = None
        self.bad_steps: BadSteps | None = None
        self.position = 0
        self.rows: list[Row] = []
        self.score: Score | None = None
        self.step_bytes: int | None = None
        self.pending: list[Metrics] = []
        self.batches: list[Any] = []  # of the pending steps
        self.seen: dict[int, mpx.reports.Statistics] = {}  # by the steps that were made
        self.seconds_per_step: list[float] = []
        self.window = (0.0, 0)  # when it began, and at which position
        self.show: Show = lambda row, seconds: None

    def __enter__(self) -> Self:
        super().__enter__()
        if self.folder:
            checkpoints = Checkpoints(self.folder.path, self.config, self.precision)
            self.checkpoints = self.enter_context(checkpoints)
            self.bad_steps = BadSteps(self.folder.path, checkpoints)
        return self

    def restore(self, state: Any) -> Any:
        """Opens the display; returns the state to begin with.

        If the run is resumed and has a checkpoint, it is that of the newest one.
        """
        if self.config.resume and self.folder and self.checkpoints:
            if self.checkpoints.position:
                state, self.position = self.checkpoints.restore(state)
            self.rows = self.folder.rewind(self.precision, self.position)
        last = self.rows[-1] if self.rows else None
        if last and last.test_accuracy is not None and last.test_loss is not None:
            self.score = Score(last.test_accuracy, last.test_loss)
        self.show = self.enter_context(
            self.display.training(self.precision, self.config.steps, self.position)
        )
        return state

    def start(self, memory: Any) -> None:
        """Starts the clock; takes the `memory_analysis()` of the compiled step."""
        self.step_bytes = bytes_of(memory)
        self.window = (time.perf_counter(), self.position)

    def add(self, metrics: Metrics, batch: Any = None) -> None:
        """Takes the metrics of a step, which stay on the device, and its batch.

        The batch is one of the host; it is kept if the step was skipped.
        """
        self.pending.append(metrics)
        self.batches.append(batch)
        self.position += 1

    def is_watched(self) -> bool:
        """Whether it is time to look at how large the numbers of a step are."""
        period = self.config.monitor
        return period is not None and self.position % period == 0

    def watch(self, seen: mpx.reports.Statistics) -> None:
        """Takes the statistics of the step that comes next, and writes them."""
        self.seen[self.position] = seen
        if self.folder:
            self.folder.add_statistics(self.precision, self.position, seen)

    def is_due(self) -> bool:
        """Whether it is time to look at the metrics."""
        return self._is_due(self.config.log_every, self.config.checkpoint_every)

    def _is_due(self, *periods: int) -> bool:
        """Whether something that happens every so many steps, and last, is due."""
        if self.position == self.config.steps:
            return True
        return any(self.position % period == 0 for period in periods)

    def look(self, state: Any, score: Callable[[], Score]) -> None:
        """Writes and shows the metrics; every `checkpoint_every` steps tests and saves.

        Args:
            state: all that a checkpoint must keep.
            score: tests the model.
        """
        jax.block_until_ready(self.pending)
        start, position = self.window
        seconds = (time.perf_counter() - start) / (self.position - position)
        self.seconds_per_step.append(seconds)
        is_tested = self._is_due(self.config.checkpoint_every)
        self._write(score() if is_tested else None)
        self.show(self.rows[-1], seconds)
        if is_tested:
            self._save(state)
        self.window = (time.perf_counter(), self.position)

    def interrupt(self, state: Any) -> None:
        """Saves everything and raises `Interrupted`."""
        self._write(None)
        self._save(state)
        raise Interrupted(self.precision, self.position)

    def _save(self, state: Any) -> None:
        if self.checkpoints:
            self.checkpoints.save(self.position, state)

    def _write(self, score: Score | None) -> None:
        fetched: list[dict[str, Any]] = jax.device_get(self.pending)
        self.pending.clear()
        first = self.position - len(fetched) + 1
        rows = [
            Row(
                step=first + index,
                loss=float(metrics["loss"]),
                accuracy=float(metrics["accuracy"]),
                loss_scale=float(metrics["loss_scale"]),
                finite=bool(metrics["finite"]),
                skipped=int(metrics["skipped"]),
            )
            for index, metrics in enumerate(fetched)
        ]
        self.score = score
        if rows and score is not None:
            rows[-1] = rows[-1]._replace(
                test_accuracy=score.accuracy, test_loss=score.loss
            )
        self.rows.extend(rows)
        if self.folder:
            self.folder.add_rows(self.precision, rows)
        self._keep_bad_steps(rows)

    def _keep_bad_steps(self, rows: list[Row]) -> None:
        before = self.rows[: len(self.rows) - len(rows)]
        was_finite = before[-1].finite if before else True
        for row, batch in zip(rows, self.batches, strict=True):
            if not row.finite and was_finite and self.bad_steps and self.folder:
                self.bad_steps.keep(row, batch, is_writer=self.folder.is_writer)
            was_finite = row.finite
        self.batches.clear()

    def result(self, score: Callable[[], Score], skipped: Any, weights: Any) -> Result:
        """The row of the table.

        Args:
            score: tests the model, if it was not after the last step.
            skipped: how many steps were skipped.
            weights: a tree of the parameters.
        """
        last = self.score or score()
        losses = [row.loss for row in self.rows[-FINAL_STEPS:]]
        # The first window holds what warms up: threads, allocations.
        seconds = self.seconds_per_step[1:] or self.seconds_per_step
        return Result(
            precision=self.precision,
            steps=self.position,
            test_accuracy=last.accuracy,
            test_loss=last.loss,
            final_loss=statistics.fmean(losses) if losses else None,
            skipped=int(skipped),
            parameters=sum(x.size for x in jax.tree.leaves(weights)),
            step_bytes=self.step_bytes,
            step_seconds=statistics.median(seconds) if seconds else None,
        )


def bytes_of(memory: Any) -> int | None:
    """What a compiled step needs on one device, from its `memory_analysis()`.

    Arguments, results and temporaries, each donated buffer counted once. None where
    the backend does not say.
    """
    if memory is None:
        return None
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
