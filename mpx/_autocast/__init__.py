"""Automatic mixed precision for any JAX function."""

from ._call import (
    NO_MASTER as NO_MASTER,
    call_with_masters as call_with_masters,
    is_marked as is_marked,
)
from ._decisions import Candidate as Candidate, Precision as Precision
from ._layers import with_ambient_recipe as with_ambient_recipe
from ._recompute import recomputed_if_cheap as recomputed_if_cheap
from ._region import ambient_with as ambient_with
from ._rules import Rule as Rule, Rules as Rules
from ._slots import (
    Request as Request,
    SlotName as SlotName,
    collecting as collecting,
    providing as providing,
)
from ._transform import (
    ambient_residuals as ambient_residuals,
    autocast as autocast,
    settings_of as settings_of,
)
