"""The state of a training step in 8 and 16 bits.

Vocabulary: a *code* says how a number is stored (`_codes`); a *kind* is what is proved
of an array of a state from the program of its optimizer (`_kinds`, by the bounds of
`_intervals`); *low bits* are what bfloat16 leaves out of float32 (`_bits`).
"""

from ._codes import CompressedArray
from ._compress_state import compress_state, full_state
from ._init_optimizer import init_optimizer, layouts_of
from ._master_weights import full_weights, master_weights
from ._state_bytes import StateBytes, state_bytes
