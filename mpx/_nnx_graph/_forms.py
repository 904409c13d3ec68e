"""What is known about NNX objects that were taken apart, and how places are named."""

import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

# The groups of leaves.
GROUPS = WEIGHT, FIXED, STATE = "weight", "fixed", "state"


def is_nnx_object(node: object) -> bool:
    """Whether a node is an NNX object that has to be taken apart."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree | nnx.Variable)


def is_nnx_module(node: object) -> bool:
    """Whether a node is an NNX object that changes in place, and no state of one."""
    nnx = sys.modules.get("flax.nnx")
    kinds = () if nnx is None else (nnx.Module, nnx.Optimizer, nnx.Rngs)
    return isinstance(node, kinds)


class Slot(NamedTuple):
    """A place in an object that holds a value.

    Attributes:
        group: One of the three groups.
        name: The path from the arguments, such as `args[0].layers[0].kernel`.
        value: What it held before the call.
    """

    group: str
    name: str
    value: Any

    @property
    def is_array(self) -> bool:
        """Whether it holds an array; anything else stays what it is."""
        return isinstance(self.value, jax.Array | np.ndarray)


class Taken(NamedTuple):
    """What is known about one object: how to make it again, and where its values go.

    Attributes:
        graphdef: NNX's description of what is no value.
        form: The structure of its three states: weights, fixed, state.
        slots: The places in these, by their path in NNX's state.
    """

    graphdef: Any
    form: Any
    slots: dict[str, Slot]


class Origin(NamedTuple):
    """Where the value of a leaf comes from after the call.

    Attributes:
        slot: The place that held a value before, None for a new place.
        is_new: Whether the call gave it a value.
        constant: The value of a place that holds no array.
    """

    slot: Slot | None
    is_new: bool
    constant: object = None


class Changed(NamedTuple):
    """How an object came out of the call, without traced values.

    Attributes:
        graphdef: NNX's description of what is no value.
        form: The structure of its state.
        origins: Where the value of each leaf comes from.
    """

    graphdef: Any
    form: Any
    origins: list[Origin]


def has_nnx_objects(tree: PyTree) -> bool:
    """Whether there is an NNX object in a tree."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object)))


def places(tree: PyTree) -> list[KeyPath]:
    """The path of each leaf; in an NNX module that of the variable that holds it.

    So `layers[0].kernel` and not `layers[0].kernel.value`, as the place is called where
    the module is taken apart.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return paths
    held: set[KeyPath] = set()
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx_module):
        if is_nnx_module(node):
            variables = jax.tree_util.tree_leaves_with_path(
                node, is_leaf=lambda below: isinstance(below, nnx.Variable)
            )
            held |= {
                path + below for below, v in variables if isinstance(v, nnx.Variable)
            }
    return [path[:-1] if path[:-1] in held else path for path in paths]


def place_text(path: KeyPath) -> str:
    """Writes a path into NNX's state as one into the object: `.layers[0].kernel`."""
    *keys, last = path or (None,)
    text = "".join(key_text(getattr(key, "key", key)) for key in keys)
    if last is None or last == jax.tree_util.GetAttrKey("value"):
        return text
    return text + key_text(getattr(last, "key", last))


def key_text(key: object) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    return f"[{key}]" if isinstance(key, int) else str(key)
