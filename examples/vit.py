"""A Vision Transformer trained in float32, float16 and bfloat16, side by side.

From top to bottom: config, model, data, training step, training, main. The model is
plain Equinox and knows nothing of precision. What mpx does is in the training step:
`mpx.autocast` around the loss, `mpx.init_scaling` for the state that it needs,
`mpx.filter_value_and_grad` and `mpx.optimizer_step`.

Run it with `python -m examples.vit` and see `python -m examples.vit --help`. In
`examples.vit_explicit` the same is trained with every cast written by hand.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, PRNGKeyArray

import mpx
from examples import runs
from examples.data.cifar100 import load_cifar100
from examples.data.digits import load_digits
from examples.data.image_folder import load_image_folder
from examples.data.pipeline import ImageData, batches
from examples.precisions import AUTOCAST, Precision
from examples.presets import CIFAR100, CIFAR100_MODEL, IMAGENET, IMAGENET_MODEL

Batch = dict[str, Array]
Image = Float[Array, "height width channels"]
Tokens = Float[Array, "tokens width"]
Key = PRNGKeyArray | None


# --- Config --------------------------------------------------------------------------
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
class Config(runs.RunConfig):
    """Trains a Vision Transformer in float32, float16 and bfloat16."""

    preset: Literal["digits", "cifar100", "imagenet"]
    """Data set and defaults; only digits needs no `--data-path`."""
    batch_size: int
    """Images per step, over all devices and micro-batches."""
    model: ModelConfig
    data_path: Path | None = None
    """Where the data set lies (cifar100, imagenet)."""
    image_size: int = 224
    """Side of the square that imagenet's images are cropped to."""
    workers: int = 2
    """Threads that prepare batches."""
    fold: int = 0
    """Which of five stratified folds of the digits is held out for the test."""
    style: Literal["autocast", "explicit"] = "autocast"
    """Who casts: `mpx.autocast`, or the model, in `python -m examples.vit_explicit`."""

    @property
    def default_folder(self) -> str:
        return (
            self.preset if self.style == "autocast" else f"{self.preset}-{self.style}"
        )

    def validate(self) -> "Config":
        super().validate()
        runs.require(self.monitor is None, self, "monitor", "is for examples.gpt")
        runs.require(self.workers >= 1, self, "workers", "must be at least 1")
        runs.require(0 <= self.fold < 5, self, "fold", "must be 0, 1, 2, 3 or 4")
        return self


PRESETS = {
    "digits": Config(
        preset="digits",
        steps=800,
        batch_size=64,
        learning_rate=2e-3,
        warmup_steps=50,
        weight_decay=0.05,
        model=ModelConfig(patch=2, width=64, hidden=200, blocks=3, heads=4),
        # A short run: a short period shows the scale searching its place.
        scaling=runs.ScalingConfig(period=50),
    ),
    "cifar100": Config(
        preset="cifar100", model=ModelConfig(**CIFAR100_MODEL), **CIFAR100
    ),
    "imagenet": Config(
        preset="imagenet", model=ModelConfig(**IMAGENET_MODEL), **IMAGENET
    ),
}


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    config = runs.parse_options(PRESETS, arguments)
    rule = "must be autocast here, see examples.vit_explicit"
    runs.require(config.style == "autocast", config, "style", rule)
    return config


# --- Model ---------------------------------------------------------------------------
class AttentionBlock(eqx.Module):
    """Layer norm, multi-head self-attention, residual connection."""

    dense_qs: eqx.nn.Linear
    dense_ks: eqx.nn.Linear
    dense_vs: eqx.nn.Linear
    dense_o: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        width = config.width
        layers = [eqx.nn.Linear(width, width, key=k) for k in jax.random.split(key, 4)]
        self.dense_qs, self.dense_ks, self.dense_vs, self.dense_o = layers
        self.layer_norm = eqx.nn.LayerNorm(width)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.num_heads = config.heads

    def __call__(self, inputs: Tokens, key: Key = None) -> Tokens:
        normed = jax.vmap(self.layer_norm)(inputs)
        dense = (self.dense_qs, self.dense_ks, self.dense_vs)
        q, k, v = (self.split_heads(jax.vmap(layer)(normed)) for layer in dense)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        outputs = jax.nn.softmax(scores, axis=-1) @ v
        outputs = outputs.transpose(1, 0, 2).reshape(inputs.shape)
        outputs = jax.vmap(self.dense_o)(outputs)
        return inputs + self.dropout(outputs, key=key, inference=key is None)

    def split_heads(self, x: Tokens) -> Float[Array, "heads tokens size"]:
        return x.reshape(x.shape[0], self.num_heads, -1).transpose(1, 0, 2)


