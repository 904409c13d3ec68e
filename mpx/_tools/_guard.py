"""Checks of a state before it is saved: no checkpoint may be poisoned.

Skipped steps leave weights and optimizer unchanged. A state that is poisoned anyway (a
step without a check, a layer that writes statistics, a file that was read wrongly) is
found before it replaces the last good checkpoint.
"""

import functools
from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Number
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from .._base.errors import describe, read_texts
from .._base.jax_compat import stack
from .._base.tree import finite_by_leaf, leaves_with_paths, path_text
from .._loss_scaling import AbstractLossScaling, StepRecord, validate_record
from .._settings import matches

State = TypeVar("State")

_CALL = "`mpx.guard(state)`"
_SHOWN = 8


def guard(state: State, *, allow: str | Sequence[str] = ()) -> State:
    """Returns a state if it may be saved, and raises if it is poisoned.

    Put it around the argument of a checkpoint, `save(step, mpx.guard(state))`: weights,
    optimizer state and scaling, as one tree or separately. It refuses

    - NaN and infinities in any array of real or complex numbers, also of 8 bits and
      fewer, of records or of objects, and in Python's floats and decimals;
    - a loss scaling, or the state of a recipe, that no run can reach: a scale of 0, a
      negative amax, more steps skipped than made, a scale with which the newest amax
      would overflow the format;
    - a halted run (`max_skipped_in_a_row` of `mpx.optimizer_step`): it would change
      nothing after a restart. `scaling.resumed()` clears this.

    All arrays on the same devices are checked by one compiled program, which reads each
    once and returns one boolean for each; nothing is gathered. Run it when saving,
    outside jit: it waits for the step that makes the state.

    Args:
        state: Any PyTree.
        allow: Paths of leaves that contain infinities or NaN on purpose, such as
            `"*.best_value"` of `optax.contrib.reduce_on_plateau`, or a mask of -inf.
            `*` and `?` match any text and any character. The default allows nothing, as
            does an empty string; `"*"` allows a state that is one array.

    Returns:
        The same object.

    Raises:
        FloatingPointError: The state must not be saved. The message names the leaves,
            and how many of their values are NaN and infinite.
        ValueError: Called inside jit, where values are unknown.
        TypeError: `allow` is neither a string nor a list of strings; or the state is
            None or has leaves, none of which is an array or a number, such as a
            function or an Optax transformation.

    Empty arrays, integers, keys and non-numeric leaves pass, as do empty trees, such as
    the state of `optax.sgd`.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> mpx.guard({"w": jnp.ones(2)})
        {'w': Array([1., 1.], dtype=float32)}
        >>> try:
        ...     mpx.guard({"w": jnp.array([1.0, jnp.nan])})
        ... except FloatingPointError as error:
        ...     print(str(error)[:60])
        `mpx.guard(state)`: must not be saved. Non-finite: `['w']` (
    """
    must = (
        "`allow` of `mpx.guard` must be the path of a leaf, or a list of them, with "
        "`*` for any text"
    )
    allowed = read_texts(allow, must, may_be_empty=True)

    def is_allowed(path: str) -> bool:
        # An array that is the whole state has an empty path; "" must not allow it.
        return any(matches(path, pattern) for pattern in allowed if pattern)

    found = list(leaves_with_paths(state))
    if state is None or (found and not any(_is_value(leaf) for _, leaf in found)):
        raise TypeError(
            f"{_CALL} needs a tree of arrays; got {describe(state)}, which has none. "
            "Pass what is saved: `mpx.guard((model, opt_state, scaling))`."
        )
    leaves = [
        (path, leaf[...] if isinstance(leaf, jax.Ref) else leaf)
        for path, leaf in found
        if not is_allowed(path)
    ]
    if any(isinstance(leaf, Tracer) for _, leaf in leaves):
        raise ValueError(
            f"{_CALL} reads values and cannot run inside jit. Return the state from "
            "the jitted step and guard it when saving."
        )
    bad = [leaves[i] for i in _not_finite([leaf for _, leaf in leaves])]
    shown = [f"`{path or 'state'}` ({_count_text(x)})" for path, x in bad[:_SHOWN]]
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    reasons = [f"Non-finite: {', '.join(shown)}{more}"] if bad else []
    # Checking a history with NaN would report the same again.
    reasons = reasons or _unreachable(state)
    if reasons:
        raise FloatingPointError(
            f"{_CALL}: must not be saved. {'. '.join(reasons)}. Keep the last good "
            "checkpoint and return to it. To allow infinities on purpose: "
            '`mpx.guard(state, allow="PATH")`.'
        )
    return state


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | jax.Ref | np.ndarray | np.generic | Number)


