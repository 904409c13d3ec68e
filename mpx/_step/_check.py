"""Checks the state on the host: must the run stop?"""

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._base.errors import describe, listing
from .._base.tree import is_inexact_leaf, is_trainable, path_text
from .._loss_scaling import AbstractLossScaling, StepRecord, refuse_limit
from .._stored_weights import is_stored


def check(
    scaling: object, model: PyTree = None, *, max_skipped_in_a_row: int | None = 1000
) -> None:
    """Raises if training cannot continue; call it now and then, outside jit.

    It stops a run that

    - `mpx.optimizer_step` has halted (its `max_skipped_in_a_row` was exceeded);
    - has skipped more than `max_skipped_in_a_row` steps in a row;
    - skipped its last step although the dynamic scale was at its floor, so that no
      smaller scale is left to try;
    - has a state with which no step can be finite, such as a scale that is NaN.

    Steps whose loss was non-finite before it was scaled are not caused by the scale: an
    occasional bad batch does not stop a run of any length.

    Reading the state waits for the step that makes it; checking every hundred steps is
    enough.

    Args:
        scaling: The loss scaling, or the state of `skip_nonfinite`. None never stops.
        model: The model or the gradients, to name the non-finite leaves; a tuple of
            them if a tuple of arguments was differentiated.
        max_skipped_in_a_row: The largest allowed number of skipped steps in a row; None
            for no limit.

    Raises:
        FloatingPointError: Training cannot continue. The message has the step, the
            scale, the counters and up to eight leaves that were non-finite in the last
            skipped step.
        ValueError: Called inside jit, where values are unknown; or with several states
            at once; or `max_skipped_in_a_row` is not a whole number.
        TypeError: `scaling` has no such state.

    Examples:
        >>> import mpx
        >>> mpx.check(mpx.DynamicLossScaling())
    """
    refuse_limit(max_skipped_in_a_row, "`mpx.check`")
    record = getattr(scaling, "record", None)
    if scaling is None:
        return
    if not isinstance(record, StepRecord):
        raise TypeError(
            "`scaling` of `mpx.check(scaling)` must be a loss scaling or the state of "
            f"`mpx.skip_nonfinite`; got {describe(scaling)}."
        )
    if isinstance(record.steps, Tracer):
        raise ValueError(
            "`mpx.check(scaling)` reads values and cannot run inside jit. Return "
            "`scaling` from the jitted step and check it outside."
        )
    if np.ndim(record.steps):
        raise ValueError(
            "`scaling` of `mpx.check(scaling)` must be one state; got several, "
            f"stacked as {describe(record.steps)}. Check each: `jax.tree.map(lambda "
            "x: x[i], scaling)`."
        )
    in_a_row = int(record.skipped_in_a_row)
    if bool(record.halted):
        reason = (
            "the limit of `mpx.optimizer_step` was exceeded and it halted, until "
            "`scaling.resumed()`"
        )
    elif max_skipped_in_a_row is not None and in_a_row > max_skipped_in_a_row:
        reason = f"more than {max_skipped_in_a_row} steps in a row were skipped"
    else:
        is_scaling = isinstance(scaling, AbstractLossScaling)
        reason = scaling._why_stuck() if is_scaling else None
    if reason is not None:
        raise FloatingPointError(_message(scaling, record, model, reason))


def _message(scaling: object, record: StepRecord, model: PyTree, reason: str) -> str:
    scale = getattr(scaling, "loss_scale", None)
    at_scale = "" if scale is None else f", loss scale {float(scale):g}"
    return (
        f"Training must stop at step {int(record.steps)}{at_scale}: {reason}. "
        f"Skipped in a row: {int(record.skipped_in_a_row)}, in all: "
        f"{int(record.skipped)}, of which {int(record.bad_losses)} had a loss that "
        "was non-finite before it was scaled; last finite step: "
        f"{int(record.last_finite) or 'none'}. Non-finite in the last skipped step: "
        f"{_places(record, model)}. Look there for a division by zero, a logarithm "
        "of zero, a sum or square in half precision (`mpx.force_full_precision`), a "
        "learning rate that is too large, or bad data."
    )


def _places(record: StepRecord, model: PyTree) -> str:
    found = [int(i) for i in np.asarray(record.places) if i >= 0]
    if not found:
        return "not recorded"
    leaves = _gradient_leaves(int(record.places_seen), model)

    def name(place: int) -> str:
        if place == 0:
            return "the loss"
        if place <= len(leaves):
            return leaves[place - 1]
        if leaves:
            return "the optimizer's state, the new weights or the gradients' norm"
        if model is None:
            return f"gradient leaf {place - 1} (pass `model` to see its name)"
        return f"gradient leaf {place - 1} (`model` is not the differentiated tree)"

    return listing([name(place) for place in found])


def _gradient_leaves(places: int, model: PyTree) -> list[str]:
    """Returns the names of the leaves with a gradient; empty if unknown.

    `mpx.filter_grad` differentiates JAX arrays, which under `jax.jit` include NumPy's
    and Python's numbers, and `mpx.grad` all numbers. So the number of places determines
    which leaves had gradients: a loss, the leaves, and possibly one for the rest.
    """
    paths = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_stored)
    kinds = [
        [path_text(path) or "gradient" for path, leaf in paths if has_gradient(leaf)]
        for has_gradient in (_is_trained, _is_inexact, _is_number)
    ]
    for count in (places - 2, places - 1):
        for names in kinds:
            if names and len(names) == count:
                return names
    # An older state, in which places were not counted.
    return next(filter(None, kinds), []) if places == 0 else []


def _is_trained(leaf: object) -> bool:
    return is_stored(leaf) or is_trainable(leaf)


def _is_inexact(leaf: object) -> bool:
    return is_stored(leaf) or is_inexact_leaf(leaf)


def _is_number(leaf: object) -> bool:
    return _is_inexact(leaf) or isinstance(leaf, float | complex)
