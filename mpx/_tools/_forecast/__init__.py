"""What a training step would need and gain, on hardware that is not there."""

from ._forecast import forecast
