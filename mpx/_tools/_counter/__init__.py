"""Compiling for a device that is not there, and counting in what comes out.

Nothing here imports the rest of mpx but `_tools/_counter/_hlo.py`, nor JAX before it is
asked to
compile: benchmarks load this folder by its path where `mpx` is another package of that
name.
"""

from ._hlo import (
    ArrayType,
    Instruction,
    Module,
    bodies_of,
    bytes_of_shape,
    computations,
    frames_of,
    parse,
    runs,
)
from ._kernels import (
    Kernel,
    kernels_of,
    memory,
    messages,
    of_few_bits,
    roof_seconds,
    traffic,
)
from ._targets import CUDA_OPTIONS, TARGETS, Device, Roof, compile_only_devices
