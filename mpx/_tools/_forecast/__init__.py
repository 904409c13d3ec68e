"""Estimates memory and time of a training step on a device, without it.

In order of reading:

* `_steps`: the step that is compiled, given or made of a loss and an optimizer.
* `_estimate`: compiles it for a target and counts: memory, traffic, time.
* `_forecast_report`: the data of a report; rules for matmuls that lose by quantizing.
* `_forecast`: `mpx.forecast`, and the search for the largest batch.
* `_forecast_views`: the report as text, HTML, SVG and JSON.
"""

from ._forecast import forecast as forecast
from ._forecast_report import (
    Constant as Constant,
    Estimate as Estimate,
    KernelGroup as KernelGroup,
    Matmul as Matmul,
)
from ._forecast_views import Forecast as Forecast
