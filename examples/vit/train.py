"""A Vision Transformer in the training loop."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import mpx

from ..common import loop
from ..common.config import Precision
from ..common.display import Display
from ..common.labels import Labels
from ..common.loop import Interrupted as Interrupted, Metrics, Score, Trainee
from ..common.record import Result, Row, RunFolder
from ..common.training import data_mesh, divided, require_divisible, step_bytes
from .config import Config
from .datasets import ImageData, batches
from .step import Batch, TrainState, initial_state, make_evaluation, make_step


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
    """Trains one model in one precision; see `examples.common.loop.train`.

    Args:
        config: the run; all of it but `precision`, which may say `all`.
        precision: of the forward and backward pass.
        data: the data set, from `load_data(config)`.
        mesh: the devices, along one axis `data`; all local ones by default.
        folder: takes metrics and checkpoints; without it nothing is written.
        display: shows the progress; without it nothing is printed.
        should_stop: asked before every step; True saves and stops.
    """
    mesh = mesh or data_mesh()
    require_divisible(config, mesh)
    trainee = VitTrainee(config, precision, data, mesh)
    return loop.train(trainee, folder=folder, display=display, should_stop=should_stop)


def labels_of(config: Config, data: ImageData) -> Labels:
    """The words for a run."""
    style = "" if config.style == "explicit" else f", {config.style}"
    return Labels(
        title=f"ViT on {data.name}{style}",
        items="images",
        score="test\naccuracy",
        held_out="images",
    )


class VitTrainee(Trainee[Config]):
    """A Vision Transformer that is being trained."""

    def __init__(
        self, config: Config, precision: Precision, data: ImageData, mesh: Mesh
    ):
        self.config = config
        self.precision: Precision = precision
        self.mesh = mesh
        self.labels = labels_of(config, data)
        self.data = data
        self.train_state = initial_state(
            config, precision, data.image_shape, data.classes, mesh
        )
        self.compiled: Any = None
        self.evaluate = make_evaluation(config, precision)

    @property
    def state(self) -> TrainState:
        return self.train_state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.train_state = state

    @property
    def scaling(self) -> mpx.AbstractLossScaling:
        return self.train_state.scaling

    @property
    def weights(self) -> Any:
        return eqx.filter(self.train_state.model, eqx.is_inexact_array)

    def compile(self) -> int | None:
        size, where = self.config.batch_size, divided(self.mesh)
        batch = {
            "image": jnp.zeros((size, *self.data.image_shape), device=where),
            "label": jnp.zeros((size,), jnp.int32, device=where),
        }
        step: Any = make_step(self.config, self.precision, self.mesh)
        self.compiled = step.lower(batch, self.train_state).compile()
        return step_bytes(self.compiled.compiled.memory_analysis())

    def batches(self, start: int) -> Iterator[Batch]:
        prepared = batches(self.data.train, self.config.workers, start=start)
        left = self.config.steps - start
        for batch in itertools.islice(prepared, left):
            yield jax.device_put(batch, divided(self.mesh))

    def step(self, batch: Batch) -> Metrics:
        self.train_state, metrics = self.compiled(batch, self.train_state)
        return metrics

    def score(self) -> Score:
        correct, loss = 0, 0.0
        for batch in batches(self.data.test, self.config.workers):
            placed = jax.device_put(batch, divided(self.mesh))
            sums = self.evaluate(self.train_state, placed)
            correct, loss = correct + int(sums[0]), loss + float(sums[1])
        size = self.data.test_size
        return Score(correct / size, loss / size)
