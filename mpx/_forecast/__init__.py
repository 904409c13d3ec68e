"""What a training step would need and gain, on hardware that is not there."""

from ._forecast import forecast as forecast
from ._report import (
    Constant as Constant,
    Estimate as Estimate,
    KernelGroup as KernelGroup,
    Matmul as Matmul,
)
from ._views import Forecast as Forecast
