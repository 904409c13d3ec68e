"""Looking at the state on the host: has the run come to a point where it must stop?"""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ._errors import describe, listing
from ._loss_scaling import DynamicLossScaling, StepRecord
from ._loss_scaling._record import refuse_limit
from ._tree import is_inexact_leaf, path_text


def check(
    scaling: Any, model: PyTree = None, *, max_skipped_in_a_row: int | None = None
) -> None:
    """Raises if training cannot go on; call it now and then, outside of jit.

    It stops a run that

    - `mpx.optimizer_step` has halted (its `max_skipped_in_a_row` was exceeded);
    - has skipped more than `max_skipped_in_a_row` steps in a row, if given here;
    - has a bad last step although the dynamic scale was at its floor, so that no
      smaller scale is left to try.

    Reading the state waits for the step that makes it: every hundred steps will do.

    Args:
        scaling: The loss scaling, or the state of `skip_nonfinite`. None is never a
            reason to stop.
        model: The model or the gradients, to name the leaves that were not finite.
        max_skipped_in_a_row: The largest number of skipped steps in a row that is
            still fine; None for no limit.

    Raises:
        FloatingPointError: Training cannot go on. The message has the step, the scale,
            the counters and up to eight places that were not finite in the last bad
            step.
        ValueError: Called inside of jit, where values are not known; or
            `max_skipped_in_a_row` is no whole number.
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
            "`mpx.check(scaling)` reads values and cannot run inside of jit. Return "
            "`scaling` from the jitted step and check it outside."
        )
    in_a_row = int(record.skipped_in_a_row)
    if bool(record.halted):
        reason = "the limit given to `mpx.optimizer_step` was exceeded and it halted"
    elif max_skipped_in_a_row is not None and in_a_row > max_skipped_in_a_row:
        reason = f"more than {max_skipped_in_a_row} steps in a row were skipped"
    elif isinstance(scaling, DynamicLossScaling) and int(scaling.floored) > 0:
        reason = (
            f"{int(scaling.floored)} bad steps came at the floor of the loss scale, "
            f"{float(scaling.min_loss_scaling):g}: a smaller scale is not the cure"
        )
    else:
        return
    raise FloatingPointError(_message(scaling, record, model, reason))


def _message(scaling: Any, record: StepRecord, model: PyTree, reason: str) -> str:
    scale = getattr(scaling, "loss_scale", None)
    at_scale = "" if scale is None else f", loss scale {float(scale):g}"
    return (
        f"Training has to stop at step {int(record.steps)}{at_scale}: {reason}. "
        "Skipped "
        f"in a row: {int(record.skipped_in_a_row)}, in all: {int(record.skipped)}; "
        "last "
        f"finite step: {int(record.last_finite) or 'none'}. Not finite in the last bad "
        f"step: {_places(record, model)}. Look there for a division by zero, a "
        "logarithm of zero, a sum or square in half precision "
        "(`mpx.force_full_precision`), a learning rate that is too large, or bad data."
    )


def _places(record: StepRecord, model: PyTree) -> str:
    found = [int(i) for i in np.asarray(record.places) if i >= 0]
    if not found:
        return "not recorded"
    paths = jax.tree_util.tree_leaves_with_path(model)
    leaves = [path_text(path) or "gradient" for path, x in paths if is_inexact_leaf(x)]

    def name(place: int) -> str:
        if place == 0:
            return "the loss"
        if place <= len(leaves):
            return leaves[place - 1]
        if leaves:
            return "the optimizer's state, the new weights or the gradients' norm"
        return f"gradient leaf {place - 1} (pass `model` to see its name)"

    return listing([name(place) for place in found])
