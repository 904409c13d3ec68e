"""A small GPT on Python source text, in float32, float16 and bfloat16, side by side.

From top to bottom: config, model, layout, data, training step, training, main. The
model is plain Flax NNX and knows nothing of precision. `--mesh` divides it over devices
of one process or of several, and changes nothing but where arrays lie.

What mpx does is in the training step: `mpx.autocast` around the loss,
`mpx.init_scaling` for the state that it needs, and `mpx.nnx` in the place of
`nnx.value_and_grad` and `optimizer.update`.

Run it with `python -m examples.gpt` and see `python -m examples.gpt --help`.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, Float, UInt8

import mpx
import mpx.nnx
from examples import runs
from examples.data.text import TextData, load_text
from examples.precisions import AUTOCAST, Precision

BYTES = 256

Texts = UInt8[Array, "batch length"]
Tokens = Float[Array, "batch tokens width"]
Mask = Bool[Array, "#batch 1 tokens tokens"]


# --- Config --------------------------------------------------------------------------
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
class Config(runs.MeshConfig):
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
    scaling: runs.ScalingConfig = runs.ScalingConfig(period=50)
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
        return "gpt"

    def validate(self) -> "Config":
        super().validate()
        is_positive = self.test_texts >= 1
        runs.require(is_positive, self, "test_texts", "must be at least 1")
        # What `LAYOUT` divides.
        for name, axis in [
            ("width", "fsdp"),
            ("heads", "tensor"),
            ("hidden", "tensor"),
        ]:
            parts = self.mesh_sizes.get(axis, 1)
            is_divided = getattr(self.model, name) % parts == 0
            rule = f"must be a multiple of the devices of {axis}, {parts}"
            runs.require(is_divided, self.model, name, rule)
        return self


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    return runs.parse_options({"gpt": Config()}, arguments)


# --- Model ---------------------------------------------------------------------------
class Block(nnx.Module):
    """Causal self-attention, then an MLP, each behind a layer norm and a residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width = config.width
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, width, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.dense_in = nnx.Linear(width, config.hidden, rngs=rngs)
        self.dense_out = nnx.Linear(config.hidden, width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Tokens, mask: Mask) -> Tokens:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        hidden = nnx.gelu(self.dense_in(self.mlp_norm(x)))
        return x + self.dropout(self.dense_out(hidden))


class GPT(nnx.Module):
    """Embedded bytes and places, blocks, a linear layer for the logits."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        scan: bool = False,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        """Draws the initial model.

        Args:
            config: the shape of the transformer.
            scan: whether the blocks are one loop, which compiles faster.
            remat: whether activations are computed again, which needs less memory.
            rngs: the random streams that fix weights and dropout.
        """
        # As large as what the blocks add at first: with the usual 0.02 a short run does
        # not get beyond pairs of bytes.
        normal = nnx.initializers.normal
        self.embed = nnx.Embed(
            BYTES, config.width, embedding_init=normal(1.0), rngs=rngs
        )
        self.place = nnx.Embed(
            config.context, config.width, embedding_init=normal(0.5), rngs=rngs
        )
        if scan:
            stacked = nnx.split_rngs(splits=config.blocks)(
                nnx.vmap(lambda rngs: Block(config, rngs))
            )
            self.blocks: Any = stacked(rngs)
        else:
            self.blocks = nnx.List(Block(config, rngs) for _ in range(config.blocks))
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, BYTES, use_bias=False, rngs=rngs)
        self.scan = scan
        self.remat = remat

    def __call__(
        self, text: UInt8[Array, "batch tokens"]
    ) -> Float[Array, "batch tokens bytes"]:
        """The logits of the byte that follows each byte of a text."""
        x = self.embed(text) + self.place(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        x = self.run_blocks(runs.pin(x), mask)
        return self.head(self.norm(x))

    def run_blocks(self, x: Tokens, mask: Mask) -> Tokens:
        def run(x: Tokens, block: Block, mask: Mask) -> Tokens:
            # Activations stay with their texts, so weights come to them.
            return runs.pin(block(x, mask))

        if self.remat:
            # Hands back what a block has changed, not all of its weights.
            run = nnx.remat(run, graph_updates=False)
        if self.scan:
            carry = nnx.Carry
            return nnx.scan(run, in_axes=(carry, 0, None), out_axes=carry)(
                x, self.blocks, mask
            )
        for block in self.blocks:
            x = run(x, block, mask)
        return x


# --- Layout --------------------------------------------------------------------------
# How weights lie over the devices, by the ends of their names; others lie whole on all.
LAYOUT = {
    "embed.embedding": P(None, ("tensor", "fsdp")),
    "place.embedding": P(None, ("tensor", "fsdp")),
    "query.kernel": P("fsdp", "tensor", None),
    "query.bias": P("tensor", None),
    "key.kernel": P("fsdp", "tensor", None),
    "key.bias": P("tensor", None),
    "value.kernel": P("fsdp", "tensor", None),
    "value.bias": P("tensor", None),
    "out.kernel": P("tensor", None, "fsdp"),
    "dense_in.kernel": P("fsdp", "tensor"),
    "dense_in.bias": P("tensor"),
    "dense_out.kernel": P("tensor", "fsdp"),
    "head.kernel": P("fsdp", "tensor"),
}


def pin_all(nodes: Any) -> None:
    """Says where all arrays lie: weights, and moments, whose names end as theirs."""
    nnx.update(nodes, runs.pin_by_name(nnx.state(nodes), LAYOUT))


# --- Data ----------------------------------------------------------------------------
def load_data(config: Config) -> TextData:
    """Python source text: of its standard library, or of `config.data_path`."""
    length = config.model.context + 1
    return load_text(config.data_path, length=length, test_texts=config.test_texts)


# --- Training step -------------------------------------------------------------------
def loss_and_accuracy(
    model: GPT, texts: Texts
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross entropy of the next byte, and how often the likeliest is right."""
    logits, following = model(texts[:, :-1]), texts[:, 1:].astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    return jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=-1) == following)