# --- Non-finite values ----------------------------------------------------------------


def _not_finite(leaves: Sequence[Any]) -> list[int]:
    """Returns the indices of the leaves with NaN or infinities."""
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(_place(leaf), []).append(number)
    # Starts all programs before it waits for the first result.
    flags = [
        (numbers, _program(place)([_readable(leaves[i]) for i in numbers]))
        for place, numbers in groups.items()
        if place is not None
    ]
    bad = [i for i in groups.get(None, ()) if any(_counts(leaves[i]))]
    for numbers, found in flags:
        bad += [numbers[i] for i in np.flatnonzero(~np.asarray(found))]
    return sorted(bad)


def _place(leaf: object) -> Any:
    """Returns the mesh, or the set of devices, that arrays of one program share.

    None if the leaf is not a JAX array of a dtype that has NaN.
    """
    if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return None
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        return sharding.mesh
    return frozenset(sharding.device_set)


def _readable(leaf: jax.Array) -> jax.Array:
    """Returns the array in device memory instead of the host's."""
    kind = leaf.sharding.memory_kind
    if kind is None or not kind.endswith("_host") or jax.default_backend() == "cpu":
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))


@functools.lru_cache(maxsize=64)
def _program(place: Any) -> Callable[[list[Array]], Bool[Array, " n"]]:
    """Compiles a check that returns to every process whether each array is finite."""
    is_mesh = not isinstance(place, frozenset)
    everywhere = NamedSharding(place, PartitionSpec()) if is_mesh else None
    return jax.jit(_flags, out_shardings=everywhere)


def _flags(leaves: list[Array]) -> Bool[Array, " n"]:
    return stack(finite_by_leaf(leaves))


def _count_text(leaf: Any) -> str:
    nan, infinite = _counts(leaf)
    counts = [f"{nan:,} NaN"] * (nan > 0) + [f"{infinite:,} infinite"] * (infinite > 0)
    return f"{' and '.join(counts)} of {np.size(leaf):,}"


def _counts(leaf: Any) -> tuple[int, int]:
    """Returns how many values of a leaf are NaN, and how many are infinite."""
    if isinstance(leaf, Decimal):
        return int(leaf.is_nan()), int(leaf.is_infinite())
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | complex):
        return 0, 0
    of = jnp if isinstance(leaf, jax.Array) else np
    x: Any = of.asarray(leaf)
    fields = getattr(x.dtype, "names", None)  # a key's dtype has none
    if fields or x.dtype == object:
        parts = (x[name] for name in fields) if fields else x.flat
        counts = list(map(_counts, parts))
        return sum(nan for nan, _ in counts), sum(inf for _, inf in counts)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0, 0
    if x.dtype.itemsize == 1:
        x = x.astype(np.float32)
    return int(of.isnan(x).sum()), int(of.isinf(x).sum())


# --- Unreachable states ---------------------------------------------------------------


_HALTED = [
    "The run has halted, and changes nothing any more: weights are those of the "
    "last good step. Once the cause is fixed, `scaling.resumed()` continues"
]


def _unreachable(state: object) -> list[str]:
    """Returns the errors of each loss scaling and record of steps in a state."""

    def is_ours(node: object) -> bool:
        return isinstance(node, AbstractLossScaling | StepRecord)

    reasons = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_ours):
        try:
            if isinstance(node, AbstractLossScaling):
                node._validate()
                node = node.record
            if isinstance(node, StepRecord):
                validate_record(node, StepRecord)
                reasons += _HALTED * bool(np.any(node.halted))
        except ValueError as error:
            place = f"`{path_text(path)}`: " if path else ""
            reasons.append(f"No run reaches it: {place}{str(error).removesuffix('.')}")
    return reasons
