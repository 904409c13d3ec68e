"""Splits the NNX objects of a call, and writes changed values back into them."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._base.tree import ModelState, NamedLeaves, select_tree
from .._base.typing import AnyArray, BoolScalar
from ._checks import (
    FIXED,
    GROUPS,
    NEW_FORM,
    STATE,
    WEIGHT,
    Changed,
    Checks,
    Origin,
    Slot,
    Taken,
    is_nnx_object,
    place_text,
    refuse_change_from_outside,
    with_form_of,
)

_CONTEXT = "mpx"


@contextlib.contextmanager
def taken_apart(
    call: str, args: PyTree, kwargs: PyTree, wanted: Mapping[int, object] | None = None
) -> Iterator["Parts"]:
    """Splits the NNX objects of a call; within the context they may be called.

    Args:
        call: The public function to name in an error.
        args: The positional arguments.
        kwargs: The keyword arguments.
        wanted: The NNX filter of the weights for each differentiated position. None for
            a transform that undoes nothing: the weights are then the parameters and
            plain arrays of all objects, and any change is allowed.
    """
    from flax import nnx

    with nnx.update_context(_CONTEXT):
        yield Parts(call, args, kwargs, wanted)


def call_with_objects(
    transformed: Callable[..., PyTree],
    call: str,
    func: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: PyTree,
) -> PyTree:
    """Calls a function of NNX objects in a transform of JAX, and updates the objects.

    Args:
        transformed: `transformed(pure, args, kwargs)` calls `pure`, a function of
            trees, in the transform and returns its result. The last argument is
            additional: the state of all objects.
        call: The public function to name in an error.
        func: The function; not an NNX object.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    with taken_apart(call, args, kwargs) as parts:

        def pure(*full: PyTree, **kwargs: PyTree) -> PyTree:
            *args, state = full
            return parts.call(func, args, kwargs, parts.fixed, state)

        args = (*parts.args, parts.state)
        result, state, others = transformed(pure, args, parts.kwargs)
        return parts.write_back(result, state, others)


