"""Inputs of a gradient function: casts, and errors for invalid ones."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._base.errors import at_path, describe
from .._base.tree import is_float_leaf, is_inexact_leaf, is_trainable, keeps_dtypes
from .._base.typing import AnyArray, LeafPredicate
from .._loss_scaling import AbstractLossScaling, refuse_arithmetic
from .._nnx_graph import is_nnx_module
from .._settings import cast_leaf

# Names of running statistics in frameworks: Flax's collection, and the moving averages
# of Haiku's BatchNorm (`batch_norm/~/mean_ema`).
_STATISTICS = ("batch_stats", "mean_ema", "var_ema")


def cast_inputs(
    func: object,
    args: PyTree,
    kwargs: PyTree,
    dtype: np.dtype,
    keep: LeafPredicate | None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Casts float leaves except model state and leaves that `keep` selects.

    Running statistics drift in half precision: with a momentum of 0.999, an update
    changes nothing in bfloat16. So Equinox's `State`, Flax's `batch_stats` and Haiku's
    moving averages are never cast.
    """

    def cast(path: KeyPath, leaf: object) -> PyTree:
        if keeps_dtypes(leaf) or _is_statistic(path):
            return leaf
        if keep is not None and is_float_leaf(leaf) and keep(input_path(path), leaf):
            return leaf
        return cast_leaf(leaf, dtype)

    # One tree for all: the first key of a path is its index among the three.
    return jax.tree_util.tree_map_with_path(
        cast, (args, kwargs, func), is_leaf=keeps_dtypes
    )


def input_path(path: KeyPath) -> str:
    """Formats a path into `(args, kwargs, func)`: `args[0].layers[1].weight`."""
    root = ("args", "kwargs", "func")[path[0].idx]
    return root + jax.tree_util.keystr(path[1:])


