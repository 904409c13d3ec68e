"""What is found out of an optimizer's state when it is made.

Which of its arrays are like weights, which are never negative, and to which updates
only add. The last two are proved from the program of `optimizer.update` (`_kinds`),
which is traced with gradients. Those are like the weights, but for transformations that
keep more in `params` than what gradients are taken of.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._cast import cast_leaf
from .._dtypes import is_half
from .._jax_compat import varying_axes
from .._tree import WeightsByPath, is_float_leaf
from ._array import CompressedArray
from ._kinds import kinds_of

CALL = "`mpx.compress_state(optimizer)`"
# Of weights so many parts are tried as the form of gradients.
_PARTS = 4


class Weights:
    """The shapes of weights by their paths."""

    def __init__(self, params: PyTree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self._by_path = WeightsByPath(
            (path, (getattr(leaf, "shape", None), _count_of_shards(leaf)))
            for path, leaf in leaves
        )

    def has_like(self, path: KeyPath, leaf: Any) -> bool:
        """Whether an array of a state is like a weight.

        Transformations keep trees like the weights: its path ends with that of a
        weight, and it has its shape.
        """
        return any(True for _ in self._like(path, leaf))

    def size_like(self, path: KeyPath, leaf: Any) -> int:
        """How many numbers an array like a weight has, in all shards; 0 if none is."""
        return leaf.size * next(self._like(path, leaf), 0)

    def _like(self, path: KeyPath, leaf: Any) -> Iterator[int]:
        """For each weight that an array of a state is like, its number of shards."""
        if is_float_leaf(leaf):
            for _, (shape, shards) in self._by_path.of(path):
                if shape == leaf.shape:
                    yield shards


def _count_of_shards(weight: Any) -> int:
    """Of how many shards a weight inside `shard_map` is one, as far as JAX knows."""
    axes = varying_axes(weight) if isinstance(weight, jax.Array) else ()
    return jax.lax.axis_size(tuple(axes)) if axes else 1


def looked_at(
    optimizer: Any, params: PyTree, state: PyTree, extra: dict[str, PyTree]
) -> tuple[Weights, PyTree, PyTree]:
    """The weights that gradients are like, a widened state, and what is proved of it.

    Gradients are like `params`, or like a part of them, as those of the fast weights
    for `optax.lookahead`; or they have an axis of examples in front, for privacy: the
    first of these that `optimizer.update` takes.
    """
    raised: list[Exception] = []
    for shape_of, part in itertools.product((_same, _one_example), _parts(params)):

        def grads(params: PyTree, shape_of: Any = shape_of, part: Any = part) -> PyTree:
            return jax.tree.map(lambda leaf: widened(shape_of(leaf)), part(params))

        try:
            weights = Weights(part(params))
            inner = _widened_state(state, weights)
            return weights, inner, _kinds(optimizer, params, inner, extra, grads, part)
        except Exception as error:
            raised.append(error)
    raise ValueError(
        f"{CALL} traces `optimizer.update(grads, state, params)` to prove which "
        "arrays are never negative, with gradients like `params`, like a part of "
        "them or with an axis of examples in front, and it raised; see the error "
        "above. If it needs more arguments, pass examples of them: "
        "`mpx.compress_state(optimizer, extra_args={'value': 0.0})`. Put "
        "transformations of the updates inside `mpx.master_weights`."
    ) from raised[0]


def _parts(params: PyTree) -> list[Callable[[PyTree], PyTree]]:
    """What gives of weights those that gradients may be like: all, or one child."""
    is_child = lambda node: node is not params  # noqa: E731
    children, form = jax.tree.flatten(params, is_leaf=is_child)
    parts = {}
    for place, child in enumerate(children):
        shapes = (*(getattr(leaf, "shape", None) for leaf in jax.tree.leaves(child)),)
        child_of = lambda p, place=place: form.flatten_up_to(p)[place]  # noqa: E731
        parts.setdefault((jax.tree.structure(child), shapes), child_of)
    return [_same, *[*parts.values()][:_PARTS]]


def _same(node: Any) -> Any:
    return node


def _one_example(leaf: Any) -> Any:
    return leaf[None] if eqx.is_array(leaf) else leaf


def _kinds(
    optimizer: Any,
    params: PyTree,
    state: PyTree,
    extra: dict[str, PyTree],
    grads: Callable[[PyTree], PyTree],
    part: Callable[[PyTree], PyTree],
) -> PyTree:
    """What is proved of the arrays of a state, as a tree like it."""

    def init(params: PyTree) -> PyTree:
        return _widened_state(optimizer.init(params), Weights(part(params)))

    def update(params: PyTree, state: PyTree) -> PyTree:
        return optimizer.update(grads(params), state, params, **extra)[1]

    return kinds_of(init, update, params, state)


def _widened_state(state: PyTree, weights: "Weights") -> PyTree:
    """A state whose arrays like weights are float32, as the gradients will be."""

    def widen(path: KeyPath, leaf: Any) -> Any:
        return widened(leaf) if weights.has_like(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(widen, state, is_leaf=_is_array)


def widened(leaf: Any) -> Any:
    is_narrow = is_float_leaf(leaf) and is_half(leaf.dtype)
    return cast_leaf(leaf, np.dtype(np.float32)) if is_narrow else leaf


def _is_array(node: object) -> bool:
    return isinstance(node, CompressedArray)
