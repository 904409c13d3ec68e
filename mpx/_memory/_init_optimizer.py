r"""The state of an optimizer, sharded over devices as the weights are.

Optax makes a moment by `jnp.zeros_like(weight)`. Under `jax.jit` that is a constant,
which depends on no array on devices: XLA replicates it, also for sharded weights. Then
eight bytes per weight are not divided by the number of devices.

The weight of an array of the state is found by its path: transformations of Optax keep
trees like the weights, so `[1].mu['layers'][0]['kernel']` belongs to
`['layers'][0]['kernel']` (`WeightsByPath`). Its shape must be equal, or have more axes
in front (the memory of L-BFGS), or fewer axes (the rows and columns of Adafactor).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from .._base.errors import at_path, describe
from .._base.tree import WeightsByPath, path_text
from .._base.typing import AnyArray
from .._program import is_array_or_type
from .._step import refuse_optimizer
from .._stored_weights import is_stored
from ._codes import CompressedArray

_CALL = "`mpx.init_optimizer`"
# Counts, random keys, and Adafactor's placeholders for arrays that it does not need.
# unsure: fits Optax's optimizers; a larger array of factors needs `otherwise=`
_FEW = 16


class _Weight(NamedTuple):
    """A weight, and the sharding of its state.

    Attributes:
        array: The weight, or the payload of one that is stored in 8 bits.
        sharding: None if only the compiler knows it, under `jax.jit` over a mesh.
    """

    array: AnyArray
    sharding: Sharding | None


def init_optimizer(
    optimizer: object,
    params: PyTree,
    *args: PyTree,
    shardings: PyTree | None = None,
    otherwise: Sharding | None = None,
) -> PyTree:
    """Creates the state of an Optax optimizer, sharded as the weights are.

    The values are those of `optimizer.init(params)`. Every array that belongs to a
    weight (a moment, a float32 master) is sharded as the weight, and all others
    (counts, keys) are replicated. No device ever stores the whole of a sharded array.

    Args:
        optimizer: An Optax transformation, also `mpx.master_weights` or
            `mpx.skip_nonfinite`.
        params: The argument of `optimizer.init`: arrays on devices, or, under
            `jax.jit`, traced ones.
        *args: Further arguments of `optimizer.init`: the masters of
            `mpx.master_weights`.
        shardings: The sharding of each weight's state, by default that of the weight: a
            tree of `jax.sharding.NamedSharding` like `params`, or a prefix of one. It
            allows replicated weights with sharded masters and moments.
        otherwise: The sharding of arrays that belong to no weight. By default such
            arrays of more than 16 numbers are an error.

    Returns:
        The state.

    Raises:
        TypeError: `optimizer` has no `init` and `update`.
        ValueError: An array of the state matches no weight, or `shardings` is not like
            `params`.

    Shapes that match a weight of (n, m): (n, m) itself; (k, n, m), of which k is not
    sharded; (n,) and (m,), sharded as that axis. For weights on one device the state is
    `optimizer.init(params)`. Under `jax.jit`, over a mesh of automatic axes, the
    compiler infers the state's sharding from the weight, which costs one reading of the
    weights.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx, optax
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        >>> n = jax.device_count()
        >>> mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(AxisType.Auto,))
        >>> weights = jnp.ones((8 * n, 4), device=NamedSharding(mesh, P("fsdp")))
        >>> state = mpx.init_optimizer(optax.adam(1e-3), weights)
        >>> state[0].mu.sharding == weights.sharding
        True
        >>> state[0].count.sharding.is_fully_replicated
        True
    """
    refuse_optimizer(optimizer, _CALL)
    make: Any = optimizer
    weights = _weights(params, shardings)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, args))):
        return _placed(make.init(params, *args), weights, otherwise)
    meshes = [w.sharding.mesh for w in weights if isinstance(w.sharding, NamedSharding)]
    if not meshes:
        return make.init(params, *args)
    arrays, rest = eqx.partition((params, args), eqx.is_array)
    # Non-array leaves, appended by each trace: one for the shapes, one to run.
    static: list[PyTree] = []

    def init(arrays: PyTree) -> PyTree:
        params, args = eqx.combine(arrays, rest)
        made, others = eqx.partition(make.init(params, *args), eqx.is_array)
        static.append(others)
        return made

    whole = NamedSharding(meshes[0], PartitionSpec())
    layout = _layouts(jax.eval_shape(init, arrays), weights, whole, otherwise)
    return eqx.combine(jax.jit(init, out_shardings=layout)(arrays), static[-1])


def layouts_of(state: PyTree, params: PyTree, whole: NamedSharding) -> PyTree:
    """Returns the shardings that `init_optimizer` gives a state of array types.

    Args:
        state: The types of its arrays.
        params: The types of the weights, with their shardings.
        whole: The sharding of arrays that are like no weight.
    """
    return _layouts(state, _weights(params, None), whole, whole)


def _layouts(
    state: PyTree,
    weights: WeightsByPath[_Weight],
    whole: NamedSharding,
    otherwise: Sharding | None,
) -> PyTree:
    def place(path: KeyPath, leaf: Any, shape: tuple[int, ...]) -> Sharding:
        return _layout(path, leaf, shape, weights, otherwise)[1] or whole

    return _map_arrays(place, state)


def _map_arrays(
    function: Callable[[KeyPath, Any, tuple[int, ...]], Any], state: PyTree
) -> PyTree:
    """Maps a function of path, array and shape over the arrays of a state.

    For the scales of a `CompressedArray` the shape is that of the whole array.
    """

    def node(path: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, CompressedArray):
            return jax.tree.map(lambda part: function(path, part, leaf.shape), leaf)
        return function(path, leaf, leaf.shape) if is_array_or_type(leaf) else leaf

    return jax.tree_util.tree_map_with_path(
        node, state, is_leaf=lambda x: isinstance(x, CompressedArray)
    )


def _weights(params: PyTree, shardings: PyTree | None) -> WeightsByPath[_Weight]:
    """Returns the arrays of the weights, with their shardings."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_stored)
    given: Sequence[Sharding | None] = [None] * len(leaves)
    if shardings is not None:
        try:
            plain = jax.tree.map(lambda _: 0, params, is_leaf=is_stored)
            each = jax.tree.broadcast(shardings, plain)
        except ValueError as error:
            raise ValueError(
                f"`shardings` of {_CALL} must be a tree like `params`, or a prefix "
                "of it; got\n"
                f"  shardings: {jax.tree.structure(shardings)}\n"
                f"  params: {jax.tree.structure(params)}"
            ) from error
        given = jax.tree.leaves(each)
    weights = []
    for (path, leaf), sharding in zip(leaves, given, strict=True):
        array: Any = leaf.quantized.payload if is_stored(leaf) else leaf
        if is_array_or_type(array):
            weights.append((path, _Weight(array, sharding or _sharding_of(array))))
    return WeightsByPath(weights)


