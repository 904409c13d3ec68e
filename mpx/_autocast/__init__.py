"""Automatic mixed precision for any JAX function.

In this order: what is known meanwhile (`_context`); analyse (`_demand`), decide
(`_decide`, `_products`), emit (`_emit`, `_travel`), rematerialize (`_rematerialize`);
equations that hold programs (`_control_flow`, `_loops`, `_custom_rules` with
`_unscaled_rules`, `_fused`); and around it `_call`, `_recipe_call` for what only
recipes need, and `_transform`. `_notes` says what was decided. `_convert`, `_scatter`,
`_lookup`, `_bias` and `_stacks` are each for one thing that is not emitted as it was
written.

What a program is stands in `mpx._program`, what a user says in `mpx._settings`, of
single operations in `mpx._rules`, the state that recipes are given in
`mpx._recipe_state`, and what travels between devices in `mpx._wire`; none of them knows
autocast.
"""

from ._call import (
    NO_MASTER,
    Invocation,
    call_as_written,
    call_autocast,
    call_with_masters,
    half_inputs,
)
from ._context import Programs
from ._notes import (
    IslandNote,
    Note,
    is_scaling_note,
    noted_scaling,
    read_note,
    taking_notes,
)
from ._recipe_call import is_marked
from ._switched_off import is_switched_off
from ._transform import ambient_residuals, autocast, recomputing, with_dtype, with_rule
