"""Records of split NNX objects, and errors for changes a transform would lose."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._base.errors import at_path, describe
from .._base.tree import NamedLeaves, is_float_leaf, is_trainable

# --- Records of split NNX objects, and names of their Variables -----------------------

# The groups of leaves.
GROUPS = WEIGHT, FIXED, STATE = "weight", "fixed", "state"


def is_nnx_object(node: object) -> bool:
    """Returns whether a node is an NNX object to split."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree | nnx.Variable)


def is_nnx_module(node: object) -> bool:
    """Returns whether a node is an NNX object that changes in place, not its state."""
    nnx = sys.modules.get("flax.nnx")
    kinds = () if nnx is None else (nnx.Module, nnx.Optimizer, nnx.Rngs)
    return isinstance(node, kinds)


class Slot(NamedTuple):
    """A Variable or other holder of a value in an object.

    Attributes:
        group: One of the three groups.
        name: The path from the arguments, such as `args[0].layers[0].kernel`.
        value: Its value before the call.
    """

    group: str
    name: str
    value: Any

    @property
    def is_array(self) -> bool:
        """Whether it holds an array; any other value stays unchanged."""
        return isinstance(self.value, jax.Array | np.ndarray)


class Taken(NamedTuple):
    """The record of one object, to rebuild it.

    Attributes:
        graphdef: NNX's description of the object without its values.
        form: The structure of its three states: weights, fixed, state.
        slots: Its slots, by their path in NNX's state.
    """

    graphdef: Any
    form: Any
    slots: dict[str, Slot]


class Origin(NamedTuple):
    """The origin of a leaf's value after the call.

    Attributes:
        slot: The slot that had a value before; None for a new one.
        is_new: Whether the call set its value.
        constant: The value of a slot without an array.
    """

    slot: Slot | None
    is_new: bool
    constant: object = None


class Changed(NamedTuple):
    """The record of an object after the call, without traced values.

    Attributes:
        graphdef: NNX's description of the object without its values.
        form: The structure of its state.
        origins: The origin of each leaf's value.
    """

    graphdef: Any
    form: Any
    origins: list[Origin]


def has_nnx_objects(tree: PyTree) -> bool:
    """Returns whether there is an NNX object in a tree."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object)))


def places(tree: PyTree) -> list[KeyPath]:
    """Returns the path of each leaf; in an NNX module the path of its Variable.

    So `layers[0].kernel`, as in split modules, and not `layers[0].kernel.value`.
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
    """Formats a path into NNX's state as one into the object: `.layers[0].kernel`."""
    *keys, last = path or (None,)
    text = "".join(key_text(getattr(key, "key", key)) for key in keys)
    if last is None or last == jax.tree_util.GetAttrKey("value"):
        return text
    return text + key_text(getattr(last, "key", last))


def key_text(key: object) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    return f"[{key}]" if isinstance(key, int) else str(key)


# --- Errors ---------------------------------------------------------------------------

# For calls that may only change values of the state, and changed something else.
NEW_FORM = (
    "With `accumulate` the function passed to {call} may only change values of "
    "the state of NNX modules (batch statistics, random streams, caches); it set "
    "`{place}`, which is new or a parameter. Omit `accumulate`, or remove sown "
    "values inside the function with `nnx.pop`."
)
_OUTSIDE = (
    "{call} got an NNX object from outside the function that JAX is tracing, with "
    "`{place}`; changes to it would be lost. Pass it to that function as an "
    "argument, and transform with `nnx.jit`."
)


@dataclasses.dataclass
class Checks:
    """Refuses Variables whose changes could not be returned or undone.

    Attributes:
        call: The public function to name in an error.
        may_come_from_outside: Whether objects may come from outside the function that
            JAX is tracing, as long as nothing changes in them.
        outside: The name of a Variable in such an object, if any.
        seen: By id, whether each Variable is a weight, its name, and itself.
    """

    call: str
    may_come_from_outside: bool
    outside: str | None = None
    seen: dict[int, tuple[bool, str, object]] = dataclasses.field(default_factory=dict)

    def check(self, node: object, predicate: Callable[..., bool], name: str) -> None:
        """Checks every Variable of an object."""
        from flax import nnx

        for path, value in nnx.iter_graph(node):
            if not isinstance(value, nnx.Variable):
                continue
            place = name + "".join(map(key_text, path))
            self._refuse_kind(value, place)
            is_weight = bool(predicate(path, value))
            # Keep the Variable, too, so that its id is not reused.
            before, other, _ = self.seen.setdefault(
                id(value), (is_weight, place, value)
            )
            if before != is_weight:
                raise ValueError(
                    f"{self.call} got one Variable twice, at `{other}` and at "
                    f"`{place}`, to be differentiated in only one of these places. "
                    "Pass the object once, or set `argnums` for both."
                )

    def _refuse_kind(self, variable: Any, place: str) -> None:
        from flax.errors import TraceContextError

        if variable.ref or variable.hijax:
            kind = "a reference" if variable.ref else "a hijax type"
            raise TypeError(
                f"{self.call} needs NNX Variables that contain arrays; got one that "
                f"is {kind}{at_path(place)}, whose changes would be lost. Make the "
                "model without it: `nnx.with_vars(model, ref=False, hijax=False)`."
            )
        try:
            # Changes nothing, but NNX raises if it is not allowed here.
            variable.set_raw_value(variable.get_raw_value())
        except TraceContextError as error:
            if not self.may_come_from_outside:
                raise ValueError(
                    _OUTSIDE.format(call=self.call, place=place)
                ) from error
            self.outside = place


def refuse_change_from_outside(
    changed: Sequence[Changed], place: str, call: str
) -> None:
    """Raises if a value would be written to an object from outside a trace."""
    for out in changed:
        if any(origin.is_new or origin.slot is None for origin in out.origins):
            raise ValueError(_OUTSIDE.format(call=call, place=place))


def with_form_of(slot: Slot, value: Any, call: str) -> Any:
    """Returns a new value in the dtype of its slot; raises for another shape."""
    old = slot.value
    if is_float_leaf(value) and is_float_leaf(old):
        value = value.astype(old.dtype)
    if value.shape != old.shape or value.dtype != old.dtype:
        raise ValueError(
            f"The function passed to {call} must keep shape and dtype of arrays in "
            "NNX objects, or a skipped step could not be undone; got "
            f"{describe(value)} for {describe(old)}{at_path(slot.name)}."
        )
    return jnp.asarray(value)


def refuse_method(func: object, call: str) -> None:
    """Raises if the model is not an argument."""
    from flax import nnx

    for node in (func, getattr(func, "__self__", None)):
        if isinstance(node, nnx.Module):
            raise TypeError(
                f"{call} needs a function that takes the module as an argument; got "
                f"{describe(node)} or a method of it, whose parameters would not be "
                "differentiated and whose changes would be lost. Pass `def "
                "loss_fn(model, batch): ...`."
            )


def refuse_weights(arg: object, position: int, call: str) -> None:
    """Raises for Variables that cannot be differentiated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        arg, is_leaf=lambda node: isinstance(node, NamedLeaves)
    ):
        if not isinstance(leaf, NamedLeaves):
            continue
        for name, value in zip(leaf.names, leaf.leaves, strict=True):
            if is_trainable(value):
                continue
            place = f"args[{position}]{jax.tree_util.keystr(path)}.{name}"
            raise TypeError(
                f"{call} differentiates Variables with floating JAX arrays of 16 "
                f"bits and more; got {describe(value)}{at_path(place)}. Select "
                f"others: `argnums=nnx.DiffState({position}, filter)`."
            )
