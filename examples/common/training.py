"""Pieces of a training step: loss scaling, optimizer, devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpx

from .config import Precision, Recipe, RunConfig, ScalingConfig
from .errors import SetupError

# As Transformer Engine has them by default.
RECIPES: dict[Recipe, mpx.AbstractRecipe] = {
    "delayed": mpx.DelayedScaling(),
    "current": mpx.Float8CurrentScaling(),
    "block": mpx.Float8BlockScaling(),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(),
}


def in_precision(func: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """A function that knows nothing of precision, by autocast; float32 is itself."""
    if precision == "float32":
        return func
    if precision in RECIPES:
        return mpx.autocast(func, jnp.bfloat16, recipe=RECIPES[precision])
    return mpx.autocast(func, precision)


def initial_scaling(
    precision: Precision, config: ScalingConfig, loss: Callable[..., Any], *args: Any
) -> mpx.AbstractLossScaling:
    """The state that a precision needs: a loss scale for float16, scales for a recipe.

    Args:
        precision: the precision.
        config: the loss scaling of float16.
        loss: the function that is differentiated, which recipes ask for scales.
        args: its arguments, or their shapes.
    """
    if precision in RECIPES:
        return mpx.init_scaling(loss, *args)
    if precision != "float16":
        return mpx.NoLossScaling()
    try:
        return mpx.DynamicLossScaling(
            config.initial, period=config.period, max_loss_scaling=config.maximum
        )
    except ValueError as error:
        raise SetupError(f"`--scaling.*`: {error}") from error


def make_optimizer(
    config: RunConfig, is_decayed: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """AdamW with linear warmup and cosine decay to zero.

    Clipping comes first in the chain and sees unscaled float32 gradients.

    Args:
        config: the run.
        is_decayed: says for a tree of parameters which are decayed.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, max(config.steps - 1, 0)),
        decay_steps=config.steps,
    )
    adamw = optax.adamw(schedule, weight_decay=config.weight_decay, mask=is_decayed)
    if config.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


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


def require_divisible(config: RunConfig, mesh: Mesh) -> None:
    """Every device must get as many examples of every micro-batch."""
    parts = config.accumulate * mesh.size
    if config.batch_size % parts:
        raise SetupError(
            "`--batch-size` must be a multiple of micro-batches times devices, "
            f"{config.accumulate} x {mesh.size}; got {config.batch_size}. Use "
            f"{-(-config.batch_size // parts) * parts}."
        )


def step_bytes(memory: Any) -> int | None:
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
