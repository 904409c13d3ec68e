"""Memory between training steps: master weights, optimizer state in 8 and 16 bits.

In order of reading:

- `_codes`: an array in 8 or 16 bits (`CompressedArray`). A *code* is how a number is
  stored; *low bits* are the 16 bits that bfloat16 omits from float32.
- `_intervals`: the *kind* of each array of a state (never negative, a sum, a copy of
  the weights), proved from the optimizer's program.
- `_compress_state`: an Optax transformation whose state is stored in these codes.
- `_small_weights`: bfloat16 weights with 16, 8 or no low bits beside them.
- `_master_weights`: `master_weights` with float32 masters, and `full_weights`.
- `_init_optimizer`: a state that is sharded as the weights are.
- `_state_bytes`: the bytes of weights and state, by part.
"""

from ._codes import CompressedArray
from ._compress_state import compress_state, full_state
from ._init_optimizer import init_optimizer, layouts_of
from ._master_weights import full_weights, master_weights
from ._state_bytes import StateBytes, state_bytes
