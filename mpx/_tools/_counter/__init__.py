"""Compiles for a device without one, and counts in the compiled program.

In order of reading:

* `_targets`: the devices, with their peak rates and compilers.
* `_hlo`: reads the text of HLO.
* `_kernels`: kernels with their bytes and operations, collectives, memory.

This folder imports nothing else of mpx, and JAX only to compile: benchmarks load it by
its path if `mpx` is another package.
"""

from ._hlo import (
    ArrayType,
    Instruction,
    Module,
    bodies_of,
    bytes_of_shape,
    frames_of,
    parse,
)
from ._kernels import Kernel, kernels_of, memory, messages
from ._targets import CUDA_OPTIONS, TARGETS, Device, Roof, compile_only_devices
