"""The training loop: batches in, metrics and checkpoints out.

The loop never waits for the device: metrics stay on it and are fetched together every
`log_every` steps.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import mpx

from .checkpoint import Checkpoints
from .config import Config, Precision
from .datasets import ImageData, batches
from .display import Display
from .errors import SetupError
from .record import Result, Row, RunFolder
from .step import (
    Metrics,
    TrainState,
    data_mesh,
    divided,
    initial_state,
    make_evaluation,
    make_step,
    replicated,
)

FINAL_STEPS = 20  # the final loss is their mean


class Interrupted(Exception):
    """Training stopped on request, with a checkpoint of all steps made."""

    def __init__(self, precision: Precision, position: int):
        super().__init__(f"{precision} stopped after step {position}")
        self.precision = precision
        self.position = position


def train(
    config: Config,
    precision: Precision,
    data: ImageData,
    *,
    mesh: Mesh | None = None,
    folder: RunFolder | None = None,
    display: Display | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Result, list[Row]]:
    """Trains one model in one precision.

    Args:
        config: the run; all of it but `precision`, which may say `all`.
        precision: of the forward and backward pass.
        data: the data set, from `load_data(config)`.
        mesh: the devices, along one axis `data`; all local ones by default.
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
    mesh = mesh or data_mesh()
    require_divisible(config, mesh)
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if folder:
            checkpoints = Checkpoints(folder.path, config, precision)
            stack.enter_context(checkpoints)
        run = Run(config, precision, data, mesh, folder, checkpoints)
        if config.resume:
            run.restore()
        if folder and run.position == config.steps and precision in folder.results:
            return folder.results[precision], run.rows
        run.train(display or Display(quiet=True), should_stop)
        return run.result(), run.rows


def require_divisible(config: Config, mesh: Mesh) -> None:
    """Every device must get as many images of every micro-batch."""
    parts = config.accumulate * mesh.size
    if config.batch_size % parts:
        raise SetupError(
            "`--batch-size` must be a multiple of micro-batches times devices, "
            f"{config.accumulate} x {mesh.size}; got {config.batch_size}. Use "
            f"{-(-config.batch_size // parts) * parts}."
        )


class Run:
    """One run: its state, its position in the data, its metrics."""

    def __init__(
        self,
        config: Config,
        precision: Precision,
        data: ImageData,
        mesh: Mesh,
        folder: RunFolder | None,
        checkpoints: Checkpoints | None,
    ):
        self.config = config
        self.precision: Precision = precision
        self.data = data
        self.mesh = mesh
        self.folder = folder
        self.checkpoints = checkpoints
        shape, classes = data.image_shape, data.classes
        self.state = initial_state(config, precision, shape, classes, mesh)
        self.position = 0  # steps made; also the index of the next batch
        self.rows: list[Row] = []
        self.pending: list[Metrics] = []
        self.seconds_per_step: list[float] = []
        self.step_bytes: int | None = None
        self.count_correct = make_evaluation(precision)

    def restore(self) -> None:
        """Continues from the newest checkpoint, if this precision has one."""
        if not (self.folder and self.checkpoints):
            return
        if self.checkpoints.position:
            where = replicated(self.mesh)
            self.state, self.position = self.checkpoints.restore(self.state, where)
        self.rows = self.folder.rewind(self.precision, self.position)

    def train(self, display: Display, should_stop: Callable[[], bool]) -> None:
        """Trains from the position to the last step."""
        config = self.config
        with display.training(self.precision, config, self.position) as show:
            step = self.compiled_step()
            window_start, window_position = time.perf_counter(), self.position
            for batch in self.placed_batches():
                if should_stop():
                    self.fetch_metrics()
                    self.save()
                    raise Interrupted(self.precision, self.position)
                self.state, metrics = step(batch, self.state)
                self.pending.append(metrics)
                self.position += 1
                if not self.is_due(config.log_every, config.checkpoint_every):
                    continue
                jax.block_until_ready(metrics)
                steps = self.position - window_position
                seconds = (time.perf_counter() - window_start) / steps
                self.seconds_per_step.append(seconds)
                test = self.is_due(config.checkpoint_every)
                self.fetch_metrics(self.test_accuracy() if test else None)
                show(self.rows[-1], config.batch_size / seconds)
                if test:
                    self.save()
                window_start, window_position = time.perf_counter(), self.position

    def is_due(self, *periods: int) -> bool:
        """Whether something that happens every so many steps, and last, is due."""
        if self.position == self.config.steps:
            return True
        return any(self.position % period == 0 for period in periods)

    def compiled_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """Compiles the step ahead of time, to know what it needs."""
        size, where = self.config.batch_size, divided(self.mesh)
        batch = {
            "image": jnp.zeros((size, *self.data.image_shape), device=where),
            "label": jnp.zeros((size,), jnp.int32, device=where),
        }
        step: Any = make_step(self.config, self.precision, self.mesh)
        compiled = step.lower(batch, self.state).compile()
        memory = compiled.compiled.memory_analysis()
        if memory is not None:
            self.step_bytes = (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                + memory.temp_size_in_bytes
                - memory.alias_size_in_bytes
            )
        return compiled

    def placed_batches(self) -> Iterator[dict[str, jax.Array]]:
        """The batches from the position on, divided over the devices."""
        config = self.config
        prepared = batches(self.data.train, config.workers, start=self.position)
        for batch in itertools.islice(prepared, config.steps - self.position):
            yield jax.device_put(batch, divided(self.mesh))

    def fetch_metrics(self, test_accuracy: float | None = None) -> None:
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
        if rows:
            rows[-1] = rows[-1]._replace(test_accuracy=test_accuracy)
        self.rows.extend(rows)
        if self.folder:
            self.folder.add_rows(self.precision, rows)
        mpx.check(
            self.state.scaling,
            self.state.model,
            max_skipped_in_a_row=self.config.scaling.max_skipped_in_a_row,
        )

    def test_accuracy(self) -> float:
        """The share of held-out images that the model gets right."""
        correct = 0
        for batch in batches(self.data.test, self.config.workers):
            placed = jax.device_put(batch, divided(self.mesh))
            correct += int(self.count_correct(self.state.model, placed))
        return correct / self.data.test_size

    def save(self) -> None:
        """Writes a checkpoint."""
        if self.checkpoints:
            self.checkpoints.save(self.position, self.state)

    def result(self) -> Result:
        """The row of the table."""
        params = jax.tree.leaves(eqx.filter(self.state.model, eqx.is_inexact_array))
        losses = [row.loss for row in self.rows[-FINAL_STEPS:]]
        test_accuracy = self.rows[-1].test_accuracy if self.rows else None
        if test_accuracy is None:  # resumed without the metrics of the steps before
            test_accuracy = self.test_accuracy()
        # The first window holds what warms up: threads, allocations.
        seconds = self.seconds_per_step[1:] or self.seconds_per_step
        return Result(
            precision=self.precision,
            steps=self.position,
            test_accuracy=test_accuracy,
            final_loss=statistics.fmean(losses) if losses else None,
            skipped=int(self.state.scaling.skipped),
            parameters=sum(leaf.size for leaf in params),
            step_bytes=self.step_bytes,
            step_seconds=statistics.median(seconds) if seconds else None,
        )
