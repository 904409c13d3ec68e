"""What a training step gives to its products: the state of recipes, and its number."""

from ._copies import (
    ROLES as ROLES,
    repeated as repeated,
    shared as shared,
    with_input_scale as with_input_scale,
)
from ._missing import (
    MissingScales as MissingScales,
    missing_from as missing_from,
)
from ._operands import StateOperands as StateOperands
from ._slots import (
    ProvidedState as ProvidedState,
    Request as Request,
    SlotName as SlotName,
    Slots as Slots,
    State as State,
    StateRequests as StateRequests,
    Use as Use,
    brief as brief,
    collecting_requests as collecting_requests,
    first_step as first_step,
    is_collecting_requests as is_collecting_requests,
    note_used as note_used,
    providing_state as providing_state,
)
from ._step import (
    StepAsked as StepAsked,
    asked_for_step as asked_for_step,
    at_step as at_step,
    is_random as is_random,
    with_step as with_step,
)
