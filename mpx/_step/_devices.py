"""Micro-batches shared by devices: each runs its own, and gradients are summed once.

Under `jax.jit` over a mesh every micro-batch ends with a sum over the devices, in the
dtype of the operation that made the gradient. Here the devices of some axes of the mesh
run separately (`jax.shard_map`): each sums the gradients of its own micro-batches in
full precision. Then these are summed over devices, in the dtype of the policy. A step
communicates as many bytes for eight micro-batches as for one.

Summed *in order*, the result does not depend on the number of devices. The order is a
binary tree over all micro-batches, in which each device has whole branches. The rest of
the tree adds up one sum per device: each device receives one piece of all others' sums
(`all_to_all`), adds these up, and sends its result to all (`all_gather`). Together
these are the bytes of one ring all-reduce.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree

from .._autocast import half_inputs
from .._base.dtypes import is_half
from .._base.errors import listing
from .._base.jax_compat import mesh_of
from .._base.tree import is_trainable
from .._base.typing import AnyArray
from .._loss_scaling import AbstractLossScaling
from .._quantize import largest_magnitude
from .._settings import Wire, settings_of
from .._wire import cast_where_it_lies
from ._accumulate import Accumulation, MicroBatches, One, joined, zeros_like_weights
from ._engine import Problem
from ._inputs import cast_inputs

_FLOAT32 = np.dtype(np.float32)

# For functions that a device runs separately from the others.
ON_ITS_OWN = Wire(_FLOAT32, is_alone=True)

# Runs a micro-batch; returns the values to sum, and its other results.
Run = Callable[[PyTree], tuple[PyTree, PyTree]]


def accumulated_on_devices(
    how: Accumulation,
    one: Callable[..., PyTree],
    problem: Problem,
    scaling: AbstractLossScaling,
    args: PyTree,
    kwargs: PyTree,
) -> tuple[Array, PyTree, PyTree, PyTree]:
    """Runs micro-batches on the devices of their rows; see `accumulated`.

    Args:
        how: The settings.
        one: Runs one micro-batch: `one(scaling, args, kwargs)`.
        problem: The function to differentiate.
        scaling: The loss scaling.
        args: All arguments.
        kwargs: All keyword arguments.
    """
    argnums = problem.argnums
    batch = MicroBatches.read(how, problem, args, kwargs)
    axes, mesh = tuple(how.axes), mesh_of(batch.leaves)
    devices = _checked_devices(how, mesh, batch, problem)
    whole, cut = _laid_out(mesh, batch, _half_weights(problem, args, kwargs))
    # Arrays with explicit axes cannot be closed over.
    state, rest = eqx.partition(scaling, eqx.is_array)
    reduce_dtype = None if problem.wire is None else problem.wire.reduce_dtype

    def on_a_device(state: PyTree, whole: PyTree, xs: PyTree) -> PyTree:
        run_one = functools.partial(one, eqx.combine(state, rest))
        zeros = zeros_like_weights(args, argnums, problem.grad_dtype)
        run, inside = _run_here(batch, whole, run_one, zeros)
        if how.in_order:
            total, besides = _in_a_tree(run, zeros, xs, how.steps // devices)
            add_up = functools.partial(_summed_in_order, axes)
        else:
            total, besides = _in_turn(run, zeros, xs, how.steps // devices)
            add_up = functools.partial(_summed, axes, reduce_dtype)
        total = jax.tree.map(add_up, total)
        # The structure of aux, found by tracing the devices' program.
        batch.traced[:] = inside.traced
        losses, weights, stacked, amaxes = besides
        amaxes = jax.tree.map(lambda x: largest_magnitude(x, (0,)), amaxes)
        losses, weights = jax.lax.all_gather((losses, weights), axes, tiled=True)
        return total, losses, weights, stacked, _largest_of_all(axes, amaxes)

    mapped = jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=(P(), P(), P(axes)),
        out_specs=(P(), P(), P(), P(axes), P()),
        axis_names=set(axes),
        # Gathered values are equal on all devices, which `all_gather`'s types do not
        # express.
        check_vma=False,
    )
    total, losses, weights, stacked, amaxes = mapped(state, whole, cut)
    if how.in_order:
        total, losses, weights = jax.lax.optimization_barrier((total, losses, weights))
    differentiated = eqx.filter(tuple(args[i] for i in argnums), is_trainable)
    total = _as_they_lie(mesh, total, differentiated)
    loss, grads = joined(losses, weights, total)
    return loss, batch.aux(stacked, []), grads, amaxes


def _laid_out(
    mesh: Any, batch: MicroBatches, halves: dict[KeyPath, np.dtype]
) -> tuple[list[PyTree], list[PyTree]]:
    """Returns the arrays to replicate, and those to shard by rows.

    Weights are cast before communication. None represents all other leaves.
    """
    axes = tuple(batch.how.axes)
    cut = [
        None if rows is None else _along(mesh, axes, rows, is_cut=True)
        for rows in batch.cut(batch.how.steps)
    ]
    whole: list[PyTree] = []
    for path, leaf, rows in zip(batch.paths, batch.leaves, cut, strict=True):
        is_whole = rows is None and isinstance(leaf, jax.Array | np.ndarray)
        array = leaf if is_whole else None
        if is_whole and path in halves:
            array = cast_where_it_lies(jnp.asarray(leaf), halves[path])
        whole.append(_along(mesh, axes, array, is_cut=False))
    return whole, cut


def _run_here(
    batch: MicroBatches, whole: list[PyTree], run_one: One, zeros: PyTree
) -> tuple[Run, MicroBatches]:
    """Returns a function to run a micro-batch on a device, and its `MicroBatches`."""
    how = batch.how
    inside = dataclasses.replace(batch, traced=[])

    def run(xs: PyTree) -> tuple[PyTree, PyTree]:
        # In each iteration: a float32 copy for all iterations would stay in memory.
        inside.leaves = list(map(_as_declared, whole, batch.leaves))
        xs = jax.lax.optimization_barrier(xs) if how.in_order else xs
        (total, _), besides = inside.turn(run_one, (zeros, []), xs)
        if how.in_order:  # do not fuse anything across micro-batches
            total, besides = jax.lax.optimization_barrier((total, besides))
        return total, besides

    return run, inside


def _checked_devices(
    how: Accumulation,
    mesh: Mesh | AbstractMesh | None,
    batch: MicroBatches,
    problem: Problem,
) -> int:
    """Returns the number of devices that share micro-batches; raises if impossible."""
    call = "`axes` of `mpx.Accumulation`"
    names = () if mesh is None else tuple(mesh.axis_names)
    missing = [axis for axis in how.axes if axis not in names]
    if mesh is None or missing:
        there = f"the mesh has {listing(names)}" if names else "there is no mesh"
        raise ValueError(
            f"{call} names {listing(missing)}, and {there}. Shard the arrays over a "
            "mesh with these axes, or set one: `with jax.set_mesh(mesh): ...`."
        )
    devices = math.prod(mesh.shape[axis] for axis in how.axes)
    if how.steps % devices:
        raise ValueError(
            f"`steps` of {call} must be divisible by the {devices} devices; got "
            f"{how.steps}. Use a multiple of {devices}."
        )
    if how.in_order and devices & (devices - 1):
        raise ValueError(
            "`in_order=True` of `mpx.Accumulation` sums in a binary tree; the "
            f"number of devices must be a power of two; got {devices}."
        )
    if batch.state:
        raise ValueError(
            f"{call}: the function must have no model state, which each device would "
            "change separately. Omit `axes` or the state."
        )
    wire = problem.wire
    if how.in_order and wire is not None and is_half(wire.reduce_dtype):
        raise ValueError(
            "`in_order=True` of `mpx.Accumulation` sums in float32; got a policy "
            f"with `reduce_dtype={wire.reduce_dtype.name}`. Omit one of them."
        )
    return devices


def _half_weights(
    problem: Problem, args: PyTree, kwargs: PyTree
) -> dict[KeyPath, np.dtype]:
    """Returns the weights to cast before communication, and their dtypes.

    In the explicit style these are all weights that are cast; under autocast, those
    that are cast in all their uses.
    """
    wire = problem.wire
    if wire is not None and wire.gather_dtype == _FLOAT32:
        return {}
    settings = settings_of(problem.func)
    if settings is not None and settings.is_enabled:
        found = half_inputs(problem.func, args, kwargs)
    elif problem.compute is not None and is_half(problem.compute):
        paths = jax.tree_util.tree_leaves_with_path((args, kwargs))
        cast, _, _ = cast_inputs(None, args, kwargs, problem.compute, problem.keep)
        new = jax.tree.leaves((cast, kwargs))
        found = {
            path: problem.compute
            for (path, leaf), other in zip(paths, new, strict=True)
            if is_trainable(leaf) and leaf.dtype != other.dtype
        }
    else:
        return {}
    return {
        path: dtype
        for path, dtype in found.items()
        if path[0].idx == 0 and path[1].idx in problem.argnums
    }


def _as_declared(array: PyTree, leaf: PyTree) -> PyTree:
    """Returns a leaf in its declared dtype, after communication in another one."""
    if array is None or array.dtype == leaf.dtype:
        return leaf if array is None else array
    return jax.lax.convert_element_type(array, leaf.dtype)


def _along(
    mesh: Mesh | AbstractMesh, axes: tuple[str, ...], x: Any, is_cut: bool
) -> Any:
    """Reshards an array for `jax.shard_map` on explicit axes."""
    if not mesh.explicit_axes or not isinstance(x, jax.Array):
        return x
    old = jax.typeof(x).sharding.spec
    rest = [_without(axes, part) for part in old] + [None] * (x.ndim - len(old))
    spec = P(axes, *rest[1:]) if is_cut else P(*rest)
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _as_they_lie(mesh: Any, grads: PyTree, weights: PyTree) -> PyTree:
    """Reshards gradients like the weights, on explicit axes."""
    if not mesh.explicit_axes:
        return grads

    def one(grad: AnyArray, weight: AnyArray) -> AnyArray:
        return jax.sharding.reshard(grad, jax.typeof(weight).sharding)

    return jax.tree.map(one, grads, weights)


def _without(axes: tuple[str, ...], part: object) -> tuple[object, ...] | None:
    names = part if isinstance(part, tuple) else (part,)
    left = tuple(name for name in names if name is not None and name not in axes)
    return left or None


def _in_turn(run: Run, zeros: PyTree, xs: PyTree, count: int) -> tuple[PyTree, PyTree]:
    def body(total: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        found, besides = run(xs)
        return jax.tree.map(jnp.add, total, found), besides

    return jax.lax.scan(body, zeros, xs, length=count)


def _in_a_tree(
    run: Run, zeros: PyTree, xs: PyTree, count: int
) -> tuple[PyTree, PyTree]:
    """Sums micro-batches in the order of a binary tree, half by half."""
    if count == 1:
        total, besides = run(jax.tree.map(lambda x: x[0], xs))
        return total, jax.tree.map(lambda x: jnp.expand_dims(x, 0), besides)
    halves = jax.tree.map(lambda x: x.reshape(2, count // 2, *x.shape[1:]), xs)

    def half(total: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        found, besides = _in_a_tree(run, zeros, xs, count // 2)
        return jax.tree.map(jnp.add, total, found), besides

    total, besides = jax.lax.scan(half, zeros, halves)
    return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), besides)


def _summed(axes: tuple[str, ...], dtype: np.dtype | None, x: Array) -> Array:
    """Sums over devices in a dtype."""
    narrow = x if dtype is None or not is_half(dtype) else x.astype(dtype)
    return jax.lax.psum(narrow, axes).astype(x.dtype)


def _summed_in_order(axes: tuple[str, ...], x: Array) -> Array:
    """Sums over devices in the order of a binary tree; each adds up one piece."""
    devices = jax.lax.axis_size(axes)
    if devices == 1:
        return x
    # Rounded up: the last piece is padded, and cut to size below.
    length = -(-x.size // devices)
    flat = jnp.pad(x.reshape(-1), (0, length * devices - x.size))
    pieces = flat.reshape(devices, length)
    parts = jax.lax.all_to_all(pieces, axes, split_axis=0, concat_axis=0, tiled=True)
    while len(parts) > 1:
        # Add like the scan, which begins with zero, so that -0 becomes 0.
        parts = (jnp.zeros_like(parts[::2]) + parts[::2]) + parts[1::2]
    return jax.lax.all_gather(parts[0], axes, tiled=True)[: x.size].reshape(x.shape)


def _largest_of_all(axes: tuple[str, ...], amaxes: PyTree) -> PyTree:
    """Returns the largest amaxes of all devices, by one collective."""
    if not jax.tree.leaves(amaxes):
        return amaxes
    flat, restored = ravel_pytree(amaxes)
    # Compare bits, as in `largest_magnitude`: a maximum of floats may lose a NaN.
    bits = jax.lax.pmax(jax.lax.bitcast_convert_type(flat, jnp.int32), axes)
    return restored(jax.lax.bitcast_convert_type(bits, jnp.float32))
