"""The training loop: batches in, metrics and checkpoints out.

The loop never waits for the device: metrics stay on it and are fetched together every
`log_every` steps.
"""

import abc
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

import mpx

from .checkpoint import Checkpoints
from .config import Precision, RunConfig
from .display import Display
from .labels import Labels
from .record import Result, Row, RunFolder
from .training import replicated, require_divisible

Metrics = dict[str, jax.Array]
"""Scalars on the device: `loss`, `accuracy`, `loss_scale`, `finite`, `skipped`."""

Config = TypeVar("Config", bound=RunConfig)

FINAL_STEPS = 20  # the final loss is their mean


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


class Trainee(abc.ABC, Generic[Config]):
    """A model that is being trained in one precision.

    Attributes:
        config: the run.
        precision: of the forward and backward pass.
        mesh: the devices, along one axis `data`.
        labels: the words for the task.
    """

    config: Config
    precision: Precision
    mesh: Mesh
    labels: Labels

    @property
    @abc.abstractmethod
    def state(self) -> Any:
        """A tree with all arrays that a checkpoint must keep."""

    @state.setter
    @abc.abstractmethod
    def state(self, state: Any) -> None: ...

    @property
    @abc.abstractmethod
    def scaling(self) -> mpx.AbstractLossScaling:
        """The loss scaling."""

    @property
    @abc.abstractmethod
    def weights(self) -> Any:
        """A tree of the parameters."""

    @abc.abstractmethod
    def compile(self) -> int | None:
        """Compiles the step ahead of time; returns the bytes that it needs."""

    @abc.abstractmethod
    def batches(self, start: int) -> Iterator[Any]:
        """The batches from a position on, without end."""

    @abc.abstractmethod
    def step(self, batch: Any) -> Metrics:
        """Makes one step."""

    @abc.abstractmethod
    def score(self) -> Score:
        """Tests the model on held-out data, in the precision it is trained in."""


def train(
    trainee: Trainee,
    *,
    folder: RunFolder | None = None,
    display: Display | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Result, list[Row]]:
    """Trains one model in one precision.

    Args:
        trainee: the model.
        folder: takes metrics and checkpoints; without it nothing is written.
        display: shows the progress; without it nothing is printed.
        should_stop: asked before every step; True saves and stops.

    Returns:
        The result, and the metrics of every step.

    Raises:
        Interrupted: `should_stop` said so.
        SetupError: the batch size does not fit the devices, or the checkpoint the run.
        FloatingPointError: too many steps in a row were skipped, from `mpx.check`.
    """
    config, precision = trainee.config, trainee.precision
    require_divisible(config, trainee.mesh)
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if folder:
            checkpoints = Checkpoints(folder.path, config, precision)
            stack.enter_context(checkpoints)
        run = Run(trainee, folder, checkpoints)
        if config.resume:
            run.restore()
        if folder and run.position == config.steps and precision in folder.results:
            return folder.results[precision], run.rows
        run.train(display or Display(quiet=True), should_stop)
        return run.result(), run.rows


class Run:
    """One run: its trainee, its position in the data, its metrics."""

    def __init__(
        self,
        trainee: Trainee,
        folder: RunFolder | None,
        checkpoints: Checkpoints | None,
    ):
        self.trainee = trainee
        self.config = trainee.config
        self.precision: Precision = trainee.precision
        self.folder = folder
        self.checkpoints = checkpoints
        self.position = 0  # steps made; also the index of the next batch
        self.rows: list[Row] = []
        self.pending: list[Metrics] = []
        self.seconds_per_step: list[float] = []
        self.step_bytes: int | None = None

    def restore(self) -> None:
        """Continues from the newest checkpoint, if this precision has one."""
        if not (self.folder and self.checkpoints):
            return
        if self.checkpoints.position:
            where = replicated(self.trainee.mesh)
            self.trainee.state, self.position = self.checkpoints.restore(
                self.trainee.state, where
            )
        self.rows = self.folder.rewind(self.precision, self.position)

    def train(self, display: Display, should_stop: Callable[[], bool]) -> None:
        """Trains from the position to the last step."""
        config, labels = self.config, self.trainee.labels
        with display.training(self.precision, config, labels, self.position) as show:
            self.step_bytes = self.trainee.compile()
            batches = self.trainee.batches(self.position)
            window_start, window_position = time.perf_counter(), self.position
            for batch in itertools.islice(batches, config.steps - self.position):
                if should_stop():
                    self.fetch_metrics()
                    self.save()
                    raise Interrupted(self.precision, self.position)
                metrics = self.trainee.step(batch)
                self.pending.append(metrics)
                self.position += 1
                if not self.is_due(config.log_every, config.checkpoint_every):
                    continue
                jax.block_until_ready(metrics)
                steps = self.position - window_position
                seconds = (time.perf_counter() - window_start) / steps
                self.seconds_per_step.append(seconds)
                test = self.is_due(config.checkpoint_every)
                self.fetch_metrics(self.trainee.score() if test else None)
                show(self.rows[-1], config.items_per_step / seconds)
                if test:
                    self.save()
                window_start, window_position = time.perf_counter(), self.position

    def is_due(self, *periods: int) -> bool:
        """Whether something that happens every so many steps, and last, is due."""
        if self.position == self.config.steps:
            return True
        return any(self.position % period == 0 for period in periods)

    def fetch_metrics(self, score: Score | None = None) -> None:
        """Fetches the metrics since the last time, and checks the loss scaling."""
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
        if rows and score is not None:
            rows[-1] = rows[-1]._replace(
                test_accuracy=score.accuracy, test_loss=score.loss
            )
        self.rows.extend(rows)
        if self.folder:
            self.folder.add_rows(self.precision, rows)
        mpx.check(
            self.trainee.scaling,
            self.trainee.weights,
            max_skipped_in_a_row=self.config.scaling.max_skipped_in_a_row,
        )

    def save(self) -> None:
        """Writes a checkpoint."""
        if self.checkpoints:
            self.checkpoints.save(self.position, self.trainee.state)

    def result(self) -> Result:
        """The row of the table."""
        losses = [row.loss for row in self.rows[-FINAL_STEPS:]]
        last = self.rows[-1] if self.rows else None
        if last is None or last.test_accuracy is None or last.test_loss is None:
            # Resumed without the metrics of the steps before.
            score = self.trainee.score()
        else:
            score = Score(last.test_accuracy, last.test_loss)
        # The first window holds what warms up: threads, allocations.
        seconds = self.seconds_per_step[1:] or self.seconds_per_step
        return Result(
            precision=self.precision,
            steps=self.position,
            test_accuracy=score.accuracy,
            test_loss=score.loss,
            final_loss=statistics.fmean(losses) if losses else None,
            skipped=int(self.trainee.scaling.skipped),
            parameters=sum(x.size for x in jax.tree.leaves(self.trainee.weights)),
            step_bytes=self.step_bytes,
            step_seconds=statistics.median(seconds) if seconds else None,
        )
