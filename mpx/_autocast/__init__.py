"""Automatic mixed precision for any JAX function.

In order of reading; `_call` runs these on a call:

- `_context`: values, places and runs. `_reach`: where values go, and come from.
- `_demand` analyses, `_decide` and `_products` decide.
- `_emit` emits; `_rematerialize` recomputes islands (`mpx._program.islands`).
- `_rewrites`, `_stacks`, `_travel`: operations that are emitted differently.
- Equations with programs: `_control_flow`, `_loops`, `_custom_rules` with
  `_unscaled_rules`, `_fused`.
- Calls: `_call`, `_recipe_call` for recipes, `_transform` with `mpx.autocast`,
  `_contexts` for layers, `_forced` with `mpx.force_full_precision`.

`mpx._program` (JAX's programs), `mpx._settings` (options and rules),
`mpx._recipe_state` and `mpx._wire` (communication) do not depend on autocast.
"""

from ._call import NO_MASTER, call_as_written, call_with_masters, half_inputs
from ._contexts import (
    AmbientRecipe,
    call_with_ambient,
    in_contexts,
    with_ambient_recipe,
)
from ._decide import (
    IslandNote,
    Note,
    is_scaling_note,
    noted_scaling,
    read_note,
    taking_notes,
)
from ._forced import force_full_precision
from ._fused import FusedOperation, fused_operation, operation_of
from ._products import MarkedWeight
from ._recipe_call import is_marked
from ._transform import autocast, recomputing, with_dtype, with_rule
