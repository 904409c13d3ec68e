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
    call_with_ambient as call_with_ambient,
    with_ambient_recipe as with_ambient_recipe,
)
from ._recompute import recomputed_if_cheap as recomputed_if_cheap
from ._region import ambient_with as ambient_with, is_tracing as is_tracing
from ._rules import Rule as Rule, Rules as Rules
from ._slots import (
    Provision as Provision,
    Request as Request,
    SlotName as SlotName,
    State as State,
    brief as brief,
    collecting as collecting,
    providing as providing,
)
from ._transform import (
    ambient_residuals as ambient_residuals,
    autocast as autocast,
    settings_of as settings_of,
)