class Parts:
    """The split arguments of one call.

    Attributes:
        args: The positional arguments, with `NamedLeaves` in place of objects.
        kwargs: The keyword arguments, likewise.
        fixed: The fixed values of all objects, as one node.
        state: The state of all objects, as one node.
    """

    def __init__(
        self,
        call: str,
        args: PyTree,
        kwargs: PyTree,
        wanted: Mapping[int, object] | None,
    ) -> None:
        from flax import nnx

        self._call = call
        self._can_undo = wanted is not None
        self._originals: list[object] = []
        self._objects: list[Taken] = []
        self._changed: list[Changed] = []
        self._checks = Checks(call, may_come_from_outside=wanted is None)
        paths, tree = jax.tree_util.tree_flatten_with_path(
            (tuple(args), kwargs), is_leaf=is_nnx_object
        )
        leaves = []
        with nnx.split_context(_CONTEXT) as context:
            for path, leaf in paths:
                if not is_nnx_object(leaf):
                    leaves.append(leaf)
                    continue
                predicate = _is_fixed
                if wanted is not None:
                    position = path[1].idx if path[0].idx == 0 else -1
                    predicate = _predicate(leaf, wanted.get(position))
                name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
                self._checks.check(leaf, predicate, name)
                leaves.append(self._take(context, leaf, predicate, name))
        self.args, self.kwargs = jax.tree.unflatten(tree, leaves)
        self.fixed = NamedLeaves(-1, *self._group(FIXED))
        self.state = ModelState(-1, *self._group(STATE))

    def _take(
        self, context: Any, node: object, predicate: Callable[..., bool], name: str
    ) -> NamedLeaves:
        graphdef, *states = context.split(node, predicate, _is_fixed, ...)
        found, form = jax.tree_util.tree_flatten_with_path(tuple(states))
        slots = {
            jax.tree_util.keystr(path[1:]): Slot(
                GROUPS[path[0].idx], name + place_text(path[1:]), value
            )
            for path, value in found
        }
        self._originals.append(node)
        self._objects.append(Taken(graphdef, form, slots))
        weights = [slot for slot in slots.values() if slot.group == WEIGHT]
        names = [
            s.name.removeprefix(name).removeprefix(".") or "value" for s in weights
        ]
        return NamedLeaves(len(self._objects) - 1, names, [s.value for s in weights])

    def _group(self, group: str) -> tuple[list[str], list[AnyArray]]:
        """Returns names and values of a group's arrays, for all objects."""
        slots = [
            slot
            for taken in self._objects
            for slot in taken.slots.values()
            if slot.group == group and slot.is_array
        ]
        return [slot.name for slot in slots], [slot.value for slot in slots]

    def call(
        self,
        func: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: PyTree,
        fixed: NamedLeaves,
        state: ModelState,
        keeps_form: bool = False,
    ) -> tuple[PyTree, ModelState, list[object]]:
        """Calls a function with the rebuilt objects.

        Args:
            func: The function.
            args: Positional arguments like `self.args`, with other values.
            kwargs: Keyword arguments like `self.kwargs`.
            fixed: Like `self.fixed`.
            state: Like `self.state`.
            keeps_form: Raise for changes other than of values of the state.

        Returns:
            The function's result, with `NamedLeaves` in place of objects; the new
            state; and all other changed values.
        """
        from flax import nnx

        (args, kwargs), objects, given = self._merged(args, kwargs, fixed, state)
        result = func(*args, **kwargs)

        leaves, tree = jax.tree.flatten(result, is_leaf=is_nnx_object)
        for i, leaf in enumerate(leaves):
            if is_nnx_object(leaf):
                leaves[i] = NamedLeaves(len(objects))
                objects.append(leaf)
        news: dict[str, object] = {}
        others: list[object] = []
        with nnx.split_context(_CONTEXT) as context:
            self._changed = [
                self._read(context, node, slots, news, others, keeps_form)
                # Objects that the function made come last, and have no slots.
                for node, slots in itertools.zip_longest(objects, given, fillvalue={})
            ]
        values = [
            news.get(name, value)
            for name, value in zip(state.names, state.leaves, strict=True)
        ]
        state = ModelState(state.label, state.names, values)
        return jax.tree.unflatten(tree, leaves), state, others

    def evaluate(
        self,
        func: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: PyTree,
        fixed: NamedLeaves,
        state: ModelState,
    ) -> PyTree:
        """Calls a function as `call` does, and drops its changes."""
        (args, kwargs), _, _ = self._merged(args, kwargs, fixed, state)
        return func(*args, **kwargs)

    def _merged(
        self,
        args: Sequence[PyTree],
        kwargs: PyTree,
        fixed: NamedLeaves,
        state: ModelState,
    ) -> tuple[PyTree, list[object], list[dict[str, tuple[Slot, object]]]]:
        """Returns the arguments with objects, the objects, and their values by path."""
        from flax import nnx

        # The iterators are shared: each object takes its own values from them, in the
        # order of `_group`.
        shared = {FIXED: iter(fixed.leaves), STATE: iter(state.leaves)}
        weights = _by_label(args, kwargs)
        objects: list[object] = []
        given: list[dict[str, tuple[Slot, object]]] = []
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            for number, taken in enumerate(self._objects):
                sources = {**shared, WEIGHT: iter(weights.get(number, ()))}
                values = {
                    path: (slot, _value_of(slot, sources[slot.group]))
                    for path, slot in taken.slots.items()
                }
                states = jax.tree.unflatten(taken.form, [v for _, v in values.values()])
                objects.append(context.merge(taken.graphdef, *states))
                given.append(values)
        return _filled((tuple(args), kwargs), objects), objects, given

    def _read(
        self,
        context: Any,
        node: object,
        given: dict[str, tuple[Slot, object]],
        news: dict[str, object],
        others: list[object],
        keeps_form: bool,
    ) -> Changed:
        """Returns how an object was changed, and collects its new values."""
        graphdef, state = context.split(node)
        origins: list[Origin] = []
        for path, value in jax.tree_util.tree_leaves_with_path(state):
            slot, before = given.get(jax.tree_util.keystr(path), (None, None))
            # By identity: an unchanged value is the same array object.
            if slot is not None and value is before:
                origins.append(Origin(slot, False))
                continue
            if not isinstance(value, jax.Array | np.ndarray):
                origins.append(Origin(None, False, value))
                continue
            if not self._can_undo or slot is None or not slot.is_array:
                slot = None
            else:
                value = with_form_of(slot, value, self._call)
            origins.append(Origin(slot, True))
            if slot is not None and slot.group == STATE:
                news[slot.name] = value
                continue
            if keeps_form:
                place = slot.name if slot else place_text(path)
                raise ValueError(NEW_FORM.format(call=self._call, place=place))
            others.append(value)
        return Changed(graphdef, jax.tree.structure(state), origins)

    def write_back(
        self,
        result: PyTree,
        state: ModelState,
        others: Sequence[object],
        finite: BoolScalar | None = None,
    ) -> PyTree:
        """Writes new values into the original objects.

        Args:
            result: The function's result, as returned by `call`.
            state: The new state, as returned by `call`.
            others: The other values, as returned by `call`.
            finite: If False, every slot keeps its old value; None always writes new
                values.

        Returns:
            The result, with objects in it again.
        """
        from flax import nnx

        came_in: list[object] = []
        if self._checks.outside is not None:
            # Objects from outside the trace are allowed if they do not change.
            came_in = self._originals
            refuse_change_from_outside(
                self._changed[: len(came_in)], self._checks.outside, self._call
            )
        by_name = dict(zip(state.names, state.leaves, strict=True))
        remaining = iter(others)

        def value(origin: Origin) -> PyTree:
            slot = origin.slot
            if not origin.is_new:
                return origin.constant if slot is None else slot.value
            if slot is None:
                return next(remaining)
            new = by_name[slot.name] if slot.group == STATE else next(remaining)
            return new if finite is None else select_tree(finite, new, slot.value)

        with nnx.merge_context(_CONTEXT, inner=False) as context:
            objects = [
                context.merge(
                    out.graphdef,
                    jax.tree.unflatten(out.form, list(map(value, out.origins))),
                )
                for out in self._changed[len(came_in) :]
            ]
        return _filled(result, [*came_in, *objects])

    def gradients(self, grads: PyTree) -> PyTree:
        """Returns gradients with NNX's states in place of objects, like `nnx.grad`."""

        def states(node: object) -> PyTree:
            if not isinstance(node, NamedLeaves):
                return node
            form, *_ = self._objects[node.label].form.children()
            return jax.tree.unflatten(form, node.leaves)

        return jax.tree.map(states, grads, is_leaf=_is_named)


