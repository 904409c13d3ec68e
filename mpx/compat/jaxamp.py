"""jaxamp's names and signatures on top of mpx: `import mpx.compat.jaxamp as jaxamp`.

Everything that `jaxamp` 0.0.4 exports is here. Differences, each a fixed defect of the
original:

- `amp` works on the present JAX, and transforms the bodies of jit, scan, while, cond,
  remat, shard_map and functions with custom derivative rules. The original casts
  nothing in them.
- The loss is multiplied by the scale in float32 at least, not in its own dtype.
- The scale stays positive and finite. A NaN in aux does not count as overflow. Complex
  numbers are not made real. Each default state has its own buffers.
- A state from outside the function that JAX traces, which would be a constant, is an
  error.
"""

from ._jaxamp_amp import (
    amp as amp,
    amp_stop as amp_stop,
    default_amp_policy as default_amp_policy,
    use_compute_precision as use_compute_precision,
    use_original_precision as use_original_precision,
)
from ._jaxamp_scaler import (
    DynamicScalerState as DynamicScalerState,
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
)

# The release of jaxamp whose names these are.
__version__ = "0.0.4"