class MLPBlock(eqx.Module):
    """Layer norm, one hidden layer with GELU, residual connection."""

    dense_in: eqx.nn.Linear
    dense_out: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        in_key, out_key = jax.random.split(key)
        self.dense_in = eqx.nn.Linear(config.width, config.hidden, key=in_key)
        self.dense_out = eqx.nn.Linear(config.hidden, config.width, key=out_key)
        self.layer_norm = eqx.nn.LayerNorm(config.width)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(self, inputs: Tokens, key: Key = None) -> Tokens:
        normed = jax.vmap(self.layer_norm)(inputs)
        outputs = jax.nn.gelu(jax.vmap(self.dense_in)(normed))
        outputs = jax.vmap(self.dense_out)(outputs)
        return inputs + self.dropout(outputs, key=key, inference=key is None)


class VisionTransformer(eqx.Module):
    """The ViT of the MPX paper: one image in, one row of logits out."""

    block_types: ClassVar[tuple[Any, Any]] = (AttentionBlock, MLPBlock)

    embed: eqx.nn.Linear
    position: Float[Array, "tokens width"]
    blocks: list[AttentionBlock | MLPBlock]
    layer_norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self, config: ModelConfig, image_shape: Any, classes: int, key: PRNGKeyArray
    ):
        """Draws the initial model for images of some height, width and channels."""
        height, width, channels = image_shape
        if height % config.patch or width % config.patch:
            raise ValueError(
                "`VisionTransformer(config, image_shape, ...)` needs a patch size that "
                f"divides the image; got patch {config.patch} and an image of "
                f"{height}x{width}. Choose another `--model.patch`."
            )
        tokens = (height // config.patch) * (width // config.patch)
        pixels = config.patch**2 * channels
        embed_key, position_key, head_key, key = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(pixels, config.width, key=embed_key)
        # As large as an embedded patch of standardized pixels is: with the usual 0.02 a
        # small data set takes long to learn where a patch is.
        self.position = 0.5 * jax.random.normal(position_key, (tokens, config.width))
        self.blocks = []
        for block_key in jax.random.split(key, config.blocks):
            keys = jax.random.split(block_key)
            for make, key in zip(self.block_types, keys, strict=True):
                self.blocks.append(make(config, key))
        self.layer_norm = eqx.nn.LayerNorm(config.width)
        self.head = eqx.nn.Linear(config.width, classes, key=head_key)
        self.patch = config.patch

    def __call__(self, image: Image, key: Key = None) -> Float[Array, " classes"]:
        """Classifies one image; a key turns dropout on."""
        x = jax.vmap(self.embed)(self.patches(image)) + self.position
        keys = [None] * len(self.blocks)
        if key is not None:
            keys = list(jax.random.split(key, len(self.blocks)))
        for block, block_key in zip(self.blocks, keys, strict=True):
            x = block(x, block_key)
        return self.head(self.pool(x))

    def pool(self, x: Tokens) -> Float[Array, " width"]:
        return jnp.mean(jax.vmap(self.layer_norm)(x), axis=0)

    def patches(self, image: Image) -> Float[Array, "tokens pixels"]:
        """Cuts the image into square patches, row by row, and flattens each."""
        height, width, channels = image.shape
        p = self.patch
        x = image.reshape(height // p, p, width // p, p, channels)
        return x.transpose(0, 2, 1, 3, 4).reshape(-1, p * p * channels)


# --- Data ----------------------------------------------------------------------------
def load_data(config: Config) -> ImageData:
    """Loads the data set of a preset, or raises a `SetupError` that says what to do."""
    options = {"batch_size": config.batch_size, "seed": config.seed}
    if config.preset == "digits":
        return load_digits(config.fold, **options)
    if config.preset == "cifar100":
        return load_cifar100(config.data_path, **options)
    return load_image_folder(config.data_path, size=config.image_size, **options)


# --- Training step -------------------------------------------------------------------
class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint must keep."""

    model: Any
    opt_state: Any
    scaling: Any
    """The loss scale, if there is one, counters, and the scales of a recipe."""


def cross_entropy(logits: Float[Array, "batch classes"], labels: Array) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss_and_accuracy(
    model: VisionTransformer,
    batch: Batch,
    key: Key,
    cross_entropy: Callable[..., Array] = cross_entropy,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross entropy and accuracy; a key turns dropout on."""
    images, labels = batch["image"], batch["label"]
    if key is None:
        logits = jax.vmap(model)(images)
    else:
        logits = jax.vmap(model)(images, jax.random.split(key, len(labels)))
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
    return cross_entropy(logits, labels), accuracy


def in_precision(func: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """The function in a precision; the code of the model never hears of it."""
    return mpx.autocast(func, **AUTOCAST[precision])


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW that decays matrices."""
    is_matrix = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    return runs.make_adamw(config, is_matrix)


def initial_state(
    config: Config, precision: Precision, model: VisionTransformer, batch: Batch
) -> TrainState:
    """Float32 master weights and the state that a precision needs."""
    opt_state = make_optimizer(config).init(eqx.filter(model, eqx.is_inexact_array))
    loss = in_precision(loss_and_accuracy, precision)
    scaling = mpx.init_scaling(loss, model, batch, None)
    if precision == "float16":
        scaling = config.scaling.make()  # the same, with the options of this run
    return TrainState(model, opt_state, scaling)


def make_step(config: Config, precision: Precision, mesh: Mesh) -> Any:
    """Makes `state, metrics = step(batch, state)`, which takes over the old state."""
    optimizer = make_optimizer(config)
    loss = in_precision(loss_and_accuracy, precision)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Batch, state: TrainState) -> tuple[TrainState, runs.Metrics]:
        model, opt_state, scaling = state
        result = mpx.filter_value_and_grad(
            loss, scaling, has_aux=True, accumulate=config.accumulate
        )(model, batch, key_of(config, scaling))
        state = TrainState(*mpx.optimizer_step(model, optimizer, opt_state, result))
        metrics = runs.metrics_of(result, scaling)
        return eqx.filter_shard((state, metrics), runs.replicated(mesh))

    return step


def key_of(config: Config, scaling: Any) -> Key:
    """The key of dropout in a step, which the steps before it make."""
    if config.model.dropout == 0:
        return None
    return jax.random.fold_in(jax.random.key(config.seed), scaling.steps)


def make_test(precision: Precision, in_precision: Callable[..., Any]) -> Any:
    """Makes `correct, losses = test(state, batch)`, sums over the images of a batch."""

    def sums(model: VisionTransformer, batch: Batch) -> tuple[Array, Array]:
        label = batch["label"]  # -1 where the last batch is filled up
        logits = jax.vmap(model)(batch["image"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.maximum(label, 0)
        )
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == label)
        return correct, jnp.sum(jnp.where(label >= 0, losses, 0.0))

    sums = in_precision(sums, precision)

    @eqx.filter_jit
    def test(state: TrainState, batch: Batch) -> tuple[Array, Array]:
        # A recipe that learns scales is tested with those of the training.
        return mpx.inference(sums, state.scaling)(state.model, batch)

    return test


# --- Training ------------------------------------------------------------------------
def in_step(precision: Precision) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What the gradient function is given: the loss, and options."""
    return in_precision(loss_and_accuracy, precision), {}


class Style(NamedTuple):
    """What is another one in `examples.vit_explicit`."""

    model: Callable[..., VisionTransformer] = VisionTransformer
    in_precision: Callable[..., Any] = in_precision
    make_step: Callable[..., Any] = make_step
    in_step: Callable[..., Any] = in_step


def train(
    config: Config,
    precision: Precision,
    data: ImageData,
    *,
    style: Style = Style(),  # noqa: B008
    mesh: Mesh | None = None,
    folder: runs.RunFolder | None = None,
    display: runs.Display | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[runs.Result, list[runs.Row]]:
    """Trains one model in one precision.

    Runs on all local devices, or those of `mesh`. Without a folder nothing is written,
    without a display nothing is printed. Where `should_stop` is true before a step, all
    is saved and `runs.Interrupted` raised.

    Returns:
        The result, and the metrics of every step.
    """
    mesh = mesh or runs.data_mesh()
    runs.require_divisible(config, mesh)
    divided, size = runs.divided(mesh), config.batch_size
    batch = {
        "image": jnp.zeros((size, *data.image_shape), device=divided),
        "label": jnp.zeros(size, jnp.int32, device=divided),
    }
    state = first_state(config, precision, data, style, batch, mesh)
    test = make_test(precision, style.in_precision)

    def score() -> runs.Score:
        correct, loss = 0, 0.0
        for batch in batches(data.test, config.workers):
            sums = test(state, jax.device_put(batch, divided))
            correct, loss = correct + int(sums[0]), loss + float(sums[1])
        return runs.Score(correct / data.test_size, loss / data.test_size)

    with runs.Recorder(config, precision, folder, display) as recorder:
        state = recorder.restore(state)
        step = style.make_step(config, precision, mesh).lower(batch, state).compile()
        recorder.start(step.compiled.memory_analysis())
        start, stop = recorder.position, config.steps
        for batch in batches(data.train, config.workers, start, stop):
            if should_stop():
                recorder.interrupt(state)
            state, metrics = step(jax.device_put(batch, divided), state)
            recorder.add(metrics, batch)  # metrics stay on the device
            if recorder.is_due():
                recorder.look(state, score)
                most = config.scaling.max_skipped_in_a_row
                mpx.check(state.scaling, state.model, max_skipped_in_a_row=most)
        weights = eqx.filter(state.model, eqx.is_inexact_array)
        return recorder.result(score, state.scaling.skipped, weights), recorder.rows


def first_state(
    config: Config,
    precision: Precision,
    data: ImageData,
    style: Style,
    batch: Batch,
    mesh: Mesh,
) -> TrainState:
    """The initial state, whole on every device."""
    key = jax.random.key(config.seed)
    model = style.model(config.model, data.image_shape, data.classes, key)
    state = initial_state(config, precision, model, batch)
    return eqx.filter_shard(state, runs.replicated(mesh))


def state_before(
    config: Config,
    data: ImageData,
    bad: runs.BadStep,
    *,
    style: Style = Style(),  # noqa: B008
    mesh: Mesh | None = None,
) -> TrainState:
    """The state as a skipped step had it, bit for bit."""
    mesh = mesh or runs.data_mesh()
    batch = jax.device_put(bad.batch, runs.divided(mesh))
    state = first_state(config, bad.precision, data, style, batch, mesh)
    state, start = bad.restore(state)
    step = style.make_step(config, bad.precision, mesh)
    for batch in batches(data.train, config.workers, start, bad.step - 1):
        state, _ = step(jax.device_put(batch, runs.divided(mesh)), state)
    bad.require_same(state.scaling.loss_scale)
    return state


def blame(
    config: Config,
    data: ImageData,
    bad: runs.BadStep,
    style: Style = Style(),  # noqa: B008
) -> mpx.reports.BlameReport:
    """Makes a skipped step again and looks for what went bad in it."""
    model, _, scaling = state_before(config, data, bad, style=style)
    loss, options = style.in_step(bad.precision)
    replay = mpx.blame(loss, scaling, True, accumulate=config.accumulate, **options)
    return replay(model, jax.tree.map(jnp.asarray, bad.batch), key_of(config, scaling))


# --- Main ----------------------------------------------------------------------------
def run(
    config: Config,
    display: runs.Display,
    stop: runs.Stop,
    style: Style = Style(),  # noqa: B008
) -> None:
    """Trains every precision, then writes and prints what came out.

    With `--blame` it trains nothing, and says what went bad in a step of a run.
    """
    data = load_data(config)
    if config.blame is not None:
        blame_one = functools.partial(blame, config, data, style=style)
        return runs.blame_all(config, config.blame, display, blame_one)
    labels = runs.Labels(
        title=f"ViT on {data.name}" + ", explicit" * (config.style == "explicit"),
        data=data.summary,
        notes=data.notes,
        items="images",
        items_per_step=config.batch_size,
        passes=config.steps * config.batch_size / data.train_size,
        held_out="images",
        score="test\naccuracy",
    )
    train_one = functools.partial(train, config, data=data, style=style)
    runs.train_all(config, labels, display, stop, train_one)


if __name__ == "__main__":
    sys.exit(runs.main(run, parse_config, "examples.vit", target="train"))
