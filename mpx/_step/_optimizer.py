"""The end of a training step: updates the weights, or leaves everything unchanged.

A skipped step leaves the weights and the whole state of the optimizer bit-identical:
moments, counts, schedules. This uses select, not `lax.cond` (which costs memory
traffic), and does not add zero (which turns -0.0 into 0.0). Optax is never imported: an
optimizer is any object with `init` and `update`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._base.errors import at_path, describe, differences
from .._base.jax_compat import stack
from .._base.tree import (
    all_finite,
    bool_scalar,
    finite_by_leaf,
    is_float_leaf,
    leaves_with_paths,
    path_text,
    select_tree,
)
from .._base.typing import AnyArray, BoolLike, BoolScalar
from .._loss_scaling import (
    AbstractLossScaling,
    StepRecord,
    advance_record,
    refuse_limit,
    replaced,
)
from .._stored_weights import is_stored
from ._attempt import GradientResult, agreed


def optimizer_update(
    model: PyTree,
    optimizer: object,
    optimizer_state: PyTree,
    grads: PyTree,
    grads_finite: BoolLike,
    **extra_args: PyTree,
) -> tuple[PyTree, PyTree]:
    r"""Applies one step of an Optax optimizer, or skips it if gradients are non-finite.

    $$(w, o) \leftarrow \begin{cases} (w + u, o') & \text{finite} \\ (w, o) &
        \text{else} \end{cases} \qquad (u, o') = \operatorname{update}(g, o, w)$$

    Args:
        model: Any PyTree; leaves without a gradient are unchanged.
        optimizer: An Optax transformation.
        optimizer_state: Its state, from
            `optimizer.init(eqx.filter(model, eqx.is_inexact_array))`.
        grads: Unscaled gradients, a tree like the model, with None for leaves without
            one.
        grads_finite: Whether to apply the step, one boolean, an array or Python's.
        **extra_args: Passed on to `optimizer.update`: `value`, `grad` and `value_fn`
            for L-BFGS.

    Returns:
        `(model, optimizer_state)`, with unchanged dtypes. Both may be donated.

    Raises:
        TypeError: `grads_finite` is not a boolean, or `optimizer` has no `init` and
            `update`.
        ValueError: There are no gradients, they do not match the model, belong to a
            leaf that is not a floating-point array, or the optimizer changed the
            structure, shapes or dtypes of its state.

    A skipped step leaves model and state unchanged, bit for bit.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> model, optimizer = {"w": jnp.ones(2)}, optax.sgd(0.5)
        >>> state = optimizer.init(model)
        >>> model, state = mpx.optimizer_update(model, optimizer, state, model, True)
        >>> model
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    call = "`mpx.optimizer_update`"
    finite = bool_scalar(grads_finite, f"`grads_finite` of {call}")
    updates, new_model, new_state = _update(
        call, model, optimizer, optimizer_state, grads, extra_args
    )
    return (
        _chosen(finite, updates, new_model, model),
        select_tree(finite, new_state, optimizer_state),
    )


def optimizer_step(
    model: PyTree,
    optimizer: object,
    optimizer_state: PyTree,
    result: GradientResult,
    *,
    check_gradients: bool = False,
    check_update: bool = False,
    max_skipped_in_a_row: int | None = None,
    **extra_args: PyTree,
) -> tuple[PyTree, PyTree, AbstractLossScaling | None]:
    """Applies or skips a training step, and returns model, optimizer state, scaling.

    It takes the result of a gradient function and updates or skips as
    `optimizer_update` does. The loss scaling follows the same decision.

    Args:
        model: Any PyTree; leaves without a gradient are unchanged.
        optimizer: An Optax transformation.
        optimizer_state: Its state, as in `optimizer_update`.
        result: The result of `mpx.filter_grad` or the like, unchanged or with other
            gradients: `result._replace(grads=clipped)`.
        check_gradients: Checks `result.grads` again, for gradients that were changed
            since (summed over devices, clipped).
        check_update: Also skips the step if the updates, the new weights, a previously
            finite optimizer state, or the gradients' norm overflow. Finite gradients of
            3e19 have an infinite norm, and clipping by it silently sets them to zero.
        max_skipped_in_a_row: *Halts* the run after more skipped steps in a row than
            this: nothing changes any more, and `mpx.check(scaling)` raises on the host.
            None for no limit; no effect if steps are not counted.
        **extra_args: Passed on to `optimizer.update`, as in `optimizer_update`.

    Returns:
        `(model, optimizer_state, scaling)`, with unchanged dtypes; `scaling` is for the
        next step, and None if the gradient function got None.

    Raises:
        TypeError: `result` is not a `mpx.GradientResult`.
        ValueError: `max_skipped_in_a_row` is not a whole number.

    It also raises what `optimizer_update` raises.

    A step that these checks reject is treated like any other skipped step: it is
    counted once, and the scale adjusted as if the gradients had been non-finite.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> model, optimizer = jnp.ones(2), optax.sgd(0.5)
        >>> state, scaling = optimizer.init(model), mpx.DynamicLossScaling()
        >>> result = mpx.filter_grad(lambda w: jnp.sum(w), scaling)(model)
        >>> model, state, scaling = mpx.optimizer_step(model, optimizer, state, result)
        >>> model
        Array([0.5, 0.5], dtype=float32)
    """
    call = "`mpx.optimizer_step`"
    if not isinstance(result, GradientResult):
        raise TypeError(
            f"`result` of {call} must be the whole result of `mpx.filter_grad` or "
            f"the like; got {describe(result)}. For its parts use "
            "`mpx.optimizer_update(model, optimizer, opt_state, grads, finite)`."
        )
    refuse_limit(max_skipped_in_a_row, call)
    grads = result.grads
    updates, new_model, new_state = _update(
        call, model, optimizer, optimizer_state, grads, extra_args
    )
    flags = _places(result, grads)
    if check_gradients:
        flags = _joined(flags, finite_by_leaf(grads), jnp.asarray(True))
    if check_update:
        rest = _stays_finite(optimizer_state, new_state) & _norm_is_finite(grads)
        by_weight = finite_by_leaf(_one_for_each_weight(updates))
        flags = _joined(flags, by_weight, rest & all_finite(new_model))
    by_loss = "_zeroed" in result._parts
    rechecked = check_gradients or check_update or by_loss
    finite = result.finite & jnp.all(flags) if rechecked else result.finite
    scaling = result._judged(finite, flags) if rechecked else result.scaling
    apply = finite
    if max_skipped_in_a_row is not None and scaling is not None:
        scaling = _with_limit(scaling, result._before, max_skipped_in_a_row)
        apply = finite & ~scaling.record.halted
    if by_loss and scaling is not None:
        scaling = scaling._noted(apply & _are_zeroed(result, updates, apply))
    return (
        _chosen(apply, updates, new_model, model),
        select_tree(apply, new_state, optimizer_state),
        scaling,
    )


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`: the counters, and the inner optimizer's state."""

    record: StepRecord
    inner_state: PyTree


class Transformation(NamedTuple):
    """An Optax transformation (a pair of `init` and `update`)."""

    init: Callable[..., PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]


def skip_nonfinite(optimizer: Any) -> Transformation:
    r"""Wraps an Optax transformation to skip steps with non-finite gradients.

    For existing training loops that need only this. Unlike `optax.apply_if_finite` it
    never applies a NaN after a number of errors.

    Args:
        optimizer: An Optax transformation.

    Returns:
        A pair `(init, update)` to use as an Optax transformation; its state has
        `record` (see `mpx.reports.StepRecord`) and `inner_state`. `mpx.check` accepts
        it, too.

    Raises:
        TypeError: `optimizer` has no `init` and `update`.

    On a skipped step the inner state is unchanged and the updates are -0.0, which
    changes no weight: $w + (-0.0) = w$ bit for bit, also for $w = -0.0$. XLA's
    additions flush subnormal numbers to zero, which `mpx.optimizer_update` does not.
    Put it inside `mpx.master_weights`, whose updates are not plain numbers.

    Examples:
        >>> import jax.numpy as jnp, mpx, optax
        >>> tx = mpx.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
        >>> state = tx.init(jnp.ones(2))
        >>> updates, state = tx.update(jnp.array([1.0, jnp.nan]), state, jnp.ones(2))
        >>> updates, int(state.record.skipped)
        (Array([-0., -0.], dtype=float32), 1)
    """
    refuse_optimizer(optimizer, "`mpx.skip_nonfinite`")

    def init(params: PyTree) -> SkipNonfiniteState:
        return SkipNonfiniteState(StepRecord(), optimizer.init(params))

    def update(
        updates: PyTree,
        state: SkipNonfiniteState,
        params: PyTree | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, SkipNonfiniteState]:
        always = jnp.asarray(True)  # for the loss and the additional checks of a step
        flags = stack([always, *finite_by_leaf(updates), always])
        finite = jnp.all(flags)
        new, inner = optimizer.update(updates, state.inner_state, params, **extra_args)
        inner = _with_dtypes_of(state.inner_state, inner, "`mpx.skip_nonfinite`")
        nothing = jax.tree.map(lambda u: jnp.full_like(u, -0.0), new)
        return select_tree(finite, new, nothing), SkipNonfiniteState(
            advance_record(state.record, finite, flags),
            select_tree(finite, inner, state.inner_state),
        )

    return Transformation(init, update)


def _update(
    call: str,
    model: PyTree,
    optimizer: Any,
    state: PyTree,
    grads: PyTree,
    extra_args: dict[str, PyTree],
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the updates, and the model and the state with them applied."""
    refuse_optimizer(optimizer, call)
    if not any(eqx.is_array_like(g) for g in jax.tree.leaves(grads)):
        raise ValueError(
            f"{call} needs gradients; got a tree without arrays. Was the model "
            "passed as the first argument of the loss?"
        )
    params = _with_gradients(model, grads, call)
    try:
        updates, new_state = optimizer.update(grads, state, params, **extra_args)
    except Exception as error:
        if "NewWeight" not in str(error):
            _refuse_other_state(optimizer, state, params, call)
            raise
        raise TypeError(
            f"{call}: updates of `mpx.master_weights` contain the new weights, and "
            "cannot be used by a transformation around it. Put that inside: "
            "`mpx.master_weights(optax.MultiSteps(...))`, "
            "`mpx.master_weights(optax.chain(...))`."
        ) from error
    new_state = _with_dtypes_of(state, new_state, call)
    return updates, jax.tree.map(_applied, updates, model, is_leaf=_is_none), new_state


def _refuse_other_state(
    optimizer: Any, state: PyTree, params: PyTree, call: str
) -> None:
    """Raises if a state does not match the one that the optimizer makes for weights."""
    try:
        own = jax.eval_shape(optimizer.init, params)
    except Exception:  # the first error is more informative
        return
    wanted, given = (
        {path: getattr(leaf, "shape", ()) for path, leaf in leaves_with_paths(tree)}
        for tree in (own, state)
    )
    if found := differences(wanted, given):
        raise ValueError(
            f"{call} needs the state of this model and optimizer; {found}. Make it for "
            "this model, `optimizer.init(eqx.filter(model, eqx.is_inexact_array))`, "
            "and restore a saved one with that as the template."
        )


def _with_dtypes_of(before: PyTree, after: PyTree, call: str) -> PyTree:
    """Casts an optimizer's new state to the dtypes of the state before.

    Gradients are float32 also for half-precision weights, and would make moments that
    began in the weights' dtype float32 at the first step.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        return after  # another check raises with more details

    def cast(path: KeyPath, old: PyTree, new: PyTree) -> PyTree:
        if isinstance(new, jax.Array) and _is_of_the_host(old):
            raise TypeError(
                f"{call} needs JAX arrays in the optimizer's state; got "
                f"{describe(old)}{at_path(path_text(path))}. Convert them: "
                "`opt_state = jax.tree.map(jnp.asarray, opt_state)`."
            )
        if getattr(old, "dtype", None) == getattr(new, "dtype", None):
            return new
        both = is_float_leaf(old) and is_float_leaf(new)
        return new.astype(old.dtype) if both else new

    return jax.tree_util.tree_map_with_path(cast, before, after)


def _is_of_the_host(leaf: object) -> bool:
    """Returns whether a leaf is a Python number, or of a dtype that JAX lacks."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    return isinstance(leaf, bool | int | float | complex)


def _applied(update: PyTree, weight: PyTree) -> PyTree:
    if update is None:
        return weight
    if update.dtype != weight.dtype:
        update = update.astype(weight.dtype)
    return weight + update


def _chosen(apply: BoolScalar, updates: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new model, or the old one if a step is skipped.

    An update that contains the new weight (`mpx.master_weights`) chooses by itself.
    """

    def choose(update: Any, weight: PyTree) -> PyTree:
        own = getattr(update, "chosen", None)
        return weight if own is None else own(apply)

    return jax.tree.map(choose, updates, select_tree(apply, new, old), is_leaf=_is_none)


def _with_gradients(model: PyTree, grads: PyTree, call: str) -> PyTree:
    """Returns the weights with a gradient, and None for the others, for optimizers."""

    def choose(path: KeyPath, grad: PyTree, weight: PyTree) -> PyTree:
        if grad is None:
            return None
        for what, leaf in (("gradient", grad), ("weight", weight)):
            if not _is_trained(leaf) and not is_stored(leaf):
                raise ValueError(
                    f"{call} needs floating-point arrays; got the {what} "
                    f"{describe(leaf)}{at_path(path_text(path))}. Convert Python "
                    "numbers, `jnp.asarray(number)`, and pass None as the gradient "
                    "of leaves that are not trained, as `mpx.filter_grad` returns "
                    "it."
                )
        if grad.shape != weight.shape:
            raise ValueError(
                f"{call} needs a gradient of its weight's shape; got {describe(grad)} "
                f"for {describe(weight)}{at_path(path_text(path))}."
            )
        return weight

    try:
        return jax.tree_util.tree_map_with_path(choose, grads, model, is_leaf=_is_none)
    except ValueError as error:
        if call in str(error):
            raise
        raise ValueError(
            f"{call} needs gradients of the model's structure, with None for leaves "
            "without a gradient; got\n"
            f"  gradients: {jax.tree.structure(grads)}\n"
            f"  model: {jax.tree.structure(model)}\n"
            "Differentiate with respect to the updated model."
        ) from None


def _is_trained(leaf: object) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return is_array and jnp.issubdtype(leaf.dtype, np.inexact)


def _one_for_each_weight(updates: PyTree) -> PyTree:
    """Returns updates as one leaf per gradient: a stored weight has several arrays."""

    def one(update: PyTree) -> PyTree:
        return update.quantized.payload if is_stored(update) else update

    return jax.tree.map(one, updates, is_leaf=is_stored)


def _is_none(leaf: object) -> bool:
    return leaf is None


def _places(result: GradientResult, grads: PyTree) -> PyTree:
    """Returns whether the loss, each gradient and the rest are finite so far."""
    flags = result._flags
    return jnp.ones(2 + len(jax.tree.leaves(grads)), bool) if flags is None else flags


def _are_zeroed(
    result: GradientResult, updates: PyTree, apply: BoolScalar
) -> BoolScalar:
    """Returns whether elements of gradients were set to zero.

    It reads the updates, too, though their values do not matter. So XLA's compiler for
    TPUs counts in the kernel of gradient, optimizer and weight. By gradients alone, it
    would write each one, and read it again in the optimizer.
    """
    raw = result._parts.get("_raw", ())
    leaves = jax.tree.leaves(_one_for_each_weight(updates))
    if len(leaves) != len(raw):
        return result._zeroed

    def least(grad: Any, update: Any) -> Any:
        full = getattr(update, "full", None)
        size = jnp.abs(update if full is None else full(apply))
        return jnp.min(jnp.where(jnp.isfinite(grad), size, -1), initial=0)

    found = [least(*pair) < 0 for pair in zip(raw, leaves, strict=True)]
    return ~jnp.all(agreed(~stack(found)))


def _joined(flags: AnyArray, by_leaf: list[AnyArray], rest: BoolScalar) -> AnyArray:
    return flags & stack([jnp.asarray(True), *by_leaf, rest])


def _stays_finite(before: PyTree, after: PyTree) -> BoolScalar:
    """Returns whether no number of the state became non-finite; some start infinite."""
    flags = [
        jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
        for old, new in zip(
            jax.tree.leaves(before), jax.tree.leaves(after), strict=True
        )
        if eqx.is_inexact_array(new)
    ]
    return jnp.stack(flags).all() if flags else jnp.asarray(True)


def _norm_is_finite(grads: PyTree) -> BoolScalar:
    squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)]
    return jnp.isfinite(sum(squares[1:], squares[0]))


def _with_limit(
    scaling: AbstractLossScaling, before: AbstractLossScaling, limit: int
) -> Any:
    """Halts past the limit; a halted state never changes again."""
    record = scaling.record
    halted = record.halted | (record.skipped_in_a_row > limit)
    limited = scaling._with_record(replaced(record, halted=halted))
    return select_tree(before.record.halted, before, limited)


def refuse_optimizer(optimizer: object, call: str) -> None:
    """Raises for an object that is not an Optax transformation."""
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"{call} needs an Optax transformation (with `init` and `update`); got "
            f"{describe(optimizer)}."
        )


# --- Steps skipped inside a transformation --------------------------------------------


def was_skipped(before: PyTree, after: PyTree) -> BoolScalar | None:
    """Returns whether a `skip_nonfinite` inside a transformation has skipped a step.

    Compares the states before and after the step; None without a `skip_nonfinite`.
    """
    records = [
        [s.record.skipped for s in jax.tree.leaves(state, is_leaf=_skips) if _skips(s)]
        for state in (before, after)
    ]
    flags = [old != new for old, new in zip(*records, strict=True)]
    return functools.reduce(jnp.logical_and, flags) if flags else None


def _skips(node: object) -> bool:
    return isinstance(node, SkipNonfiniteState)
