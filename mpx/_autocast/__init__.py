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
)
from ._layers import (
    AmbientRecipe as AmbientRecipe,
    call_with_ambient as call_with_ambient,
    in_contexts as in_contexts,
    with_ambient_recipe as with_ambient_recipe,
)
from ._marks import settings_of as settings_of
from ._notes import noted_scaling as noted_scaling
from ._recompute import recomputed_if_cheap as recomputed_if_cheap
from ._region import (
    is_tracing as is_tracing,
    note_float16 as note_float16,
    noting_float16 as noting_float16,
    under_control as under_control,
)
from ._rules import Rule as Rule, Rules as Rules
from ._slots import (
    Collection as Collection,
    Provision as Provision,
    Request as Request,
    SlotName as SlotName,
    State as State,
    brief as brief,
    collecting as collecting,
    providing as providing,
)
from ._step import at_step as at_step
from ._transform import (
    ambient_residuals as ambient_residuals,
    autocast as autocast,
)
