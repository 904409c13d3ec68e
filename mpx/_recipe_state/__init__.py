"""What a training step gives to its products: the state of recipes, and its number."""

from ._operands import (
    NOTHING_KNOWN,
    MissingScales,
    StateOperands,
    StepAsked,
    StepValues,
    asked_for_step,
    at_step,
    is_random,
    known_scale,
    missing_from,
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