def _value_of(slot: Slot, values: Iterator[object]) -> object:
    """Returns the value for a slot: the next value of its group."""
    # Non-array weights are among the values, too, and stay unchanged.
    if slot.is_array or slot.group == WEIGHT:
        value = next(values)
        return value if slot.is_array else slot.value
    return slot.value


def _predicate(node: object, wanted: Any) -> Callable[..., bool]:
    """Returns the predicate that selects the weights of an object."""
    from flax import nnx

    if wanted is None:
        return nnx.Nothing()
    # As in NNX: a Variable of any type is differentiated if it is itself an argument.
    return nnx.Everything() if isinstance(node, nnx.Variable) else nnx.Any(wanted)


def _is_fixed(path: object, value: object) -> bool:
    from flax import nnx

    del path
    return isinstance(value, nnx.Param) or not isinstance(value, nnx.Variable)


def _is_named(node: object) -> bool:
    return isinstance(node, NamedLeaves)


def _by_label(args: PyTree, kwargs: PyTree) -> dict[int, Sequence[AnyArray]]:
    nodes = jax.tree.leaves((tuple(args), kwargs), is_leaf=_is_named)
    return {node.label: node.leaves for node in nodes if _is_named(node)}


def _filled(tree: PyTree, objects: Sequence[object]) -> PyTree:
    """Returns a tree with objects in place of `NamedLeaves`."""

    def fill(node: object) -> PyTree:
        return objects[node.label] if isinstance(node, NamedLeaves) else node

    return jax.tree.map(fill, tree, is_leaf=_is_named)
