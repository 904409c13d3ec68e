"""What a training step gives to its products: the state of recipes, and its number."""

from ._copies import ROLES, repeated, shared, with_input_scale
from ._missing import MissingScales, missing_from
from ._operands import NOTHING_KNOWN, StateOperands, StepValues
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
)
from ._step import (
    StepAsked,
    asked_for_step,
    at_step,
    is_random,
    known_scale,
    with_step,
)
