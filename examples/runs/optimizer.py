"""The optimizer that the options describe."""

from collections.abc import Callable
from typing import Any

import optax

from .config import RunConfig


def make_adamw(
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
        warmup_steps=min(config.warmup_steps, config.steps - 1),
        decay_steps=config.steps,
    )
    adamw = optax.adamw(schedule, weight_decay=config.weight_decay, mask=is_decayed)
    if config.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)
