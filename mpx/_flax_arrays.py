"""Classes that are written by `flax.serialization` as their arrays.

Flax writes what is registered with it, and says of everything else that it can not be
serialized. So these classes are registered where such objects are made, if the program
has imported Flax by then; mpx never does.
"""

import sys
from typing import Any

import jax
from jaxtyping import PyTree

from ._errors import describe


def register_with_flax(*classes: type) -> None:
    """Registers classes with Flax, if it is imported; again is allowed."""
    serialization: Any = sys.modules.get("flax.serialization")
    register = getattr(serialization, "register_serialization_state", None)
    if register is None:  # not imported, or not wholly yet
        return
    for cls in classes:
        register(cls, _written, _restored, override=True)


def _written(node: PyTree) -> dict[str, object]:
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(node))}


def _restored(target: PyTree, state: Any) -> PyTree:
    leaves, tree = jax.tree.flatten(target)
    found = [state.get(str(i)) for i in range(len(leaves))]
    types = [
        [(x.shape, x.dtype) for x in xs if x is not None] for xs in (leaves, found)
    ]
    if len(state) != len(leaves) or types[0] != types[1]:
        raise ValueError(
            f"`flax.serialization.from_state_dict(target, state)`: {describe(target)} "
            "must be stored as in the state. Make the target like the saved one, by "
            "`mpx.quantization.quantize_weights(model, quantizer)` or "
            "`mpx.compress_state(optimizer).init(params)`."
        )
    return jax.tree.unflatten(tree, found)
