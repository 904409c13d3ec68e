"""Compiling for a device that is not there, and counting in what comes out.

Nothing here imports the rest of mpx, nor JAX before it is asked to compile: benchmarks
load this folder by its path where `mpx` is another package of that name.
"""

from ._hlo import (
    ArrayType as ArrayType,
    Instruction as Instruction,
    Module as Module,
    bodies_of as bodies_of,
    bytes_of_shape as bytes_of_shape,
    computations as computations,
    frames_of as frames_of,
    parse as parse,
    runs as runs,
)
from ._kernels import (
    Kernel as Kernel,
    kernels_of as kernels_of,
    memory as memory,
    messages as messages,
    of_few_bits as of_few_bits,
    roof_seconds as roof_seconds,
    traffic as traffic,
)
from ._targets import (
    CUDA_OPTIONS as CUDA_OPTIONS,
    TARGETS as TARGETS,
    Device as Device,
    Roof as Roof,
    compile_only_devices as compile_only_devices,
    why_missing as why_missing,
)
