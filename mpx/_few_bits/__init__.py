"""The state of a training step in 8 and 16 bits.

Vocabulary: a *code* says how a number is stored (`_codes`); a *kind* is what is proved
of an array of a state from the program of its optimizer (`_kinds`, by the bounds of
`_intervals`); *low bits* are what bfloat16 leaves out of float32 (`_bits`).
"""

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
