"""Calling a function of Flax NNX objects as a function of trees.

NNX modules are changed in place by the functions that are given to them: a forward pass
advances batch statistics and random streams. JAX's transforms know values only and drop
such changes in silence. So `taken_apart` replaces every NNX object among the arguments
of a call by what it holds, in three groups:

- *weights*: the Variables to differentiate, in the place where the object stood;
- *fixed*: the other parameters and plain arrays, to be cast like any input;
- *state*: every other Variable (statistics, random streams, caches), never cast.

`Parts.call` puts the objects together again inside of a transform, calls the function
and returns the new values as results; `Parts.write_back` puts these into the objects
that came in, where they are wanted. NNX's own update context does the bookkeeping, so
that shared references, new Variables and changed attributes come out as from
`nnx.value_and_grad`.

Flax is imported by the calls, never by importing this module.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import at_path, describe
from ._tree import ModelState, NamedLeaves, is_float_leaf, select_tree
from ._typing import BoolScalar

_CONTEXT = "mpx"

# The groups of leaves; the last are no arrays and stay what they are.
WEIGHT, FIXED, STATE, STATIC = "weight", "fixed", "state", "static"


def is_nnx_object(node: Any) -> bool:
    """Whether a node is an NNX object that has to be taken apart."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree | nnx.Variable)


class Slot(NamedTuple):
    """A place in an object that holds a value.

    Attributes:
        group: One of the four groups.
        name: The path from the arguments, such as `args[0].layers[0].kernel`.
        value: What it held before the call.
    """

    group: str
    name: str
    value: Any


class Taken(NamedTuple):
    """What is known about one object: how to make it again, and where its values go.

    Attributes:
        graphdef: NNX's description of what is no value.
        forms: The structures of its three states: weights, fixed, state.
        slots: For each of the three, its places, by their path in NNX's state.
    """

    graphdef: Any
    forms: list[Any]
    slots: list[dict[str, Slot]]


class Origin(NamedTuple):
    """Where the value of a leaf comes from after the call.

    Attributes:
        slot: The place that held a value before, None for a new place.
        is_new: Whether the call gave it a value.
        constant: The value of a place that holds no array.
    """

    slot: Slot | None
    is_new: bool
    constant: Any = None


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


@contextlib.contextmanager
def taken_apart(
    call: str, args: Any, kwargs: Any, wanted: Mapping[int, Any] | None = None
) -> Iterator["Parts"]:
    """Takes the NNX objects of a call apart; within the context they may be called.

    Args:
        call: The public function to name in an error.
        args: The positional arguments.
        kwargs: The keyword arguments.
        wanted: For each differentiated position the NNX filter of its weights.
    """
    from flax import nnx

    with nnx.update_context(_CONTEXT):
        yield Parts(call, args, kwargs, wanted or {})


