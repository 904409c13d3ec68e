"""The key of stochastic rounding, from the numbers that are rounded and the step.

A backward pass has no key at hand, and one in the state of training would have to be
split at every product. So the key is a hash of the gradient, with the number of the
training step folded in: within a step the same gradient is rounded the same way, in a
rematerialized pass too, and another one another way; in the next step both are rounded
anew, so that what rounding adds to a gradient that stays as it is averages out. The
hash is a sum of integers, which no order of summation changes: a sharded array has the
hash of the whole.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from .._jax_compat import as_varying, varying_axes
from .._typing import Shape


def key_from(x: Float32[Array, "..."], salt: int, step: Array | None = None) -> Array:
    """A PRNG key that the numbers, their places and the step determine.

    Args:
        x: The numbers.
        salt: A constant, so that two copies of the same numbers get two keys.
        step: The number of the step, an integer; None if nobody knows it.

    Returns:
        A Threefry key.
    """
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        index = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place = place * _as_number(x.shape[axis]) + index
    total = jnp.sum(hashed(x, place), dtype=jnp.uint32)
    return key_of_hash(total, x.shape, salt, step)


def hashed(x: Float32[Array, "..."], place: Array) -> Array:
    """Integers whose sum is the hash of an array.

    Args:
        x: The numbers.
        place: The place of each in the flattened array, in 32 bits.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Odd factors, so that a change of one number always changes the sum. Numbers of
    # bfloat16 differ in their upper bits only, which a product moves nowhere: mix them
    # down first.
    mixed = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    mixed = mixed ^ (mixed >> 15)
    return mixed * (2 * place + 1)


def key_of_hash(total: Array, shape: Shape, salt: int, step: Array | None) -> Array:
    """The key of an array whose hash is known."""
    # Threefry draws the same numbers for an array on one device and on many.
    seed = zlib.crc32(repr((salt, shape)).encode())
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(key, total)
    if step is None:
        return key
    return jax.random.fold_in(key, as_varying(step, varying_axes(total)))


def _as_number(dimension: object) -> Array:
    """A dimension in 32 bits; in an exported program perhaps one of the call."""
    if isinstance(dimension, int):
        return jnp.uint32(dimension & 0xFFFFFFFF)
    return jnp.asarray(dimension).astype(jnp.uint32)
