"""Copies of scales, and what comes back in the place of their derivatives.

No derivatives, but amaxes: of several copies the maximum, where JAX would add up.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._quantize import Role, largest_magnitude

# Scales for input, weight and gradient.
ROLES = len(Role)
_INPUT, _WEIGHT = (tuple(Role).index(role) for role in (Role.INPUT, Role.WEIGHT))


def shared(x: Array, count: int) -> tuple[Array, ...]:
    """Copies of scales, of whose amaxes the maximum comes back."""
    return (x,) if count == 1 else _shared(count, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared(count: int, x: Array) -> tuple[Array, ...]:
    return (x,) * count


def _shared_forward(count: int, x: Array) -> PyTree:
    return (x,) * count, None


def _shared_backward(count: int, _: None, amaxes: tuple[Array, ...]) -> PyTree:
    return (largest_magnitude(jnp.stack(amaxes), (0,)),)


_shared.defvjp(_shared_forward, _shared_backward)


@jax.custom_vjp
def with_input_scale(scales: Array, first: Array) -> Array:
    """Scales with the input's of those of another product that reads the same array.

    Each slot learns what it would have learned alone. The first one learns the input's
    amax from all: its own product may have no derivative, behind a `stop_gradient`.
    """
    # The compiler sees through these, and finds one number (2026-11: not through
    # `.at[].set`).
    parts = (scales[:_INPUT], first[_INPUT : _INPUT + 1], scales[_INPUT + 1 :])
    return jnp.concatenate(parts)


def _with_input_scale_forward(scales: Array, first: Array) -> PyTree:
    return with_input_scale(scales, first), None


def _with_input_scale_backward(_: None, amaxes: Array) -> PyTree:
    is_input = jnp.arange(ROLES) == _INPUT
    return amaxes, jnp.where(is_input, amaxes, 0)


with_input_scale.defvjp(_with_input_scale_forward, _with_input_scale_backward)


@jax.custom_vjp
def with_weight_amax(scales: Array, amax: Array) -> Array:
    """Scales of which the weight's amax is known: where 0 comes back, it is this."""
    return scales


def _with_weight_amax_forward(scales: Array, amax: Array) -> PyTree:
    return scales, amax


def _with_weight_amax_backward(amax: Array, amaxes: Array) -> PyTree:
    found = amaxes[..., _WEIGHT : _WEIGHT + 1]
    weight = jnp.where(found == 0, amax[..., None], found)
    parts = (amaxes[..., :_WEIGHT], weight, amaxes[..., _WEIGHT + 1 :])
    return jnp.concatenate(parts, axis=-1), None


with_weight_amax.defvjp(_with_weight_amax_forward, _with_weight_amax_backward)


def repeated(x: Array, length: int) -> Array:
    """Scales for each turn of a loop, of whose amaxes the maximum comes back."""
    return _repeated(length, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeated(length: int, x: Array) -> Array:
    return jnp.broadcast_to(x, (length, *x.shape))


def _repeated_forward(length: int, x: Array) -> PyTree:
    return _repeated(length, x), None


def _repeated_backward(length: int, _: None, amaxes: Array) -> PyTree:
    return (largest_magnitude(amaxes, (0,)),)


_repeated.defvjp(_repeated_forward, _repeated_backward)
