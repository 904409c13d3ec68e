"""Compiling for a device that is not there, and counting in what comes out.

Nothing here imports the rest of mpx but `_hlo_text.py`, nor JAX before it is asked to
compile: benchmarks load this folder by its path where `mpx` is another package of that
name.
"""

from .._hlo_text import (
    Instruction as Instruction,
    computations as computations,
    frames_of as frames_of,
)
from ._hlo import (
    bodies_of as bodies_of,
    bytes_of_shape as bytes_of_shape,
    runs as runs,
)
from ._kernels import (
    Kernel as Kernel,
    kernels_of as kernels_of,
    of_few_bits as of_few_bits,
    roof_seconds as roof_seconds,
    traffic as traffic,
)
from ._memory import memory as memory
from ._messages import Message as Message, messages as messages
from ._targets import (
    CUDA_OPTIONS as CUDA_OPTIONS,
    TARGETS as TARGETS,
    Roof as Roof,
    Target as Target,
    compile_only_devices as compile_only_devices,
    why_missing as why_missing,
)
