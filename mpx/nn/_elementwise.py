"""Activations, dropout and the addition of a bias, element by element."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from .._dtypes import is_half
from ._linear_part import from_residuals, widen


def activate(
    activation: Callable[[Array], Array], x: Float[Array, "..."]
) -> Float[Array, "..."]:
    """An activation, computed in float32, which keeps its half-precision input."""
    return _activate(activation, x) if is_half(x.dtype) else activation(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _activate(activation: Callable[[Array], Array], x: Array) -> Array:
    return activation(widen(x)).astype(x.dtype)


@_activate.defjvp
def _activate_rule(
    activation: Callable[[Array], Array], primals: PyTree, tangents: PyTree
) -> PyTree:
    (x,) = primals

    def linear_part(x: Array, dot: Array) -> Array:
        _, change = jax.jvp(activation, (widen(x),), (widen(dot),))
        return change.astype(x.dtype)

    return _activate(activation, x), from_residuals(linear_part, x, tangents[0])


def activate_gated(
    activation: Callable[[Array], Array], x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
    """An activation times a gate, in float32; both half-precision inputs are kept."""
    gate = _gated if is_half(x.dtype) else _gated_wide
    return gate(activation, x, y)


def _gated_wide(activation: Callable[[Array], Array], x: Array, y: Array) -> Array:
    return activation(x) * y


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gated(activation: Callable[[Array], Array], x: Array, y: Array) -> Array:
    return _gated_wide(activation, widen(x), widen(y)).astype(x.dtype)


@_gated.defjvp
def _gated_rule(
    activation: Callable[[Array], Array], primals: PyTree, tangents: PyTree
) -> PyTree:
    x, _ = primals

    def linear_part(primals: PyTree, dots: PyTree) -> Array:
        wide, wide_dots = jax.tree.map(widen, (primals, dots))
        func = functools.partial(_gated_wide, activation)
        return jax.jvp(func, wide, wide_dots)[1].astype(x.dtype)

    return _gated(activation, *primals), from_residuals(linear_part, primals, tangents)


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

    def linear_part(keep: Array, x: Array) -> Array:
        return jnp.where(keep, widen(x) / (1 - rate), 0).astype(x.dtype)

    return from_residuals(linear_part, keep, x)