def in_precision(precision: Precision) -> Callable[..., Any]:
    """The loss in a precision, which the code of the model never hears of."""
    return mpx.autocast(loss_and_accuracy, **AUTOCAST[precision])


def make_optimizer(config: Config, model: GPT) -> nnx.Optimizer:
    """AdamW that decays the matrices of linear layers, stacked or not."""

    def is_decayed(params: Any) -> Any:
        is_kernel = lambda path, _: "kernel" in jax.tree_util.keystr(path)  # noqa: E731
        return jax.tree_util.tree_map_with_path(is_kernel, params)

    adamw = runs.make_adamw(config, is_decayed)
    # Moments are made where their weights lie.
    init = functools.partial(mpx.init_optimizer, adamw)
    tx = optax.GradientTransformationExtraArgs(init, adamw.update)
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def initial_state(
    config: Config, precision: Precision, texts: Texts
) -> tuple[dict[str, Any], Any]:
    """Model and optimizer, in float32, and the state that a precision needs."""

    @nnx.jit  # so that no device ever holds the whole of what is divided
    def make() -> dict[str, Any]:
        rngs = nnx.Rngs(config.seed)
        model = GPT(config.model, scan=config.scan, remat=config.remat, rngs=rngs)
        pin_all(model)
        nodes = {"model": model, "optimizer": make_optimizer(config, model)}
        pin_all(nodes)
        return nodes

    nodes = make()
    scaling = mpx.init_scaling(in_precision(precision), nodes["model"], texts)
    if precision == "float16":
        scaling = config.scaling.make()  # the same, with the options of this run
    return nodes, scaling


def make_step(config: Config, precision: Precision, mesh: Mesh) -> Any:
    """Makes `scaling, metrics = step(model, optimizer, scaling, texts)`.

    It changes the model and the optimizer in place.
    """
    loss = in_precision(precision)

    @functools.partial(nnx.jit, donate_argnums=(0, 1, 2))
    def step(
        model: GPT, optimizer: nnx.Optimizer, scaling: Any, texts: Texts
    ) -> tuple[Any, runs.Metrics]:
        result = mpx.nnx.value_and_grad(
            loss, scaling, has_aux=True, accumulate=config.accumulate
        )(model, texts)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        pin_all((model, optimizer))
        metrics = runs.metrics_of(result, scaling)
        return jax.lax.with_sharding_constraint(
            (result.scaling, metrics), runs.replicated(mesh)
        )

    return step


def make_test(precision: Precision) -> Any:
    """Makes `loss, accuracy = test(model, scaling, texts)`, without dropout."""
    loss = in_precision(precision)

    @nnx.jit
    def test(model: GPT, scaling: Any, texts: Texts) -> tuple[Array, Array]:
        model = nnx.clone(model)  # the model itself stays in training mode
        model.eval()
        # A recipe that learns scales is tested with those of the training.
        return mpx.inference(loss, scaling)(model, texts)

    return test


def make_monitor(config: Config, precision: Precision) -> Any:
    """Makes `statistics = watch(model, scaling, texts)`, which changes nothing."""
    loss = in_precision(precision)

    def gradients(weights: Any, others: Any, graph: Any, scaling: Any, x: Texts) -> Any:
        result = mpx.nnx.value_and_grad(
            loss, scaling, has_aux=True, accumulate=config.accumulate
        )(nnx.merge(graph, weights, others), x)
        return result.value

    def watch(model: GPT, scaling: Any, texts: Texts) -> mpx.reports.Statistics:
        graph, weights, others = nnx.split(model, nnx.Param, ...)
        return monitored(weights, others, graph, scaling, texts)[1]

    monitored = mpx.monitor(gradients)
    return watch


