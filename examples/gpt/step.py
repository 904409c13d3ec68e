"""The training step of a model that knows nothing of mixed precision.

All of mpx stands here: `mpx.autocast` around the loss (see `common.training`),
`mpx.nnx.value_and_grad` in the place of `nnx.value_and_grad`, and `mpx.nnx.update` in
that of `optimizer.update`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt8

import mpx
import mpx.nnx

from ..common.config import Precision
from ..common.loop import Metrics
from ..common.training import in_precision, make_optimizer, replicated
from .config import Config
from .model import GPT

Texts = UInt8[Array, "batch length"]


def loss_and_accuracy(
    model: GPT, texts: Texts
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean cross entropy of the next byte, and how often the likeliest is right."""
    logits, following = model(texts[:, :-1]), texts[:, 1:].astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    return jnp.mean(losses), jnp.mean(jnp.argmax(logits, axis=-1) == following)


def gpt_optimizer(config: Config, model: GPT) -> nnx.Optimizer:
    """AdamW that decays the matrices of linear layers, stacked or not."""

    def is_decayed(params: Any) -> Any:
        def is_kernel(path: Any, value: Any) -> bool:
            del value
            return "kernel" in jax.tree_util.keystr(path)

        return jax.tree_util.tree_map_with_path(is_kernel, params)

    return nnx.Optimizer(model, make_optimizer(config, is_decayed), wrt=nnx.Param)


def make_step(config: Config, precision: Precision, mesh: Mesh):
    """Makes the jitted training step.

    Returns:
        A function `scaling, metrics = step(model, optimizer, scaling, texts)` that
        changes the model and the optimizer in place. The metrics are scalars that stay
        on the device.
    """
    loss = in_precision(loss_and_accuracy, precision)
    options: dict[str, Any] = {}
    if precision == "float32":
        options = {"use_mixed_precision": False}

    @functools.partial(nnx.jit, donate_argnums=(0, 1, 2))
    def step(
        model: GPT, optimizer: nnx.Optimizer, scaling: Any, texts: Texts
    ) -> tuple[Any, Metrics]:
        result = mpx.nnx.value_and_grad(
            loss, scaling, has_aux=True, accumulate=config.accumulate, **options
        )(model, texts)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        metrics = {
            "loss": result.value,
            "accuracy": jnp.mean(result.aux),  # one number per micro-batch
            "loss_scale": scaling.loss_scale,
            "finite": result.finite,
            "skipped": result.scaling.skipped,
        }
        place((model, optimizer), mesh)
        return jax.lax.with_sharding_constraint(
            (result.scaling, metrics), replicated(mesh)
        )

    return step


def place(nodes: Any, mesh: Mesh) -> None:
    """Puts a copy of what NNX objects hold on every device."""
    state = nnx.state(nodes)
    nnx.update(nodes, jax.lax.with_sharding_constraint(state, replicated(mesh)))


def make_evaluation(precision: Precision):
    """Makes the jitted test of one batch, in the precision of the training.

    Returns:
        A function of the model, the scaling and a batch that returns the mean loss and
        the accuracy.
    """
    loss = in_precision(loss_and_accuracy, precision)

    def evaluate(model: GPT, scaling: Any, texts: Texts) -> tuple[Array, Array]:
        model = nnx.clone(model)  # the model itself stays in training mode
        model.eval()
        return mpx.freeze(loss, scaling)(model, texts)

    return nnx.jit(evaluate)
