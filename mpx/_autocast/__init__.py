"""Automatic mixed precision for any JAX function."""

from ._call import (
    NO_MASTER as NO_MASTER,
    call_with_masters as call_with_masters,
    is_marked as is_marked,
)
from ._decisions import Candidate as Candidate, Precision as Precision
from ._fused import (
    FusedOperation as FusedOperation,
    fused_call as fused_call,
    fused_operation as fused_operation,
    is_mark as is_mark,
    operation_of as operation_of,
)
from ._layers import (
    AmbientRecipe as AmbientRecipe,
    call_with_ambient as call_with_ambient,
    in_contexts as in_contexts,
    with_ambient_recipe as with_ambient_recipe,
)
from ._marks import (
    settings_of as settings_of,
    unwrapped as unwrapped,
    weights_of as weights_of,
)
from ._notes import (
    IslandNote as IslandNote,
    Note as Note,
    is_note as is_note,
    is_scaling_note as is_scaling_note,
    noted_scaling as noted_scaling,
    read_note as read_note,
    taking_notes as taking_notes,
)
from ._region import (
    is_region as is_region,
    is_tracing as is_tracing,
    note_float16 as note_float16,
    noting_float16 as noting_float16,
    under_control as under_control,
)
from ._rules import Rule as Rule, Rules as Rules
from ._slots import (
    ProvidedState as ProvidedState,
    Request as Request,
    SlotName as SlotName,
    State as State,
    StateRequests as StateRequests,
    brief as brief,
    collecting_requests as collecting_requests,
    first_step as first_step,
    providing_state as providing_state,
)
from ._step import at_step as at_step
from ._transform import (
    ambient_residuals as ambient_residuals,
    autocast as autocast,
)
from ._weights import (
    read_weights as read_weights,
    weights_in_call as weights_in_call,
)
