"""A GPT in the training loop."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import mpx

from ..common import loop
from ..common.config import Precision
from ..common.display import Display
from ..common.labels import Labels
from ..common.loop import Metrics, Score, Trainee
from ..common.record import Result, Row, RunFolder
from ..common.training import (
    data_mesh,
    divided,
    in_precision,
    initial_scaling,
    replicated,
    require_divisible,
    step_bytes,
)
from .config import Config
from .data import TextData
from .model import GPT
from .step import gpt_optimizer, loss_and_accuracy, make_evaluation, make_step


def train(
    config: Config,
    precision: Precision,
    data: TextData,
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
        data: the text, from `load_data(config)`.
        mesh: the devices, along one axis `data`; all local ones by default.
        folder: takes metrics and checkpoints; without it nothing is written.
        display: shows the progress; without it nothing is printed.
        should_stop: asked before every step; True saves and stops.
    """
    mesh = mesh or data_mesh()
    require_divisible(config, mesh)
    trainee = GptTrainee(config, precision, data, mesh)
    return loop.train(trainee, folder=folder, display=display, should_stop=should_stop)


def labels_of(data: TextData) -> Labels:
    """The words for a text."""
    return Labels(
        title=f"GPT on {data.name}",
        items="bytes",
        score="test bits\nper byte",
        held_out="files",
        shows_bits=True,
    )


class GptTrainee(Trainee[Config]):
    """A GPT that is being trained."""

    def __init__(
        self, config: Config, precision: Precision, data: TextData, mesh: Mesh
    ):
        self.config = config
        self.precision: Precision = precision
        self.mesh = mesh
        self.labels = labels_of(data)
        self.data = data
        self.model = GPT(
            config.model,
            scan=config.scan,
            remat=config.remat,
            rngs=nnx.Rngs(config.seed),
        )
        self.optimizer = gpt_optimizer(config, self.model)
        self.loss_scaling = initial_scaling(
            precision,
            config.scaling,
            in_precision(loss_and_accuracy, precision),
            self.model,
            data.batch(config, 0),
        )
        self.state = jax.device_put(self.state, replicated(mesh))
        self.compiled: Any = None
        self.evaluate = make_evaluation(precision)

    @property
    def state(self) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(
            nnx.state((self.model, self.optimizer))
        )
        arrays = {name_of(path): without_key(leaf) for path, leaf in leaves}
        return {"nodes": arrays, "scaling": self.loss_scaling}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        def restored(path: Any, leaf: Any) -> Any:
            return with_key_of(leaf, state["nodes"][name_of(path)])

        nodes = (self.model, self.optimizer)
        old = nnx.state(nodes)
        nnx.update(nodes, jax.tree_util.tree_map_with_path(restored, old))
        self.loss_scaling = state["scaling"]

    @property
    def scaling(self) -> mpx.AbstractLossScaling:
        return self.loss_scaling

    @property
    def weights(self) -> Any:
        return nnx.state(self.model, nnx.Param)

    def compile(self) -> int | None:
        step: Any = make_step(self.config, self.precision, self.mesh)
        texts = self.placed(self.data.batch(self.config, 0))
        lowered = step.lower(self.model, self.optimizer, self.loss_scaling, texts)
        self.compiled = lowered.compile()
        return step_bytes(self.compiled.memory_analysis())

    def placed(self, texts: np.ndarray) -> jax.Array:
        return jax.device_put(texts, divided(self.mesh))

    def batches(self, start: int) -> Iterator[jax.Array]:
        for texts in self.data.batches(self.config, start):
            yield self.placed(texts)

    def step(self, batch: jax.Array) -> Metrics:
        self.loss_scaling, metrics = self.compiled(
            self.model, self.optimizer, self.loss_scaling, batch
        )
        return metrics

    def score(self) -> Score:
        losses, accuracies = [], []
        for texts in self.test_batches():
            loss, accuracy = self.evaluate(self.model, self.loss_scaling, texts)
            losses.append(loss)
            accuracies.append(accuracy)
        return Score(
            accuracy=float(jnp.mean(jnp.stack(accuracies))),
            loss=float(jnp.mean(jnp.stack(losses))),
        )

    def test_batches(self) -> Iterator[jax.Array]:
        """The texts of the test in batches of one size; what is left over is not."""
        texts, size = self.data.test, self.config.batch_size
        whole = max(len(texts) // size, 1)
        for index in range(whole):
            rows = np.arange(index * size, (index + 1) * size) % len(texts)
            yield self.placed(texts[rows])


def name_of(path: Any) -> str:
    """A path into the state of the nodes, as a name of a checkpoint's array."""
    keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    return ".".join((("model", "optimizer")[int(keys[0])], *keys[1:]))


def without_key(leaf: Any) -> Any:
    """A random key as numbers, which checkpoints can hold; others as they are."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def with_key_of(like: Any, leaf: Any) -> Any:
    """The inverse, for a leaf whose old value is given."""
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    return (
        jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(like))
        if is_key
        else leaf
    )
