"""`flax.serialization` for training states that contain a loss scaling.

Flax converts a training state to nested dictionaries, class by class, and supports only
registered classes. `register_serialization()` registers those of mpx. Then
`to_state_dict`, `from_state_dict`, `to_bytes` and `from_bytes` accept any state with a
loss scaling in it: dictionaries, named tuples, `flax.struct` dataclasses, the state of
`mpx.skip_nonfinite`.

Call it once, at the start of each program that saves or restores. Nothing happens when
this module is imported, and Flax is imported by the call. Without it `to_bytes` raises,
but `from_bytes` returns a dictionary instead of the loss scaling.
"""

from typing import Any

from .._base.tree import Guard
from .._loss_scaling import (
    AbstractLossScaling,
    StepRecord,
    kinds,
    read_record,
    write_state,
)
from .._memory import CompressedArray
from .._quantize import QuantizedArray
from .._step import RecipeScaling
from .._stored_weights import StoredWeight, register_with_flax

__all__ = ["register_serialization"]


def register_serialization() -> None:
    """Registers mpx's loss scalings, step records and compressed arrays with Flax.

    A scaling is written as its `state_dict()`, with kind and version. So an older state
    is migrated, and an incomplete or damaged one raises the errors of
    `from_state_dict`. Of the target that Flax needs for restoring, only the class is
    used, and for a `mpx.quantization.RecipeScaling` the slots, as in `with_state`;
    every field comes from the state, bit for bit. Stored weights and compressed
    optimizer states are written as their arrays, also without this call if Flax was
    imported before they were made.

    Repeated calls are allowed, and add the subclasses of `mpx.AbstractLossScaling` that
    were defined since.

    Raises:
        ModuleNotFoundError: Flax is not installed.

    Examples:
        >>> import flax.serialization, mpx, mpx.compat.flax
        >>> mpx.compat.flax.register_serialization()
        >>> state = {"step": 3, "scaling": mpx.DynamicLossScaling(1024.0)}
        >>> data = flax.serialization.to_bytes(state)
        >>> new = {"step": 0, "scaling": mpx.DynamicLossScaling()}
        >>> restored = flax.serialization.from_bytes(new, data)
        >>> restored["step"], float(restored["scaling"].loss_scale)
        (3, 1024.0)
    """
    from flax import serialization

    for cls in kinds(AbstractLossScaling).values():
        serialization.register_serialization_state(
            cls, cls.state_dict, _restored, override=True
        )
    register_with_flax(StoredWeight, QuantizedArray, CompressedArray, Guard)
    serialization.register_serialization_state(
        StepRecord, write_state, _restored_record, override=True
    )


def _restored(target: AbstractLossScaling, state: Any) -> AbstractLossScaling:
    if isinstance(target, RecipeScaling):
        return target.with_state(state)
    return type(target).from_state_dict(state)


def _restored_record(target: StepRecord, state: object) -> StepRecord:
    return read_record(state, "`flax.serialization.from_state_dict(target, state)`")
