"""Activations, dropout and the addition of a bias, element by element."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from ._recomputed import Keep, linear, recomputed, widen


def activate(
    activation: Callable[[Array], Array], x: Float[Array, "..."], *gate: Array
) -> Float[Array, "..."]:
    """An activation, perhaps times a gate, computed in float32.

    Kept for the backward pass: the half-precision inputs.
    """

    def evaluate(_: Keep, x: Array, *gate: Array) -> Array:
        y = activation(widen(x))
        return (y * widen(gate[0]) if gate else y).astype(x.dtype)

    return recomputed(evaluate, x, *gate)


def add_bias(x: Float[Array, "... n"], bias: Float[Array, " n"]) -> Array:
    """The sum in the dtype of x; the gradient of the bias is summed in float32."""
    wide = widen(x)
    total = wide + bias.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + bias.shape)
    return total.astype(x.dtype)


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray) -> Array:
    """`drop` of elements that a key chooses."""
    return drop(x, jax.random.bernoulli(key, 1 - rate, x.shape), rate)


def drop(x: Float[Array, "..."], keep: Bool[Array, "..."], rate: float) -> Array:
    r"""Sets elements to 0 that are not kept and divides the rest by 1 - rate.

    Kept for the backward pass: the mask, one byte for each element.
    """

    def evaluate(keep: Array, x: Array) -> Array:
        return jnp.where(keep, widen(x) / (1 - rate), 0).astype(x.dtype)

    return linear(evaluate, keep, x)