def _is_statistic(path: KeyPath) -> bool:
    names = (str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
    return any(name.endswith(_STATISTICS) for name in names)


def refuse_unknown_scaling(scaling: object, call: str, mixed: bool) -> None:
    """Raises unless `scaling` is a loss scaling, or None without mixed precision."""
    if isinstance(scaling, AbstractLossScaling):
        _refuse_other_form(scaling, call)
        return
    if scaling is not None or mixed:
        raise _no_scaling(scaling, call)


def _no_scaling(scaling: object, call: str) -> TypeError:
    """Returns the error for an object that is not a loss scaling."""
    remedy = (
        "Make one: "
        "`mpx.DynamicLossScaling()` for float16, `mpx.NoLossScaling()` for bfloat16, "
        "`mpx.StaticLossScaling(number)` for a fixed scale."
    )
    if isinstance(scaling, Mapping | list | tuple):  # from a checkpoint
        remedy = (
            "Was it restored without a template? Restore it with one, such as "
            "`StandardRestore(jax.eval_shape(lambda: scaling))`, or read a state "
            "dictionary: `mpx.DynamicLossScaling.from_state_dict(state)`."
        )
    return TypeError(
        f"`scaling` of {call} must be a loss scaling; got {describe(scaling)}. {remedy}"
    )


def _refuse_other_form(scaling: AbstractLossScaling, call: str) -> None:
    """Raises for several stacked states, and for a scale in another dtype."""
    if jnp.ndim(scaling.record.steps):
        raise ValueError(
            f"`scaling` of {call} must be one state; got several, stacked as "
            f"{describe(scaling.record.steps)}. Map over them: "
            "`jax.vmap(step)(models, opt_states, scalings, batches)`."
        )
    odd = scaling._odd_scale()
    if odd is not None:
        raise TypeError(
            f"`scaling` of {call} needs a loss scale in float32; got {describe(odd)}. "
            "Was it cast, or restored with other dtypes? Restore it with a template: "
            "`StandardRestore(jax.eval_shape(lambda: scaling))`."
        )


def refuse_frozen_scaling(scaling: AbstractLossScaling | None, call: str) -> None:
    """Raises if the state would become a constant of a compiled function.

    Every call would start from the same scale and the same counters.
    """
    if scaling is None or not scaling._is_stateful:
        return
    refuse_arithmetic(scaling.record, f"`scaling` of {call}")
    if is_frozen(scaling.record.steps):
        raise ValueError(
            f"{call} got a `scaling` from outside the function that JAX is tracing "
            "(jit, scan, ...); it would be a constant. Pass `scaling` to that "
            "function as an argument and return the new one: `def step(model, "
            "opt_state, scaling, batch): ...`."
        )


def is_frozen(leaf: AnyArray) -> bool:
    """Returns whether a number would become a constant of the program being traced.

    This is so if it is not a tracer, and an operation on it returns a tracer.
    """
    if isinstance(leaf, Tracer):
        return False
    return isinstance(jax.lax.add(leaf, np.int32(0)), Tracer)


# Functions that inspect a loss and have a counterpart in `mpx.nnx`.
_INSPECTS = ("`mpx.blame`", "`mpx.compare`")


def refuse_nnx(trees: PyTree, call: str) -> None:
    """Raises if a Flax NNX module would silently lose its in-place updates."""
    for leaf in jax.tree.leaves(trees, is_leaf=is_nnx_module):
        if is_nnx_module(leaf):
            remedy = _SPLIT
            if call in _INSPECTS:
                other = call.replace("mpx.", "mpx.nnx.")
                remedy = f"Import `mpx.nnx` and use {other}, with the same arguments."
            raise TypeError(
                f"{call} got {describe(leaf)}, a Flax NNX object. NNX changes its "
                "objects in place (batch statistics, random streams), which every "
                f"plain JAX transform silently drops. {remedy}"
            )


_SPLIT = (
    "Use `mpx.nnx.value_and_grad` and `mpx.nnx.update`, or split the object: "
    "`graphdef, params, rest = nnx.split(model, nnx.Param, ...)`, differentiate with "
    "respect to `params`, and return `rest` as aux. Then make `scaling` for that "
    "function, too: `nnx.split` renames the weights (`fc.kernel` is "
    "`['fc']['kernel'].value`), and a recipe finds its scales by name."
)


def refuse_half_masters(args: PyTree, argnums: tuple[int, ...], call: str) -> None:
    """Raises for float16 weights, whose updates vanish and overflow."""
    for i in argnums:
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            if not is_float_leaf(leaf) or leaf.dtype != np.float16:
                continue
            raise ValueError(
                f"{call} needs weights in full precision; got {describe(leaf)} at "
                f"`args[{i}]{jax.tree_util.keystr(path)}`. Keep float32 weights (mpx "
                "casts them for the computation), with "
                "`mpx.cast_to_float32(model)`. For float16 weights pass "
                "`policy=mpx.get_policy('float16')`, and let the optimizer keep "
                "float32 masters: `mpx.master_weights(optimizer)`."
            )


def refuse_no_weights(weights: PyTree, call: str) -> None:
    """Raises if there is nothing to differentiate."""
    if not any(is_trainable(leaf) for leaf in jax.tree.leaves(weights)):
        raise ValueError(
            f"{call} found no floating JAX array to differentiate. The first argument "
            "must be the model or the parameters; got leaves "
            f"{[describe(leaf) for leaf in jax.tree.leaves(weights)][:8]}."
        )


def as_floating(
    args: tuple[PyTree, ...], argnums: tuple[int, ...], call: str
) -> tuple[PyTree, ...]:
    """Converts differentiated arguments to arrays of real or complex numbers."""

    def convert(path: KeyPath, leaf: object) -> PyTree:
        kinds = float | complex | jax.Array | np.ndarray | np.generic
        array = jnp.asarray(leaf) if isinstance(leaf, kinds) else None
        if array is None or not is_inexact_leaf(array):
            raise TypeError(
                f"{call} differentiates floating numbers; got {describe(leaf)} in a "
                f"differentiated argument{at_path(jax.tree_util.keystr(path))}. Omit "
                "it from `argnums`, or use `mpx.filter_grad`, which filters such "
                "leaves."
            )
        return array

    return tuple(
        jax.tree_util.tree_map_with_path(convert, arg) if i in argnums else arg
        for i, arg in enumerate(args)
    )