def _sharding_of(array: Any) -> Sharding | None:
    """Returns an array's sharding, None for a traced one whose type has none."""
    if not isinstance(array, Tracer):
        return getattr(array, "sharding", None)
    sharding: Any = jax.typeof(array).sharding
    return sharding if sharding.mesh.explicit_axes else None


def _placed(
    state: PyTree, weights: WeightsByPath[_Weight], otherwise: Sharding | None
) -> PyTree:
    """Returns the state with its shardings, inside a traced function."""

    def place(path: KeyPath, leaf: Any, shape: tuple[int, ...]) -> PyTree:
        weight, sharding = _layout(path, leaf, shape, weights, otherwise)
        if sharding is not None:
            has_types = isinstance(sharding, NamedSharding) and (
                sharding.mesh.are_all_axes_explicit
            )
            move = jax.sharding.reshard if has_types else _constrained
            return move(leaf, sharding)
        return leaf if weight is None else _led_from(weight.array, leaf)

    return _map_arrays(place, state)


def _constrained(leaf: Array, sharding: Sharding) -> Array:
    return jax.lax.with_sharding_constraint(leaf, sharding)


def _led_from(weight: Array, leaf: Array) -> Array:
    """Makes a leaf depend on the weight, for the compiler; its values are unchanged."""
    axes = _axes(leaf.shape, weight.shape) or ()
    left_out = [axis for axis in range(weight.ndim) if axis not in axes]
    like = jax.lax.reduce_max(weight, left_out) if left_out else weight
    like = jnp.broadcast_to(like.astype(leaf.dtype), leaf.shape)
    # The compiler does not look through this boolean. Without the select the leaf is a
    # constant, and is replicated (jax 0.10.2, 2026-11).
    return jax.lax.select(jax.lax.optimization_barrier(jnp.asarray(True)), leaf, like)


