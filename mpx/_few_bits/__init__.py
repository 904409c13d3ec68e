"""State of a training step in 8 and 16 bits."""

from ._array import CompressedArray as CompressedArray
from ._compress_state import (
    CompressedState as CompressedState,
    compress_state as compress_state,
    full_state as full_state,
)
from ._small_weights import (
    SmallWeights as SmallWeights,
    SmallWeightsState as SmallWeightsState,
    full_weight as full_weight,
)
