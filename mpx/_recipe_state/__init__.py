"""The inputs of a training step's products: the state of recipes, and step values.

`_slots`: scales that accompany each weight, and the amaxes that come back. `_operands`:
these, stored weights, and the step's number and loss scale, as inputs of programs.
"""

from ._operands import (
    NOTHING_KNOWN,
    MissingScales,
    StateOperands,
    StepAsked,
    StepValues,
    asked_for_step,
    at_step,
    in_one_array,
    is_random,
    known_scale,
    missing_from,
    with_scales,
    with_step,
)
from ._slots import (
    ProvidedState,
    Request,
    SlotName,
    Slots,
    State,
    StateRequests,
    Use,
    brief,
    collecting_requests,
    first_step,
    is_collecting_requests,
    note_used,
    providing_state,
    repeated,
    shared,
    with_input_scale,
)
