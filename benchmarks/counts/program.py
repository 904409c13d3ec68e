"""What a compiled program needs: memory and traffic, per device.

* **Memory**: arguments, results and temporaries, less the results that are in donated
  arguments, by the executable's own buffer assignment.
* **Traffic**: the compiler's "bytes accessed" (TPU, CPU), which counts a loop's body
  once. Where it has none (CUDA), operands and results of all kernels, loops by their
  turns. Neither knows of caches, and the two must not be compared.
"""

from __future__ import annotations

from typing import Any

from ..counter import counter


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, int]:
    """Bytes of a `jax.stages.Compiled`: memory, the scratch buffer of it, traffic."""
    del fields
    cost = compiled.cost_analysis() or {}
    known = cost.get("bytes accessed")
    return {
        "memory": counter.memory(compiled),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "traffic": operand_and_result_bytes(compiled.as_text())
        if known is None
        else int(known),
    }


def operand_and_result_bytes(text: str) -> int:
    """Bytes that the kernels of an optimized HLO module read and write."""

    def size(instruction: Any, shapes: dict[str, str]) -> int:
        total = counter.bytes_of_shape(instruction.shape)
        if instruction.opcode in counter.RESULT_HOLDS_OPERANDS:
            return total
        operands = [shapes[one] for one in instruction.operands if one in shapes]
        return total + sum(map(counter.bytes_of_shape, operands))

    kernels = counter.parse(text).kernels(size)
    return sum(times * size(*run) for *run, times in kernels)
