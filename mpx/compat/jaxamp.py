"""jaxamp's names and signatures on top of mpx: `import mpx.compat.jaxamp as jaxamp`."""

from ._jaxamp_scaler import (
    DynamicScalerState as DynamicScalerState,
    dynamic_scale_grad as dynamic_scale_grad,
    dynamic_scale_tx as dynamic_scale_tx,
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
)
