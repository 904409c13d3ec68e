"""Compiling for a device that is not there, and counting in what comes out.

Nothing here imports the rest of mpx, nor JAX before it is asked to compile: benchmarks
load this folder by its path where `mpx` is another package of that name.
"""

from ._hlo import (
    COLLECTIVES as COLLECTIVES,
    RESULT_HOLDS_OPERANDS as RESULT_HOLDS_OPERANDS,
    ArrayType as ArrayType,
    Instruction as Instruction,
    Module as Module,
    bytes_of_shape as bytes_of_shape,
    computations as computations,
    parse as parse,
)
from ._kernels import (
    Kernel as Kernel,
    Message as Message,
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
