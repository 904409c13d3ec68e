"""Which arrays stand for weights in 8 bits, so that products can read those instead.

Functions compute with arrays, so a stored weight is dequantized where a function is
called. A product under a recipe of the same format reads its 8 bits: the payload and
the one inverse scale, as they are, and nothing reads the array, which is then never
made (under `jax.jit`). Its gradient goes to the array, as ever.

An array and its payload are paired by the identity of the array, from the gradient
function, which dequantizes and differentiates, to the autocast function in it.

Sharp edge: what JAX traces on the way (`jax.jit`, `jax.checkpoint` or `jax.shard_map`
around the autocast function, inside of the gradient function) makes arrays of its own,
of which nothing is known: a recipe quantizes them, as it does other weights.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ._ambient_record import Payloads as Payloads, unkeyed, with_unkeyed
from ._quantize import QuantizedArray
from ._stored_weights import dequantize_weights, is_stored
from ._tree import is_whole


def dequantized(tree: PyTree) -> tuple[PyTree, Payloads]:
    """A tree with arrays for stored weights, and the payloads that are known.

    Args:
        tree: Any PyTree.

    Returns:
        What `dequantize_weights` gives, and the payloads of the arrays in it that have
        one scale: those of `tree` and those that `reading` told of.
    """
    arrays = dequantize_weights(tree)
    known = unkeyed().payloads
    if arrays is tree:
        return tree, known
    pairs = zip(
        jax.tree.leaves(tree, is_leaf=is_whole),
        jax.tree.leaves(arrays, is_leaf=is_whole),
        strict=True,
    )
    own = {
        id(array): (array, dataclasses.replace(node.quantized, guard=None))
        for node, array in pairs
        if is_stored(node) and _has_one_scale(node.quantized)
    }
    return arrays, {**known, **own}


def reading(payloads: Payloads) -> contextlib.AbstractContextManager[None]:
    """Autocast functions that are called inside know these payloads."""
    return with_unkeyed(payloads=payloads)


def standing_for(
    arrays: PyTree, others: PyTree
) -> contextlib.AbstractContextManager[None]:
    """Inside, arrays such as tracers of a derivative are others of one structure.

    Args:
        arrays: The arrays, as a function gets them.
        others: Those that may be known.
    """
    known = unkeyed().payloads
    if not known:
        return contextlib.nullcontext()
    pairs = zip(jax.tree.leaves(arrays), jax.tree.leaves(others), strict=True)
    more = {
        id(array): (array, known[id(other)][1])
        for array, other in pairs
        if id(other) in known
    }
    return reading({**known, **more})


def payload_of(array: object, payloads: Mapping[int, Any]) -> QuantizedArray | None:
    """The payload that an array stands for, if it is known."""
    found = payloads.get(id(array))
    return None if found is None else found[1]


def _has_one_scale(quantized: QuantizedArray) -> bool:
    is_whole = not quantized.axes and quantized.tensor_inverse_scale is None
    return is_whole and not quantized.inverse_scale.shape
