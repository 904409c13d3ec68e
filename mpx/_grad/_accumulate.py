"""Gradient accumulation: one step over several micro-batches, in a scan."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._dtypes import full_precision_of
from .._errors import describe
from .._quantize import largest_magnitude
from .._tree import is_model_state, is_trainable
from .._typing import LeafPredicate
from ._inputs import input_path

_FUNCTIONS = {
    "whole": "whole(path, leaf) -> bool",
    "weight": "weight(*args, **kwargs) -> number",
    "new_state": "new_state(aux) -> state",
}

# What a leaf of the arguments is to the scan.
_WHOLE, _BATCH, _KEY, _STATE = "whole", "batch", "key", "state"


@dataclasses.dataclass(frozen=True)
class Accumulation:
    r"""How a batch is cut into micro-batches, and how their results are joined.

    $$\ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad
      g = \frac{\sum_i w_i g_i}{\sum_i w_i}$$

    in float32, with one loss scale for the whole window. One micro-batch that is not
    finite makes the step a bad one. What happens to the arguments:

    | leaf | micro-batch $i$ of $n$ gets |
    |---|---|
    | the differentiated arguments | all of it |
    | an array with axes, of size $B$ along the first | rows $i, i + n, i + 2n, \dots$ |
    | a PRNG key (also a raw `uint32[2]`) | the $i$-th of `jax.random.split(key, n)` |
    | Equinox `State`, the argument `state_argnum` | what the micro-batch before left |
    | a scalar, a leaf that is no array, `whole` | all of it |

    Rows are taken in strides so that a batch that is sharded over devices stays where
    it is. Arrays in aux come back stacked along a new first axis, except the model
    state, which is the last one; leaves of aux that are no arrays come back once.

    Args:
        steps: The number of micro-batches; must divide the batch.
        whole: `whole(path, leaf)` is True for arrays without a batch axis; paths are
            like `args[1]['mask']`.
        weight: Called as the loss function is, returns the weight $w_i$ of a
            micro-batch, such as its number of tokens; one by default.
        state_argnum: The position of an argument that is model state. Equinox's `State`
            is found without.
        new_state: A function that takes the new state out of aux; needed where
            `state_argnum` is given, and only there.

    Raises:
        TypeError: `steps` or `state_argnum` is not a whole number, or another field is
            not a function.
        ValueError: `steps` is below 1, `state_argnum` is negative, or only one of it
            and `new_state` was given. At the call: there is no such argument, or it is
            differentiated.

    Weights that sum to zero make the step a bad one.
    """

    steps: int
    _: dataclasses.KW_ONLY
    whole: LeafPredicate | None = None
    weight: Callable[..., PyTree] | None = None
    state_argnum: int | None = None
    new_state: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        is_int = isinstance(self.steps, int | np.integer)
        if not is_int or isinstance(self.steps, bool):
            raise TypeError(
                "`accumulate` takes a whole number of micro-batches or "
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
                "`state_argnum` of `mpx.Accumulation` is counted from 0, the first "
                f"argument; got {position}."
            )
        if (self.state_argnum is None) != (self.new_state is None):
            raise ValueError(
                "`mpx.Accumulation` needs `state_argnum` and `new_state` together: "
                "which argument is the state, and where in aux the new one is."
            )


def accumulated(
    how: Accumulation,
    one: Callable[[Any, Any], tuple[Any, Any, PyTree, PyTree]],
    argnums: tuple[int, ...],
    args: PyTree,
    kwargs: PyTree,
) -> tuple[Any, Any, PyTree, PyTree]:
    """Runs `one(args, kwargs) -> (loss, aux, grads, amaxes)` over micro-batches.

    Of amaxes it gives the maximum.
    """
    _refuse_state(how, argnums, len(args))
    paths, treedef = jax.tree_util.tree_flatten_with_path(
        (args, kwargs), is_leaf=is_model_state
    )
    leaves = [leaf for _, leaf in paths]
    kinds = [_kind(how, argnums, path, leaf) for path, leaf in paths]
    xs = [
        _micro_batches(how, kind, path, leaf)
        for kind, (path, leaf) in zip(kinds, paths, strict=True)
    ]
    nodes = [x for x, kind in zip(leaves, kinds, strict=True) if kind == _STATE]
    state, state_tree = jax.tree.flatten(nodes)
    traced: list[_Aux] = []

    def body(carry: PyTree, xs: PyTree) -> PyTree:
        total, state = carry
        current = iter(jax.tree.unflatten(state_tree, state))
        parts = [
            x if kind in (_BATCH, _KEY) else next(current) if kind == _STATE else leaf
            for leaf, kind, x in zip(leaves, kinds, xs, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, parts)
        loss, aux, grads, amaxes = one(args, kwargs)
        weight = _weight(how, args, kwargs)
        state = _new_state(how, aux, state)
        traced[:] = [_Aux.read(aux, state)]
        total = jax.tree.map(lambda t, g: t + weight.astype(g.dtype) * g, total, grads)
        return (total, state), (loss, weight, traced[0].stacked(aux), amaxes)

    differentiated = eqx.filter(tuple(args[i] for i in argnums), is_trainable)
    zeros = jax.tree.map(
        lambda w: jnp.zeros(w.shape, full_precision_of(w.dtype)), differentiated
    )
    (total, state), (losses, weights, stacked, amaxes) = jax.lax.scan(
        body, (zeros, state), xs, length=how.steps
    )
    weight = jnp.sum(weights)
    grads = jax.tree.map(lambda t: t / weight.astype(t.dtype), total)
    loss = jnp.sum(losses * weights.astype(losses.dtype)) / weight.astype(losses.dtype)
    amaxes = jax.tree.map(lambda x: largest_magnitude(x, (0,)), amaxes)
    return loss, traced[0].rebuild(stacked, state), grads, amaxes


@dataclasses.dataclass(frozen=True)
class _Aux:
    """The form of aux: which of its leaves are stacked, model state, or no arrays."""

    tree: Any
    slots: list[int | None]
    fixed: list[Any]

    @classmethod
    def read(cls, aux: PyTree, state: list[Any]) -> "_Aux":
        leaves, tree = jax.tree.flatten(aux)
        places = {id(x): i for i, x in enumerate(state)}
        fixed = [None if eqx.is_array(x) else x for x in leaves]
        return cls(tree, [places.get(id(x)) for x in leaves], fixed)

    def stacked(self, aux: PyTree) -> list[Any]:
        """The leaves of one micro-batch's aux that are to be stacked."""
        return [
            x if eqx.is_array(x) and slot is None else None
            for x, slot in zip(jax.tree.leaves(aux), self.slots, strict=True)
        ]

    def rebuild(self, stacked: list[Any], state: list[Any]) -> PyTree:
        """Aux after the last micro-batch."""
        leaves = [
            state[slot] if slot is not None else fixed if x is None else x
            for x, slot, fixed in zip(stacked, self.slots, self.fixed, strict=True)
        ]
        return jax.tree.unflatten(self.tree, leaves)


