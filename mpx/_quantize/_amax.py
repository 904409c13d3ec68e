"""Amaxes of whole arrays where an array is in pieces: on devices, or under `jax.vmap`.

A scale for a whole tensor has to be the same on all devices that hold a piece of it.
Under `jax.jit` over a mesh it is, because the program is one for all of them. Under
`shard_map` the program sees a piece, and the maximum has to be taken of all.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._jax_compat import as_varying, varying_axes

Join = Callable[[Array], Array]


def alone(amax: Array) -> Array:
    """The amax as it is: this is the whole array."""
    return amax


def joined_over(axes: tuple[str, ...], all_vary: bool) -> Join:
    """A function that takes the maximum of an amax over axes of `shard_map`.

    Args:
        axes: The axes.
        all_vary: Take it over all of them. Otherwise over those on which JAX says that
            the amax varies, if it says so (`check_vma=True`).
    """
    if not axes:
        return alone

    def join(amax: Array) -> Array:
        is_known = bool(varying_axes(lax.axis_index(axes[0])))
        found = varying_axes(amax) if is_known and not all_vary else axes
        names = tuple(axis for axis in axes if axis in found)
        if not names:
            return amax
        # Of the bits, as in `largest_magnitude`: a maximum of floats may lose a NaN.
        bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), names)
        return lax.bitcast_convert_type(bits, jnp.float32)

    return join


def as_cotangent(amaxes: Array, scales: Array, summed_axes: tuple[str, ...]) -> Array:
    """Amaxes as what the backward rule returns in the place of a cotangent of scales.

    Args:
        amaxes: The amaxes, equal on all devices.
        scales: The scales.
        summed_axes: The axes of `shard_map(check_vma=False)`, over which JAX adds up
            cotangents: one device contributes, so that the sum is the amax.
    """
    for axis in summed_axes:
        amaxes = jnp.where(lax.axis_index(axis) == 0, amaxes, 0.0)
    return as_varying(amaxes, varying_axes(scales))


@jax.custom_batching.custom_vmap
def refuse_batching(amax: Array, scales: Array) -> Array:
    """The amax; an error where a vmap batches it and not the scales."""
    return amax


@refuse_batching.def_vmap
def _refuse_batching_rule(
    axis_size: int, in_batched: Sequence[bool], amax: Array, scales: Array
) -> tuple[Array, bool]:
    if in_batched[0] and not in_batched[1]:
        raise ValueError(
            f"Delayed scaling inside `jax.vmap` would sum the amaxes of {axis_size} "
            "examples instead of taking their maximum. Put `mpx.autocast` outside "
            "vmap: `mpx.autocast(jax.vmap(f))`, not `jax.vmap(mpx.autocast(f))`. "
            "For separate models, as over seeds, make a state for each in a vmap "
            "that returns it: `states = jax.vmap(init)(seeds)`, with "
            "`mpx.init_scaling` in `init`, then `jax.vmap(step)(*states)`."
        )
    return refuse_batching(amax, scales), in_batched[0]
