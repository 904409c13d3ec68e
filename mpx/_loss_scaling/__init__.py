"""Loss scaling: the number that the loss is multiplied by, and its state.

Small gradients vanish in float16. Multiplying the loss by a *scale* multiplies every
gradient by it (the chain rule is linear), and dividing in float32 afterwards gives the
gradient back. `DynamicLossScaling` looks for the largest scale that does not overflow;
`StaticLossScaling` keeps one; `NoLossScaling` is the state of a step that needs none.

All three have one face, so that a training step reads the same for every precision:
`.loss_scale`, `.steps`, `.skipped`, `.skipped_in_a_row`, `.last_finite`, `.finite`, and
`scale`, `unscale`, `adjust`. All are immutable PyTrees: each step returns a new one.

The sharp edge: the state must go *into* a jitted function as an argument and come out
as a result. Closed over, it would be frozen at its first value; the gradient functions
raise where they see that.
"""

from ._abstract import AbstractLossScaling, scaled
from ._concrete import DynamicLossScaling, NoLossScaling, StaticLossScaling
from ._state_dict import (
    StepRecord,
    advance_record,
    kinds,
    read_record,
    read_version,
    refuse_arithmetic,
    refuse_limit,
    refuse_other_keys,
    replaced,
    validate_record,
    write_state,
)