def _refuse_state(how: Accumulation, argnums: tuple[int, ...], count: int) -> None:
    """Raises where no argument can be the model state."""
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
    how: Accumulation, argnums: tuple[int, ...], path: KeyPath, leaf: object
) -> str:
    position = path[1].idx if path[0].idx == 0 else None
    if position is not None and position in argnums:
        return _WHOLE
    if is_model_state(leaf) or (position is not None and position == how.state_argnum):
        return _STATE
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


def _micro_batches(how: Accumulation, kind: str, path: KeyPath, leaf: Any) -> Any:
    """The leaf with micro-batches along a new first axis; None if it is not cut."""
    if kind == _KEY:
        return jax.random.split(leaf, how.steps)
    if kind != _BATCH:
        return None
    size = leaf.shape[0]
    if size == 0 or size % how.steps:
        raise ValueError(
            f"`accumulate={how.steps}` must divide the first axis of every array but "
            f"those of the first argument; got {describe(leaf)} at "
            f"`{input_path(path)}`. "
            "Change the batch size, or name arrays without a batch axis: "
            "`mpx.Accumulation(steps, whole=lambda path, leaf: ...)`."
        )
    strided = jnp.reshape(leaf, (size // how.steps, how.steps, *leaf.shape[1:]))
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


def _new_state(how: Accumulation, aux: PyTree, old: list[Any]) -> list[Any]:
    """The leaves of the model state that aux holds."""
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
            "With `accumulate` the model state must come back in aux, once and with "
            f"the shapes and dtypes it went in with; went in: {before}; came back: "
            f"{after}. State that is no Equinox `State` is cast like other inputs: "
            "name its leaves in `keep=`."
        )
    return new
