"""Gradient accumulation: one step over several micro-batches, in a scan.

Each leaf of a call is whole in every micro-batch, cut along its batch axis, split as a
PRNG key, or model state, which the scan carries (see `Accumulation`).
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from .._base.dtypes import dtype_of_gradient
from .._base.errors import describe
from .._base.tree import is_model_state, is_trainable
from .._base.typing import AnyArray, LeafPredicate
from .._quantize import HalfCopy, largest_magnitude
from .._settings import (
    MARK,
    Mark,
    parameters_of,
    settings_of,
    unkeyed,
    weights_in_call,
)
from .._stored_weights import reading
from ._engine import Problem
from ._inputs import input_path

# --- Arrays of a call without a batch axis --------------------------------------------
#
# `weights=` of an autocast function refers to its own arguments. The call may pass
# through `functools.partial`, a bound method or decorators, which add arguments.

# The arguments of a call: positions and names.
Places = frozenset[int | str]
_SHOWN = 3
_REMEDY = (
    "Name arrays without a batch axis: `mpx.Accumulation(steps, whole=lambda path, "
    "leaf: ...)`"
)


def declared_weights(
    func: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> Places:
    """Returns the arguments of a call that `weights=` of the function names.

    By default there are none, because the first argument may be the batch.
    """
    mark, first, names = _marked(func)
    if mark is None or not mark.has_explicit_weights:
        return frozenset()
    by_name = {**dict.fromkeys(names), **kwargs}
    ordered, _ = parameters_of(mark.func)
    # A wrapper such as `mpx.nnx`'s may pass more by position than the function takes.
    named: dict[int | str, str]
    named = {i: name for i, name in enumerate(ordered) if name in by_name}
    weights = tuple(named.get(place, place) for place in mark.weights)
    given = (None,) * first + tuple(args), by_name
    found = weights_in_call(mark.func, weights, *given, "`mpx.autocast`")
    inside = {place - first if isinstance(place, int) else place for place in found}
    return frozenset(
        place
        for place in inside
        if place in kwargs or (isinstance(place, int) and 0 <= place < len(args))
    )


def _marked(func: object) -> tuple[Mark | None, int, list[str]]:
    """Finds the mark of an autocast function, and the arguments that wrappers add.

    Returns:
        The mark, None for other functions; the number of arguments before those of the
        call; the names of added keyword arguments.
    """
    mark, first, names = None, 0, list[str]()
    while func is not None:
        mark = getattr(func, MARK, mark)
        # JAX copies the mark to the functions that it makes of a function.
        if mark is not None and mark.made is func:
            break
        if isinstance(func, functools.partial | eqx.Partial):
            first += len(func.args)
            names += func.keywords
            func = func.func
        elif inspect.ismethod(func) or isinstance(func, eqx.Module):
            first += hasattr(func, "__self__")
            func = getattr(func, "__func__", getattr(func, "__wrapped__", None))
        else:
            func = getattr(func, "__wrapped__", None)
    return mark, first, names


def refuse_other_lengths(
    steps: int, rows: Sequence[tuple[KeyPath, jax.Array | np.ndarray]]
) -> None:
    """Raises if the first axes of the arrays to cut differ in length."""
    by_length: dict[int, list[str]] = {}
    for path, leaf in rows:
        text = f"{describe(leaf)} at `{input_path(path)}`"
        by_length.setdefault(leaf.shape[0], []).append(text)
    if len(by_length) < 2:
        return
    found = (_few(texts) for texts in by_length.values())
    raise ValueError(
        f"`accumulate={steps}` splits arrays along their first axis, the batch, which "
        f"must be equally long in all of them; got {'; '.join(found)}. {_REMEDY}; "
        "arguments that hold weights: `mpx.autocast(func, weights=(0, 1))`. Several "
        "rows per example need an axis of their own: `x.reshape(batch, rows, ...)`."
    )


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def refuse_length(steps: int, path: KeyPath, leaf: jax.Array | np.ndarray) -> None:
    """Raises if micro-batches cannot divide the rows of an array."""
    size = leaf.shape[0]
    if size == 0 or size % steps:
        raise ValueError(
            f"`accumulate={steps}` must divide the first axis of every array that is "
            f"split; got {describe(leaf)} at `{input_path(path)}`. Change the batch "
            f"size. {_REMEDY}."
        )


@contextlib.contextmanager
def in_micro_batch(
    steps: int, paths: Sequence[KeyPath], parts: Sequence[PyTree], are_cut: list[bool]
) -> Iterator[None]:
    """Adds a note to errors of a micro-batch, with the arrays that are cut.

    Args:
        steps: The number of micro-batches.
        paths: The paths of the leaves of the arguments.
        parts: The leaves of the micro-batch.
        are_cut: Whether each is a part of an array.
    """
    try:
        yield
    except Exception as error:
        cut = [
            f"{describe(part)} at `{input_path(path)}`"
            for path, part, is_cut in zip(paths, parts, are_cut, strict=True)
            if is_cut
        ]
        error.add_note(
            f"Raised in a micro-batch of `accumulate={steps}`, which gets a part of "
            f"each array with a batch axis: {_few(cut) or 'there is none'}. {_REMEDY}."
        )
        raise


# --- Micro-batches --------------------------------------------------------------------

_FUNCTIONS = {
    "whole": "whole(path, leaf) -> bool",
    "weight": "weight(*args, **kwargs) -> number",
    "new_state": "new_state(aux) -> state",
}

# The kinds of leaves in the scan.
_WHOLE, _BATCH, _KEY, _STATE = "whole", "batch", "key", "state"


@dataclasses.dataclass(frozen=True)
class Accumulation:
    r"""Settings for splitting a batch into micro-batches and averaging their results.

    $$\ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad
      g = \frac{\sum_i w_i g_i}{\sum_i w_i}$$

    in float32, with one loss scale for all of them. One non-finite micro-batch makes
    the step non-finite. The arguments are split so:

    | leaf | micro-batch $i$ of $n$ gets |
    |---|---|
    | the differentiated arguments, those of `mpx.autocast(weights=)` | all of it |
    | an array with axes, of size $B$ along the first | rows $i, i + n, i + 2n, \dots$ |
    | a PRNG key (also a raw `uint32[2]`) | the $i$-th of `jax.random.split(key, n)` |
    | Equinox `State`, the argument `state_argnum` | the state after the previous one |
    | a scalar, a non-array leaf, `whole` | all of it |

    Rows are taken in strides, so a batch that is sharded over devices is not moved.
    With `axes` they are not: micro-batch $i$ gets the rows from $iB/n$ on, each device
    runs its own rows, and gradients are summed over devices once. Arrays in aux are
    stacked along a new first axis, except the model state, of which the last one is
    returned. Non-array leaves of aux are returned once.

    Args:
        steps: The number of micro-batches; must divide the batch.
        whole: `whole(path, leaf)` is True for arrays without a batch axis; paths are
            like `args[1]['mask']`.
        weight: A function of the loss function's arguments that returns the weight
            $w_i$ of a micro-batch, such as its number of tokens; one by default.
        state_argnum: The position of an argument that is model state. Equinox's `State`
            is found without it.
        new_state: A function that extracts the new state from aux; required with
            `state_argnum`, and only then.
        axes: One or several axes of the mesh whose devices share the micro-batches.
            Each device runs `steps / devices` of them, with replicated weights and,
            under recipes, amaxes of its own rows. Gradients are summed once, in the
            policy's `reduce_dtype`. `steps` counts the micro-batches of all devices.
        in_order: True sums in float32 and in a fixed order, a binary tree over the
            micro-batches: with the same `steps`, gradients are bit-identical on any
            number of devices and processes. `steps` must be a power of two. Requires
            `axes`.

    Raises:
        TypeError: `steps` or `state_argnum` is not a whole number, or another field is
            not a function.
        ValueError: `steps` is below 1, `state_argnum` is negative, or only one of it
            and `new_state` is set; `in_order` without `axes`, or with `steps` that is
            not a power of two. At the call: first axes differ, or `steps` does not
            divide them; the argument `state_argnum` does not exist, or is
            differentiated; there is no mesh with these axes, its devices do not divide
            the micro-batches, or there is model state, which devices cannot share.

    Weights that sum to zero make the step non-finite.
    """

    steps: int
    _: dataclasses.KW_ONLY
    whole: LeafPredicate | None = None
    weight: Callable[..., PyTree] | None = None
    state_argnum: int | None = None
    new_state: Callable[[Any], Any] | None = None
    axes: str | tuple[str, ...] = ()
    in_order: bool = False

    def __post_init__(self) -> None:
        is_int = isinstance(self.steps, int | np.integer)
        if not is_int or isinstance(self.steps, bool):
            raise TypeError(
                "`accumulate` must be a whole number of micro-batches or "
                f"`mpx.Accumulation(steps)`; got {describe(self.steps)}."
            )
        if self.steps < 1:
            raise ValueError(
                f"`steps` of `mpx.Accumulation` must be at least 1; got {self.steps}."
            )
        for name, call in _FUNCTIONS.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(
                    f"`{name}` of `mpx.Accumulation` must be a function `{call}`; got "
                    f"{describe(value)}."
                )
        position = self.state_argnum
        is_int = isinstance(position, int | np.integer)
        if position is not None and (not is_int or isinstance(position, bool)):
            raise TypeError(
                "`state_argnum` of `mpx.Accumulation` must be the position of an "
                f"argument, one whole number; got {describe(position)}."
            )
        if position is not None and position < 0:
            raise ValueError(
                "`state_argnum` of `mpx.Accumulation` must be at least 0, the first "
                f"argument; got {position}."
            )
        if (self.state_argnum is None) != (self.new_state is None):
            raise ValueError(
                "`mpx.Accumulation` needs `state_argnum` and `new_state` together: "
                "the argument with the state, and the new state in aux."
            )
        self._check_order()

    def _check_order(self) -> None:
        """Raises for axes that are not names, or an invalid `in_order`."""
        axes = (self.axes,) if isinstance(self.axes, str) else self.axes
        is_tuple = isinstance(axes, tuple | list)
        if not is_tuple or not all(isinstance(x, str) for x in axes):
            raise TypeError(
                "`axes` of `mpx.Accumulation` must be the name of an axis of the mesh, "
                f"or several of them; got {describe(self.axes)}."
            )
        object.__setattr__(self, "axes", tuple(axes))
        if not self.in_order:
            return
        if not axes:
            raise ValueError(
                "`in_order=True` of `mpx.Accumulation` needs `axes`, for the order "
                "of sums over devices. Pass the mesh axes that share the "
                'micro-batches: `axes="data"`.'
            )
        if self.steps & (self.steps - 1):
            raise ValueError(
                "`in_order=True` of `mpx.Accumulation` sums in a binary tree; "
                f"`steps` must be a power of two; got {self.steps}."
            )


# Runs a micro-batch: `one(args, kwargs) -> (loss, aux, grads, amaxes)`.
One = Callable[[PyTree, PyTree], tuple[Array, PyTree, PyTree, PyTree]]


def accumulated(
    how: Accumulation, one: One, problem: Problem, args: PyTree, kwargs: PyTree
) -> tuple[Array, PyTree, PyTree, PyTree]:
    """Runs `one` over micro-batches and joins its results; amaxes by their maximum.

    Args:
        how: The settings.
        one: Runs one micro-batch.
        problem: The function to differentiate.
        args: All arguments.
        kwargs: All keyword arguments.
    """
    batch = MicroBatches.read(how, problem, args, kwargs)
    zeros = zeros_like_weights(args, problem.argnums, problem.grad_dtype)
    with _cast_once(problem, batch):
        (total, state), (losses, weights, stacked, amaxes) = jax.lax.scan(
            functools.partial(batch.turn, one),
            (zeros, batch.state),
            batch.cut(how.steps),
            length=how.steps,
        )
    loss, grads = joined(losses, weights, total)
    amaxes = jax.tree.map(lambda x: largest_magnitude(x, (0,)), amaxes)
    return loss, batch.aux(stacked, state), grads, amaxes


def _cast_once(
    problem: Problem, batch: "MicroBatches"
) -> contextlib.AbstractContextManager[None]:
    """Gives an autocast function the weights in half precision, for all micro-batches.

    Copies that nothing reads are not made under `jax.jit`.
    """
    settings, known = settings_of(problem.func), unkeyed().payloads
    is_on = settings is not None and settings.is_enabled and problem.wire is None
    if settings is None or not (is_on and settings.device.repeats_casts):
        return contextlib.nullcontext()
    copies = {
        id(leaf): (leaf, HalfCopy(leaf.astype(settings.dtype)))
        for leaf, kind in zip(batch.leaves, batch.kinds, strict=True)
        if kind == _WHOLE and isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
    }
    return reading({**copies, **known})


def zeros_like_weights(
    args: PyTree, argnums: tuple[int, ...], dtype: np.dtype | None
) -> PyTree:
    """Returns the initial sums of gradients."""
    weights = eqx.filter(tuple(args[i] for i in argnums), is_trainable)
    return jax.tree.map(
        lambda w: jnp.zeros(w.shape, dtype_of_gradient(w.dtype, dtype)), weights
    )


def joined(losses: Array, weights: Array, total: PyTree) -> tuple[Array, PyTree]:
    """Returns the loss and the gradients of all micro-batches."""
    weight = jnp.sum(weights)
    grads = jax.tree.map(lambda t: t / weight.astype(t.dtype), total)
    loss = jnp.sum(losses * weights.astype(losses.dtype)) / weight.astype(losses.dtype)
    return loss, grads


@dataclasses.dataclass
class MicroBatches:
    """The arguments of a call, and how micro-batches get them.

    Attributes:
        how: The settings.
        paths: The path of each leaf.
        leaves: The leaves.
        kinds: The kind of each leaf in the scan.
        tree: The structure of arguments and keyword arguments.
        state: The leaves of the model state.
        state_tree: Its structure.
        traced: The part of aux that is not stacked, once a micro-batch was traced.
    """

    how: Accumulation
    paths: list[KeyPath]
    leaves: list[PyTree]
    kinds: list[str]
    tree: Any
    state: list[AnyArray]
    state_tree: Any
    traced: list[PyTree]

    @classmethod
    def read(
        cls, how: Accumulation, problem: Problem, args: PyTree, kwargs: PyTree
    ) -> "MicroBatches":
        """Classifies the leaves of a call."""
        _refuse_state(how, problem.argnums, len(args))
        weights = declared_weights(problem.func, args, kwargs)
        found, tree = jax.tree_util.tree_flatten_with_path(
            (args, kwargs), is_leaf=is_model_state
        )
        kinds = [_kind(how, problem.argnums, weights, *leaf) for leaf in found]
        rows = zip(found, kinds, strict=True)
        refuse_other_lengths(how.steps, [x for x, kind in rows if kind == _BATCH])
        nodes = [x for (_, x), kind in zip(found, kinds, strict=True) if kind == _STATE]
        state, state_tree = jax.tree.flatten(nodes)
        paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
        return cls(how, paths, leaves, kinds, tree, state, state_tree, [])

    def cut(self, steps: int) -> list[PyTree]:
        """Returns the leaves with micro-batches as first axis; None where not cut."""
        rows = zip(self.kinds, self.paths, self.leaves, strict=True)
        return [_micro_batches(self.how, steps, *row) for row in rows]

    def turn(self, one: One, carry: PyTree, xs: PyTree) -> PyTree:
        """Runs a micro-batch, and adds its gradients to the sums."""
        total, state = carry
        current = iter(jax.tree.unflatten(self.state_tree, state))
        parts = [
            x if kind in (_BATCH, _KEY) else next(current) if kind == _STATE else leaf
            for leaf, kind, x in zip(self.leaves, self.kinds, xs, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(self.tree, parts)
        are_cut = [kind == _BATCH for kind in self.kinds]
        with in_micro_batch(self.how.steps, self.paths, parts, are_cut):
            loss, aux, grads, amaxes = one(args, kwargs)
            weight = _weight(self.how, args, kwargs)
        state = _new_state(self.how, aux, state)
        # By identity: the new state is a part of aux, with the same array objects.
        places = {id(x): _Place(i) for i, x in enumerate(state)}
        stacked, rest = eqx.partition(
            aux, lambda x: eqx.is_array(x) and id(x) not in places
        )
        # Set while the body of the scan is traced, and read by `aux`.
        self.traced[:] = [jax.tree.map(lambda x: places.get(id(x), x), rest)]
        total = jax.tree.map(
            lambda t, g: t + (weight.astype(g.dtype) * g).astype(t.dtype), total, grads
        )
        return (total, state), (loss, weight, stacked, amaxes)

    def aux(self, stacked: PyTree, state: list[AnyArray]) -> PyTree:
        """Returns aux after the last micro-batch."""
        rest = jax.tree.map(
            lambda x: state[x] if isinstance(x, _Place) else x, self.traced[0]
        )
        return eqx.combine(stacked, rest)


class _Place(int):
    """The index of an array among the leaves of the model state."""


def _refuse_state(how: Accumulation, argnums: tuple[int, ...], count: int) -> None:
    """Raises if `state_argnum` cannot be the model state."""
    position = how.state_argnum
    if position is None or (position < count and position not in argnums):
        return
    why = f"the function was called with {count} by position"
    if position < count:
        why = "that argument is differentiated"
    raise ValueError(
        f"`state_argnum={position}` of `mpx.Accumulation` must be the position of the "
        f"argument that is model state; {why}."
    )


def _kind(
    how: Accumulation,
    argnums: tuple[int, ...],
    weights: Places,
    path: KeyPath,
    leaf: object,
) -> str:
    place = path[1].idx if path[0].idx == 0 else path[1].key
    if place in argnums:
        return _WHOLE
    if is_model_state(leaf) or place == how.state_argnum:
        return _STATE
    if place in weights:
        return _WHOLE
    if not isinstance(leaf, jax.Array | np.ndarray):
        return _WHOLE
    if how.whole is not None and how.whole(input_path(path), leaf):
        return _WHOLE
    is_raw_key = leaf.dtype == np.uint32 and leaf.shape == (2,)
    if is_raw_key or (
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and leaf.ndim == 0
    ):
        return _KEY
    return _BATCH if leaf.ndim else _WHOLE


def _micro_batches(
    how: Accumulation, steps: int, kind: str, path: KeyPath, leaf: PyTree
) -> AnyArray | None:
    """Returns a leaf with micro-batches along a new first axis; None if not cut."""
    if kind == _KEY:
        return jax.random.split(leaf, steps)
    if kind != _BATCH:
        return None
    refuse_length(steps, path, leaf)
    size = leaf.shape[0]
    if how.axes:
        return jnp.reshape(leaf, (steps, size // steps, *leaf.shape[1:]))
    strided = jnp.reshape(leaf, (size // steps, steps, *leaf.shape[1:]))
    return jnp.swapaxes(strided, 0, 1)


def _weight(how: Accumulation, args: PyTree, kwargs: PyTree) -> PyTree:
    if how.weight is None:
        return jnp.ones((), jnp.float32)
    weight = jnp.asarray(how.weight(*args, **kwargs))
    if weight.shape != ():
        raise ValueError(
            "`weight` of `mpx.Accumulation` must return one number for a micro-batch; "
            f"got {describe(weight)}. Sum it."
        )
    return weight.astype(jnp.float32)


def _new_state(how: Accumulation, aux: PyTree, old: list[AnyArray]) -> list[AnyArray]:
    """Returns the leaves of the model state in aux."""
    if not old:
        return old
    if how.new_state is not None:
        new = jax.tree.leaves(how.new_state(aux))
    else:
        nodes = jax.tree.leaves(aux, is_leaf=is_model_state)
        new = jax.tree.leaves([x for x in nodes if is_model_state(x)])
    before, after = ([describe(x) for x in leaves] for leaves in (old, new))
    if before != after:
        raise ValueError(
            "With `accumulate` the model state must be returned in aux, once and "
            f"with its shapes and dtypes; got in: {before}; out: {after}. Only "
            "Equinox's `State` is never cast: name the leaves of other state in "
            "`keep=`."
        )
    return new
