"""Numbers for batches, and the two losses that most programs use."""

from typing import Any

import jax
import jax.numpy as jnp


def normal(key: Any, *shape: int) -> jax.Array:
    """Normally distributed float32 numbers."""
    return jax.random.normal(key, shape, jnp.float32)


def labels(key: Any, *shape: int, classes: int) -> jax.Array:
    """Whole numbers from 0 on."""
    return jax.random.randint(key, shape, 0, classes)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean loss of classification, written with JAX alone."""
    scores = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))


def mean_square(x: Any) -> Any:
    """The mean of squares."""
    return jnp.mean(jnp.square(x))
