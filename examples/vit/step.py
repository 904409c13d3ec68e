"""The training step: one function for every precision and style.

`make_loss` is the whole difference between them: which function is differentiated, and
how the gradient function casts. In the explicit style the gradient function casts the
inputs and the model says what stays in full precision; with autocast neither knows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

import mpx

from ..common.config import Precision
from ..common.loop import Metrics
from ..common.training import (
    RECIPES,
    in_precision,
    initial_scaling,
    make_optimizer,
    replicated,
)
from . import model, plain_model
from .config import Config

VisionTransformer = model.VisionTransformer | plain_model.VisionTransformer
Batch = dict[str, Array]


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint must keep."""

    model: VisionTransformer
    opt_state: Any
    scaling: Any
    """An `mpx.AbstractLossScaling`: the loss scale, if there is one, and counters; the
    scales of a recipe, too."""
    position: Int[Array, ""]
    """Batches seen, which is the data position; skipped steps count too."""


def vit_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW that decays matrices."""
    is_matrix = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    return make_optimizer(config, is_matrix)


def initial_state(
    config: Config,
    precision: Precision,
    image_shape: tuple[int, int, int],
    classes: int,
    mesh: Mesh,
) -> TrainState:
    """The same initial model for every precision, on every device of the mesh."""
    key = jax.random.key(config.seed)
    module = model if is_explicit(config, precision) else plain_model
    vit = module.VisionTransformer(config.model, image_shape, classes, key)
    opt_state = vit_optimizer(config).init(eqx.filter(vit, eqx.is_inexact_array))
    batch = {
        "image": jax.ShapeDtypeStruct((config.batch_size, *image_shape), jnp.float32),
        "label": jax.ShapeDtypeStruct((config.batch_size,), jnp.int32),
    }
    loss, _ = make_loss(config, precision)
    scaling = initial_scaling(precision, config.scaling, loss, vit, batch, None)
    state = TrainState(vit, opt_state, scaling, jnp.zeros((), jnp.uint32))
    return eqx.filter_shard(state, replicated(mesh))


def is_explicit(config: Config, precision: Precision) -> bool:
    """Whether the model itself says what stays in full precision; else autocast."""
    return config.style == "explicit" and precision not in RECIPES


def is_norm(path: str, leaf: Any) -> bool:
    """Weights of layer norm: computed with in float32, so not worth a cast to half."""
    return ".layer_norm." in path


def make_loss(
    config: Config, precision: Precision
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The loss function of a precision, and the options of its gradient function.

    Float32 master weights in each case.
    """
    if is_explicit(config, precision):
        loss = functools.partial(loss_and_accuracy, full_precision_cross_entropy)
        policy = f"params=float32,compute={precision},output=float32"
        half = {"policy": mpx.get_policy(policy), "keep": is_norm}
    else:
        loss = functools.partial(loss_and_accuracy, cross_entropy)
        loss, half = in_precision(loss, precision), {}
    return loss, half if precision != "float32" else {"use_mixed_precision": False}


def loss_and_accuracy(
    cross_entropy: Callable[..., Float[Array, ""]],
    model: VisionTransformer,
    batch: Batch,
    key: PRNGKeyArray | None,
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
    """Mean cross entropy in the dtype of the logits."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return jnp.mean(losses)


full_precision_cross_entropy = mpx.force_full_precision(cross_entropy, jnp.float32)


def make_step(config: Config, precision: Precision, mesh: Mesh):
    """Makes the jitted training step.

    Returns:
        A function `state, metrics = step(batch, state)`. It takes over the memory of
        the state; the metrics are scalars that stay on the device.
    """
    optimizer = vit_optimizer(config)
    loss, options = make_loss(config, precision)
    dropout = config.model.dropout > 0

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Batch, state: TrainState) -> tuple[TrainState, Metrics]:
        model, opt_state, scaling, position = state
        key = None
        if dropout:
            key = jax.random.fold_in(jax.random.key(config.seed), position)
        result = mpx.filter_value_and_grad(
            loss, scaling, has_aux=True, accumulate=config.accumulate, **options
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


def make_evaluation(config: Config, precision: Precision):
    """Makes the jitted test of one batch.

    The model is tested in the precision and style it was trained in.

    Returns:
        A function of the state of the training and a batch that returns the number of
        correct answers, and the sum of the losses of all images; padding, with the
        label -1, counts for neither.
    """

    def predict(
        model: VisionTransformer, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch classes"]:
        return jax.vmap(model)(images)

    if is_explicit(config, precision) and precision != "float32":
        predict = mpx.cast_function(predict, jnp.dtype(precision))

    def sums(
        model: VisionTransformer, batch: Batch
    ) -> tuple[Int[Array, ""], Float[Array, ""]]:
        label = batch["label"]
        logits = predict(model, batch["image"])
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == label)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), jnp.maximum(label, 0)
        )
        return correct, jnp.sum(jnp.where(label >= 0, losses, 0.0))

    if not is_explicit(config, precision):
        sums = in_precision(sums, precision)

    @eqx.filter_jit
    def evaluate(state: TrainState, batch: Batch) -> tuple[Array, Array]:
        return mpx.freeze(sums, state.scaling)(state.model, batch)

    return evaluate
