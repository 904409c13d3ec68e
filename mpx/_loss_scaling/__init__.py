"""Loss scaling: the factor that the loss is multiplied by, and its state.

Small gradients vanish in float16. Multiplying the loss by a *scale* multiplies every
gradient by it (the chain rule is linear), and dividing in float32 afterwards restores
the gradient. `DynamicLossScaling` searches for the largest scale that does not
overflow; `StaticLossScaling` keeps one; `NoLossScaling` is the state of a step without
one.

All three have the same public API, so that a training step is the same for every
precision: `.loss_scale`, `.steps`, `.skipped`, `.skipped_in_a_row`, `.last_finite`,
`.finite`, and `scale`, `unscale`, `adjust`. All are immutable PyTrees: each step
returns a new one.

Sharp edge: pass the state to a jitted function as an argument, and return it as a
result. A closure would freeze it at its first value; the gradient functions raise if
they detect that.

In order of reading: `_abstract` (interface, and `scaled`), `_concrete` (the three
classes, and checks of their arguments), `_state_dict` (counters and checkpoints).
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
