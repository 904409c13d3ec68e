"""The noise of stochastic rounding, from the numbers that are rounded and the step.

A backward pass has no key at hand, and one in the state of training would have to be
split at every product. So the noise is keyed by a hash of the gradient and by the
number of the training step: within a step the same gradient is rounded the same way, in
a rematerialized pass too, and another one another way; in the next step both are
rounded anew, so that what rounding adds to a gradient that stays as it is averages out.
The hash is a sum of integers, which no order of summation changes: a sharded array has
the hash of the whole.

What is drawn for a number is a hash of its place: 18 operations on integers. Threefry's
20 rounds are more than 100, of which a kernel that rounds an array to 4 bits would do
each for every two bytes that it reads. No GPU has measured what that saves.
"""

import zlib
from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt32

from .._jax_compat import as_varying, varying_axes
from .._typing import Shape


class Noise(eqx.Module):
    """What determines draws: 64 bits, in two halves.

    Attributes:
        first: From the numbers that are rounded.
        second: From the step.
    """

    first: UInt32[Array, ""]
    second: UInt32[Array, ""]

    @property
    def halves(self) -> UInt32[Array, "2"]:
        """Both, for a kernel."""
        return jnp.stack([self.first, self.second])

    def uniform(self, shape: Shape) -> Float32[Array, "..."]:
        """A draw from [0, 1) for each number of an array, of 23 bits."""
        return uniform(self.first, self.second, places(shape))


# A PRNG key of JAX, which a user gives, or noise.
Key: TypeAlias = Array | Noise


def uniform(first: Array, second: Array, place: Array) -> Array:
    """The draws of noise for places; see `Noise`."""
    bits = mixed(mixed(place ^ first) + second)
    one_to_two = (bits >> 9) | np.uint32(0x3F800000)
    return lax.bitcast_convert_type(one_to_two, jnp.float32) - 1.0


def mixed(x: Array) -> Array:
    """A permutation of the integers of 32 bits without a visible order.

    Each bit of the result changes for half of the changes of one bit of `x`.

    Source: Chris Wellons, Prospecting for Hash Functions (2018), `lowbias32`.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def noise_from(x: Float32[Array, "..."], salt: int, step: Array | None = None) -> Noise:
    """The noise that the numbers, their places and the step determine.

    Args:
        x: The numbers.
        salt: A constant, so that two copies of the same numbers get two noises.
        step: The number of the step, an integer; None if nobody knows it.
    """
    total = jnp.sum(hashed(x, places(x.shape)), dtype=jnp.uint32)
    return noise_of_hash(total, x.shape, salt, step)


def places(shape: Shape) -> Array:
    """The place of each number in the flattened array, in 32 bits."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        index = lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place * _as_number(length) + index
    return place


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


def noise_of_hash(
    total: UInt32[Array, ""], shape: Shape, salt: int, step: Array | None
) -> Noise:
    """The noise of an array whose hash is known."""
    seed = zlib.crc32(repr((salt, shape)).encode())
    second = jnp.zeros((), jnp.uint32) if step is None else step.astype(jnp.uint32)
    second = mixed(second + np.uint32(seed))
    return Noise(mixed(total), as_varying(second, varying_axes(total)))


def _as_number(dimension: object) -> Array:
    """A dimension in 32 bits; in an exported program perhaps one of the call."""
    if isinstance(dimension, int):
        return jnp.uint32(dimension & 0xFFFFFFFF)
    return jnp.asarray(dimension).astype(jnp.uint32)
