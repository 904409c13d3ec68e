"""The training step: one function for every precision.

`PRECISIONS` is the whole difference between float32, float16 and bfloat16: which loss
scaling the state starts with and how the gradient function casts. Other styles of mixed
precision (operation by operation, 8-bit recipes) would be further entries of it.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

import mpx

from .config import Config, Precision, ScalingConfig
from .errors import SetupError
from .model import VisionTransformer

Metrics = dict[str, Array]


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint must keep."""

    model: VisionTransformer
    opt_state: Any
    scaling: Any
    """An `mpx.AbstractLossScaling`: the loss scale, if there is one, and counters."""
    position: Int[Array, ""]
    """Batches seen, which is the data position; skipped steps count too."""


def initial_scaling(
    precision: Precision, config: ScalingConfig
) -> mpx.AbstractLossScaling:
    """The state that a precision needs: a loss scale for float16, none otherwise."""
    if precision != "float16":
        return mpx.NoLossScaling()
    try:
        return mpx.DynamicLossScaling(
            config.initial, period=config.period, max_loss_scaling=config.maximum
        )
    except ValueError as error:
        raise SetupError(f"`--scaling.*`: {error}") from error


def gradient_options(precision: Precision) -> dict[str, Any]:
    """How the gradient function casts: float32 master weights in each case."""
    if precision == "float32":
        return {"use_mixed_precision": False}
    policy = f"params=float32,compute={precision},output=float32"
    return {"policy": mpx.get_policy(policy)}


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with linear warmup and cosine decay to zero.

    Clipping comes first in the chain and sees unscaled float32 gradients.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, max(config.steps - 1, 0)),
        decay_steps=config.steps,
    )
    adamw = optax.adamw(
        schedule,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )
    if config.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def initial_state(
    config: Config,
    precision: Precision,
    image_shape: tuple[int, int, int],
    classes: int,
    mesh: Mesh,
) -> TrainState:
    """The same initial model for every precision, on every device of the mesh."""
    key = jax.random.key(config.seed)
    model = VisionTransformer(config.model, image_shape, classes, key)
    opt_state = make_optimizer(config).init(eqx.filter(model, eqx.is_inexact_array))
    scaling = initial_scaling(precision, config.scaling)
    state = TrainState(model, opt_state, scaling, jnp.zeros((), jnp.uint32))
    return eqx.filter_shard(state, replicated(mesh))


def loss_and_accuracy(
    model: VisionTransformer, batch: dict[str, Array], key: PRNGKeyArray | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross entropy and accuracy, both float32."""
    if key is None:
        logits = jax.vmap(model)(batch["image"])
    else:
        keys = jax.random.split(key, len(batch["label"]))
        logits = jax.vmap(model)(batch["image"], keys)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
    return cross_entropy(logits, batch["label"]), accuracy


def cross_entropy(
    logits: Float[Array, "batch classes"], label: Int[Array, " batch"]
) -> Float[Array, ""]:
    """Mean cross entropy in full precision, whatever the dtype of the logits."""

    def mean_loss(logits: Float[Array, "batch classes"]) -> Float[Array, ""]:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return jnp.mean(losses)

    return mpx.force_full_precision(mean_loss, jnp.float32)(logits)


def make_step(config: Config, precision: Precision, mesh: Mesh):
    """Makes the jitted training step.

    Returns:
        A function `state, metrics = step(batch, state)`. It takes over the memory of
        the state; the metrics are scalars that stay on the device.
    """
    optimizer = make_optimizer(config)
    options = gradient_options(precision)
    dropout = config.model.dropout > 0

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: dict[str, Array], state: TrainState) -> tuple[TrainState, Metrics]:
        model, opt_state, scaling, position = state
        key = None
        if dropout:
            key = jax.random.fold_in(jax.random.key(config.seed), position)
        result = mpx.filter_value_and_grad(
            loss_and_accuracy,
            scaling,
            has_aux=True,
            accumulate=config.accumulate,
            **options,
        )(model, batch, key)
        model, opt_state, new_scaling = mpx.optimizer_step(
            model, optimizer, opt_state, result
        )
        new_state = TrainState(model, opt_state, new_scaling, position + jnp.uint32(1))
        metrics = {
            "loss": result.value,
            "accuracy": jnp.mean(result.aux),  # one number per micro-batch
            "loss_scale": scaling.loss_scale,
            "finite": result.finite,
            "skipped": new_state.scaling.skipped,
        }
        return eqx.filter_shard((new_state, metrics), replicated(mesh))

    return step


def make_evaluation(precision: Precision):
    """Makes the jitted test of one batch: the number of correct answers.

    The model is tested in the precision it was trained in.
    """
    dtype = jnp.dtype(precision)

    @eqx.filter_jit
    def count_correct(
        model: VisionTransformer, batch: dict[str, Array]
    ) -> Int[Array, ""]:
        model, images = mpx.cast_tree((model, batch["image"]), dtype)
        answers = jnp.argmax(jax.vmap(model)(images), axis=-1)
        return jnp.sum(answers == batch["label"])  # padding, -1, is never correct

    return count_correct


def data_mesh() -> Mesh:
    """One axis over all local devices, for data parallelism."""
    devices = jax.local_devices()
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """A full copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def divided(mesh: Mesh) -> NamedSharding:
    """The leading axis divided over the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))
