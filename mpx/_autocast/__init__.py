"""Automatic mixed precision for any JAX function.

In this order: what is known meanwhile (`_context`); analyse (`_demand`), decide
(`_decide`, `_products`), emit (`_emit`, `_travel`), rematerialize (`_rematerialize`);
equations that hold programs (`_control_flow`, `_loops`, `_custom_rules` with
`_unscaled_rules`, `_fused`); and around it `_call`, `_recipe_call` for what only
recipes need, and `_transform`. `_notes` says what was decided. `_convert`, `_scatter`,
`_lookup`, `_bias` and `_stacks` are each for one thing that is not emitted as it was
written.

What a program is stands in `mpx._program`, what a user says in
`mpx._settings._settings`, of single operations in `mpx._settings._rules`, the state
that recipes are given in `mpx._recipe_state`, and what travels between devices in
`mpx._wire`; none of them knows autocast.
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
from ._recipe_call import is_marked
from ._transform import autocast, recomputing, with_dtype, with_rule
