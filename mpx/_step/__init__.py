"""Gradients in mixed precision: what stands in for `eqx.filter_grad` and `jax.grad`.

One call does steps 2 to 6 of mixed precision training (Micikevicius et al. 2018,
arXiv:1710.03740): cast the inputs, run the function, scale the loss, differentiate,
unscale, check, adjust the scale. What matters about the order:

- The casts stand *inside* the differentiated function. So the gradient is taken with
  respect to the float32 weights and is float32 itself.
- The loss is made float32 before it is scaled. Neither the reported loss nor the scale
  ever passes through a float16 multiplication.
- Gradients are unscaled by the scale that scaled them, not by the adjusted one.
- A step is good if the loss and every gradient are finite. Under `shard_map` and `pmap`
  all devices agree on that.

Modules: `_transforms` (the public functions), `_options` (what they are asked for),
`_attempt` (a try at a step), `_engine` (one batch), `_inputs` (which leaves are cast,
what is refused), `_accumulate` (micro-batches), `_rows` (what of a call has
no rows), `_result` (what comes back).
"""

from ._accumulate import Accumulation
from ._attempt import GradientResult, tried_again
from ._check import check
from ._init_scaling import inference, init_scaling
from ._inputs import is_frozen, refuse_nnx
from ._optimizer import (
    Transformation,
    optimizer_step,
    optimizer_update,
    refuse_optimizer,
    skip_nonfinite,
    was_skipped,
)
from ._recipe_scaling import RecipeScaling
from ._transforms import (
    Options,
    calculate_scaled_grad,
    filter_grad,
    filter_value_and_grad,
    grad,
    gradient_function,
    positions_in_call,
    positions_of,
    value_and_grad,
)