class Parts:
    """The arguments of one call, taken apart.

    Attributes:
        args: The positional arguments, with `NamedLeaves` in the place of objects.
        kwargs: The keyword arguments, likewise.
        fixed: The fixed values of all objects, as one node.
        state: The state of all objects, as one node.
    """

    def __init__(
        self, call: str, args: Any, kwargs: Any, wanted: Mapping[int, Any]
    ) -> None:
        from flax import nnx

        self._call = call
        self._objects: list[Taken] = []
        self._changed: list[Changed] = []
        checks = _Checks(call)
        paths, tree = jax.tree_util.tree_flatten_with_path(
            (tuple(args), kwargs), is_leaf=is_nnx_object
        )
        leaves = []
        with nnx.split_context(_CONTEXT) as context:
            for path, leaf in paths:
                if not is_nnx_object(leaf):
                    leaves.append(leaf)
                    continue
                position = path[1].idx if path[0].idx == 0 else -1
                predicate = _predicate(leaf, wanted.get(position))
                name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
                checks.check(leaf, predicate, name)
                leaves.append(self._take(context, leaf, predicate, name))
        self.args, self.kwargs = jax.tree.unflatten(tree, leaves)
        self.fixed = NamedLeaves(-1, *self._group(1))
        self.state = ModelState(-1, *self._group(2))

    def _take(self, context: Any, node: Any, predicate: Any, name: str) -> Any:
        graphdef, *states = context.split(node, predicate, _is_fixed, ...)
        slots: list[dict[str, Slot]] = []
        for group, state in zip((WEIGHT, FIXED, STATE), states, strict=True):
            found = {}
            for path, value in jax.tree_util.tree_leaves_with_path(state):
                place = name + _place(path)
                kind = group if isinstance(value, jax.Array | np.ndarray) else STATIC
                found[jax.tree_util.keystr(path)] = Slot(kind, place, value)
            slots.append(found)
        forms = [jax.tree.structure(state) for state in states]
        self._objects.append(Taken(graphdef, forms, slots))
        weights = list(slots[0].values())
        names = [
            s.name.removeprefix(name).removeprefix(".") or "value" for s in weights
        ]
        return NamedLeaves(len(self._objects) - 1, names, [s.value for s in weights])

    def _group(self, number: int) -> tuple[list[str], list[Any]]:
        """Names and values of all objects' places in the second or the third state."""
        slots = [
            slot
            for taken in self._objects
            for slot in taken.slots[number].values()
            if slot.group != STATIC
        ]
        return [slot.name for slot in slots], [slot.value for slot in slots]

    def call(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        fixed: NamedLeaves,
        state: ModelState,
        keeps_form: bool = False,
    ) -> tuple[Any, ModelState, list[Any]]:
        """Calls a function with the objects put together again.

        Args:
            func: The function.
            args: Positional arguments like `self.args`, with other values.
            kwargs: Keyword arguments like `self.kwargs`.
            fixed: Like `self.fixed`.
            state: Like `self.state`.
            keeps_form: Refuse changes other than of values of the state.

        Returns:
            What the function returned, with `NamedLeaves` in the place of objects;
            the new state; and the values of all other places that have changed.
        """
        from flax import nnx

        objects, given = self._merged(args, kwargs, fixed, state)
        args, kwargs = _filled((tuple(args), kwargs), objects)
        result = func(*args, **kwargs)

        leaves, tree = jax.tree.flatten(result, is_leaf=is_nnx_object)
        for i, leaf in enumerate(leaves):
            if is_nnx_object(leaf):
                leaves[i] = NamedLeaves(len(objects))
                objects.append(leaf)
        news: dict[str, Any] = {}
        others: list[Any] = []
        with nnx.split_context(_CONTEXT) as context:
            self._changed = [
                self._read(context, node, slots, news, others, keeps_form)
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
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        fixed: NamedLeaves,
        state: ModelState,
    ) -> Any:
        """Calls a function as `call` does, and forgets what it changed."""
        objects, _ = self._merged(args, kwargs, fixed, state)
        args, kwargs = _filled((tuple(args), kwargs), objects)
        return func(*args, **kwargs)

    def _merged(
        self, args: Sequence[Any], kwargs: Any, fixed: NamedLeaves, state: ModelState
    ) -> tuple[list[Any], list[Any]]:
        """All objects, and what each was given by path."""
        from flax import nnx

        values = [_by_label(args, kwargs), iter(fixed.leaves), iter(state.leaves)]
        given: list[dict[str, tuple[Slot, Any]]] = []
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            objects = [
                self._put_together(context, number, values, given)
                for number in range(len(self._objects))
            ]
        return objects, given

    def _put_together(
        self, context: Any, number: int, values: list[Any], given: list[Any]
    ) -> Any:
        """Makes an object again; notes what it is given, by path, with the slots."""
        taken = self._objects[number]
        by_label, fixed, state = values
        sources = (iter(by_label.get(number, ())), fixed, state)
        inner: dict[str, tuple[Slot, Any]] = {}
        states = []
        for form, slots, source in zip(taken.forms, taken.slots, sources, strict=True):
            leaves = [
                slot.value if slot.group == STATIC else next(source)
                for slot in slots.values()
            ]
            pairs = zip(slots.values(), leaves, strict=True)
            inner.update(zip(slots, pairs, strict=True))
            states.append(jax.tree.unflatten(form, leaves))
        given.append(inner)
        return context.merge(taken.graphdef, *states)

    def _read(
        self,
        context: Any,
        node: Any,
        given: dict[str, tuple[Slot, Any]],
        news: dict[str, Any],
        others: list[Any],
        keeps_form: bool,
    ) -> Changed:
        """Says how an object came out, and collects its new values."""
        graphdef, state = context.split(node)
        origins: list[Origin] = []
        for path, value in jax.tree_util.tree_leaves_with_path(state):
            slot, before = given.get(jax.tree_util.keystr(path), (None, None))
            if slot is not None and value is before:
                origins.append(Origin(slot, False))
                continue
            if not isinstance(value, jax.Array | np.ndarray):
                origins.append(Origin(None, False, value))
                continue
            if slot is not None and slot.group == STATIC:
                slot = None
            origins.append(Origin(slot, True))
            if slot is not None:
                value = _like(value, slot, self._call)
            if slot is not None and slot.group == STATE:
                news[slot.name] = value
                continue
            if keeps_form:
                place = slot.name if slot else _place(path)
                raise ValueError(_FORM.format(call=self._call, place=place))
            others.append(value)
        return Changed(graphdef, jax.tree.structure(state), origins)

    def write_back(
        self,
        result: Any,
        state: ModelState,
        others: Sequence[Any],
        finite: BoolScalar | None = None,
    ) -> Any:
        """Puts new values into the objects that came in.

        Args:
            result: What the function returned, as `call` gave it.
            state: The new state, as `call` gave it.
            others: The other values, as `call` gave them.
            finite: Where it is False, every place that held a value keeps it; None
                for always new values.

        Returns:
            The result, with objects in it again.
        """
        from flax import nnx

        by_name = dict(zip(state.names, state.leaves, strict=True))
        remaining = iter(others)

        def value(origin: Origin) -> Any:
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
                for out in self._changed
            ]
        return _filled(result, objects)

    def gradients(self, grads: Any) -> Any:
        """Gradients with NNX's states in the place of objects, as `nnx.grad` has it."""

        def states(node: Any) -> Any:
            if not isinstance(node, NamedLeaves):
                return node
            return jax.tree.unflatten(self._objects[node.label].forms[0], node.leaves)

        return jax.tree.map(states, grads, is_leaf=_is_named)


