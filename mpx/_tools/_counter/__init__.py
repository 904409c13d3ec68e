"""Compiles for a device without one, and counts in the compiled program.

In order of reading:

* `_targets`: the devices, with their peak rates and compilers.
* `_hlo`: reads the text of HLO.
* `_compile`: compiles for a device, without generating code.
* `_kernels`: kernels with their bytes and operations, collectives, memory.

This folder imports nothing else of mpx, and JAX only to compile: benchmarks load it by
its path if `mpx` is another package.
"""

from ._compile import Program as Program, program_of as program_of
from ._hlo import (
    COLLECTIVES as COLLECTIVES,
    RESULT_HOLDS_OPERANDS as RESULT_HOLDS_OPERANDS,
    ArrayType as ArrayType,
    Body as Body,
    Instruction as Instruction,
    Module as Module,
    parse as parse,
)
from ._kernels import (
    PALLAS as PALLAS,
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