def _layout(
    path: KeyPath,
    leaf: AnyArray,
    shape: tuple[int, ...],
    weights: WeightsByPath[_Weight],
    otherwise: Sharding | None,
) -> tuple[_Weight | None, Sharding | None]:
    """Returns the weight that an array of the state is like, and the sharding if known.

    Raises if an array of more than 16 numbers has neither, and `otherwise` is None.
    """
    own = None
    for _, weight in weights.of(path):
        own = own or weight
        axes = _axes(shape, weight.array.shape)
        if axes:
            place = _like(weight, axes)
            is_same = leaf.shape == shape
            return weight, place if is_same else _coarser(place, shape, leaf.shape)
    if math.prod(leaf.shape) <= _FEW:
        return None, None
    if otherwise is None:
        of = f", of the weight {describe(own.array)}" if own else ""
        raise ValueError(
            f"{_CALL} shards the state of an optimizer as the weights, and found no "
            f"weight that matches {describe(leaf)}{at_path(path_text(path))}{of}. "
            "Set the sharding of such arrays: `otherwise=NamedSharding(mesh, "
            "PartitionSpec())` replicates them."
        )
    return None, otherwise


def _coarser(
    sharding: Sharding | None, shape: tuple[int, ...], scales: tuple[int, ...]
) -> Sharding | None:
    """Returns the sharding of scales: replicated along an axis with too few of them."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts: list[Any] = []
    for axis, names in enumerate(sharding.spec):
        several = names if isinstance(names, tuple) else (names,)
        count = math.prod(sharding.mesh.shape[x] for x in several if x is not None)
        # Nor is an axis sharded whose last block is shorter: shards would cut blocks.
        is_even = shape[axis] % max(scales[axis], 1) == 0
        parts.append(names if is_even and scales[axis] % count == 0 else None)
    return sharding.update(spec=PartitionSpec(*parts))


def _axes(
    shape: tuple[int, ...], weight: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """Returns the weight's axis for each axis of an array, None for one in front.

    Returns None if the array has neither all axes of the weight nor some of them.
    """
    front = len(shape) - len(weight)
    if front >= 0:
        if shape[front:] != weight:
            return None
        return (*[None] * front, *range(len(weight)))
    found: list[int | None] = []
    start = 0
    for size in shape:
        if size not in weight[start:]:
            return None
        start = weight.index(size, start) + 1
        found.append(start - 1)
    return tuple(found)


def _like(weight: _Weight, axes: tuple[int | None, ...]) -> Sharding | None:
    """Returns the sharding of an array that has these axes of a weight."""
    sharding = weight.sharding
    if axes == (*range(weight.array.ndim),) or not isinstance(sharding, NamedSharding):
        return sharding
    divided = dict(enumerate(sharding.spec))
    parts = (None if axis is None else divided.get(axis) for axis in axes)
    return sharding.update(spec=PartitionSpec(*parts))