# --- Training ------------------------------------------------------------------------
def arrays_of(nodes: dict[str, Any]) -> dict[str, Any]:
    """All that NNX's objects hold, by name, as a checkpoint keeps it."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(nodes))
    return {name_of(path): leaf for path, leaf in leaves}


def put_arrays(nodes: dict[str, Any], arrays: dict[str, Any]) -> None:
    """The inverse: changes the objects."""
    take = lambda path, _: arrays[name_of(path)]  # noqa: E731
    nnx.update(nodes, jax.tree_util.tree_map_with_path(take, nnx.state(nodes)))


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def train(
    config: Config,
    precision: Precision,
    data: TextData,
    *,
    mesh: Mesh | None = None,
    folder: runs.RunFolder | None = None,
    display: runs.Display | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[runs.Result, list[runs.Row]]:
    """Trains one model in one precision.

    Runs on all devices, or those of `mesh`. Without a folder nothing is written,
    without a display nothing is printed. Where `should_stop` is true before a step, all
    is saved and `runs.Interrupted` raised.

    Returns:
        The result, and the metrics of every step.
    """
    mesh = mesh or runs.make_mesh(config.mesh_sizes)
    runs.require_divisible(config, mesh)
    with (
        jax.set_mesh(mesh),
        runs.Recorder(config, precision, folder, display) as record,
    ):
        first = runs.put(data.batch(0, size=config.batch_size, seed=config.seed), mesh)
        nodes, scaling = initial_state(config, precision, first)
        scaling = jax.device_put(scaling, runs.replicated(mesh))
        model, optimizer = nodes["model"], nodes["optimizer"]
        test, watch = make_test(precision), make_monitor(config, precision)

        def score() -> runs.Score:
            texts = data.test_batches(config.batch_size)
            parts = [test(model, scaling, runs.put(part, mesh)) for part in texts]
            loss, accuracy = np.mean(jax.device_get(parts), axis=0)
            return runs.Score(float(accuracy), float(loss))

        arrays, scaling = record.restore((arrays_of(nodes), scaling))
        put_arrays(nodes, arrays)
        step = make_step(config, precision, mesh)
        step = step.lower(model, optimizer, scaling, first).compile()
        record.start(step.memory_analysis())
        batches = data.batches(
            config.batch_size, config.seed, record.position, config.steps
        )
        for texts in batches:
            if should_stop():
                record.interrupt((arrays_of(nodes), scaling))
            if record.is_watched():
                record.watch(watch(model, scaling, runs.put(texts, mesh)))
            scaling, metrics = step(model, optimizer, scaling, runs.put(texts, mesh))
            record.add(metrics, texts)  # metrics stay on the device
            if record.is_due():
                record.look((arrays_of(nodes), scaling), score)
                most = config.scaling.max_skipped_in_a_row
                weights = nnx.state(model, nnx.Param)
                mpx.check(scaling, weights, max_skipped_in_a_row=most)
        weights = nnx.state(model, nnx.Param)
        return record.result(score, scaling.skipped, weights), record.rows


def state_before(
    config: Config, data: TextData, bad: runs.BadStep, mesh: Mesh | None = None
) -> tuple[dict[str, Any], Any]:
    """Model, optimizer and scaling as a skipped step had them, bit for bit."""
    mesh = mesh or runs.make_mesh(config.mesh_sizes)
    with jax.set_mesh(mesh):
        first = runs.put(bad.batch, mesh)
        nodes, scaling = initial_state(config, bad.precision, first)
        scaling = jax.device_put(scaling, runs.replicated(mesh))
        (arrays, scaling), start = bad.restore((arrays_of(nodes), scaling))
        put_arrays(nodes, arrays)
        step = make_step(config, bad.precision, mesh)
        stop = bad.step - 1
        for texts in data.batches(config.batch_size, config.seed, start, stop):
            both = nodes["model"], nodes["optimizer"]
            scaling, _ = step(*both, scaling, runs.put(texts, mesh))
    bad.require_same(scaling.loss_scale)
    return nodes, scaling


def blame(config: Config, data: TextData, bad: runs.BadStep) -> mpx.reports.BlameReport:
    """Makes a skipped step again and looks for what went bad in it."""
    nodes, scaling = state_before(config, data, bad)
    graph, weights, others = nnx.split(nodes["model"], nnx.Param, ...)

    def loss(weights: Any, texts: Texts) -> tuple[Array, Array]:
        return loss_and_accuracy(nnx.merge(graph, weights, others), texts)

    loss = mpx.autocast(loss, **AUTOCAST[bad.precision])
    replay = mpx.blame(loss, scaling, has_aux=True, accumulate=config.accumulate)
    return replay(weights, jnp.asarray(bad.batch))


# --- Main ----------------------------------------------------------------------------
def run(config: Config, display: runs.Display, stop: runs.Stop) -> None:
    """Trains every precision, then writes and prints what came out.

    With `--blame` it trains nothing, and says what went bad in a step of a run.
    """
    data = load_data(config)
    if config.blame is not None:
        blame_one = functools.partial(blame, config, data)
        return runs.blame_all(config, config.blame, display, blame_one)
    labels = runs.Labels(
        title=f"GPT on {data.name}",
        data=data.summary,
        items="bytes",
        items_per_step=config.batch_size * config.model.context,
        held_out="files",
        score="test bits\nper byte",
        shows_bits=True,
    )
    train_one = functools.partial(train, config, data=data)
    runs.train_all(config, labels, display, stop, train_one)


if __name__ == "__main__":
    sys.exit(runs.main(run, parse_config, "examples.gpt", target="train-gpt"))