_FORM = (
    "With `accumulate` the function given to {call} may change values of the state of "
    "NNX modules only (batch statistics, random streams, caches); it gave a value to "
    "`{place}`, which is new or a parameter. Leave `accumulate` out, or take sown "
    "values out inside of the function with `nnx.pop`."
)


class _Checks:
    """Refuses Variables whose changes could not come out or not be undone."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.seen: dict[int, tuple[bool, str, Any]] = {}

    def check(self, node: Any, predicate: Any, name: str) -> None:
        """Looks at every Variable of an object."""
        from flax import nnx

        for path, value in nnx.iter_graph(node):
            if not isinstance(value, nnx.Variable):
                continue
            place = name + "".join(map(_key_text, path))
            self._refuse_kind(value, place)
            is_weight = bool(predicate(path, value))
            # The Variable is kept too, so that its id is not given to another one.
            before, other, _ = self.seen.setdefault(
                id(value), (is_weight, place, value)
            )
            if before != is_weight:
                raise ValueError(
                    f"{self.call} was given one Variable twice, at `{other}` and at "
                    f"`{place}`, to be differentiated in one of these places and not "
                    "in the other. Pass the object once, or say `argnums` for both."
                )

    def _refuse_kind(self, variable: Any, place: str) -> None:
        from flax.errors import TraceContextError

        if variable.ref or variable.hijax:
            kind = "a reference" if variable.ref else "a hijax type"
            raise TypeError(
                f"{self.call} takes NNX Variables that hold arrays; got one that is "
                f"{kind}{at_path(place)}, whose changes a transform cannot undo. Make "
                "the model without: `nnx.with_vars(model, ref=False, hijax=False)`."
            )
        try:
            # Changes nothing, but NNX says whether it may be done here.
            variable.set_raw_value(variable.get_raw_value())
        except TraceContextError as error:
            raise ValueError(
                f"{self.call} was given an NNX object from outside of the function "
                f"that JAX is tracing{at_path(place)}; what changes in it could not "
                "come out. Pass it to that function as an argument, and transform with "
                "`nnx.jit`."
            ) from error


def _predicate(node: Any, wanted: Any) -> Callable[[Any, Any], bool]:
    """Which places of an object are weights."""
    from flax import nnx

    if wanted is None:
        return nnx.Nothing()
    # As in NNX: a Variable that is an argument by itself is differentiated whatever
    # its type.
    return nnx.Everything() if isinstance(node, nnx.Variable) else nnx.Any(wanted)


def _is_fixed(path: Any, value: Any) -> bool:
    from flax import nnx

    del path
    return isinstance(value, nnx.Param) or not isinstance(value, nnx.Variable)


def _place(path: Any) -> str:
    """Writes a path into NNX's state as one into the object: `.layers[0].kernel`."""
    *keys, last = path or (None,)
    text = "".join(_key_text(getattr(key, "key", key)) for key in keys)
    if last is None or last == jax.tree_util.GetAttrKey("value"):
        return text
    return text + _key_text(getattr(last, "key", last))


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]"
    return f"[{key}]" if isinstance(key, int) else str(key)


def _like(value: Any, slot: Slot, call: str) -> Any:
    """A new value in the dtype of the place that takes it."""
    old = slot.value
    if is_float_leaf(value) and is_float_leaf(old):
        value = value.astype(old.dtype)
    if value.shape != old.shape or value.dtype != old.dtype:
        raise ValueError(
            f"The function given to {call} changed the form of what an NNX object "
            f"holds, from {describe(old)} to {describe(value)}{at_path(slot.name)}; a "
            "step that is skipped could not be undone. Keep shape and dtype."
        )
    return jnp.asarray(value)


def _is_named(node: Any) -> bool:
    return isinstance(node, NamedLeaves)


def _by_label(args: Any, kwargs: Any) -> dict[int, Sequence[Any]]:
    nodes = jax.tree.leaves((tuple(args), kwargs), is_leaf=_is_named)
    return {node.label: node.leaves for node in nodes if _is_named(node)}


def _filled(tree: Any, objects: Sequence[Any]) -> Any:
    """A tree with objects in the place of `NamedLeaves`."""

    def fill(node: Any) -> Any:
        return objects[node.label] if isinstance(node, NamedLeaves) else node

    return jax.tree.map(fill, tree, is_leaf=_is_named)
