"""Gradients in mixed precision, and the other parts of a training step.

One call replaces `eqx.filter_grad` or `jax.grad`, and does steps 2 to 6 of mixed
precision training (Micikevicius et al. 2018, arXiv:1710.03740): cast the inputs, run
the function, scale the loss, differentiate, unscale, check, adjust the scale. The order
matters:

- The casts are *inside* the differentiated function. So the gradient is taken with
  respect to the float32 weights and is float32 itself.
- The loss is cast to float32 before it is scaled. So neither the reported loss nor the
  scale passes through a float16 multiplication.
- Gradients are unscaled by the scale that scaled them, not by the adjusted one.
- A step is finite if the loss and every gradient are. Under `shard_map` and `pmap` all
  devices agree on that.

In order of reading: `_transforms` (the public functions and their options), `_inputs`
(casts and refused inputs), `_engine` (one batch), `_attempt` (one try of a step, and
its result), `_accumulate` (micro-batches), `_devices` (micro-batches shared by
devices), `_optimizer` (update or skip), `_check` (stop a run), `_init_scaling` (the
initial state, and inference), `_recipe_scaling` and `_delayed_scales` (the state of
recipes).
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
