"""One number for all bits of an array, the same on any number of devices.

Each number's bits and its place are mixed into 32 bits, one-to-one for every place, and
these are added, modulo 2^32: in whatever order and wherever the parts lie. So a change
of one number always changes the digest, and any other one with probability 1 - 2^-32.
Every device reads what it has; nothing is gathered.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

# The finalizer of MurmurHash3 (Appleby 2011), and 2^32 over the golden ratio.
SHIFTS_AND_FACTORS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
PLACES_APART = 0x9E3779B9


def digests(tree: Any) -> dict[str, int]:
    """The digest of every array, by its path in the tree: `model.embed.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves
    ]
    found = jax.device_get(_digests([leaf for _, leaf in leaves]))
    return {name: int(value) for name, value in zip(names, found, strict=True)}


@jax.jit
def _digests(arrays: list[Array]) -> list[UInt32[Array, ""]]:
    return [_digest(x) for x in arrays]


def _digest(x: Array) -> UInt32[Array, ""]:
    width = x.dtype.itemsize
    bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f"uint{8 * width}")
    mixed = bits.astype(jnp.uint32)
    for axis, size in enumerate(x.shape):
        step = PLACES_APART * math.prod(x.shape[axis + 1 :]) % 2**32
        place = jnp.arange(size, dtype=jnp.uint32) * np.uint32(step)
        mixed += jnp.expand_dims(place, tuple(set(range(x.ndim)) - {axis}))
    for shift, factor in SHIFTS_AND_FACTORS:
        mixed = (mixed ^ (mixed >> shift)) * np.uint32(factor)
    return jnp.sum(mixed, dtype=jnp.uint32)
