"""What a compiled program needs: memory, traffic, floating point operations.

* **Memory** comes from the executable's own buffer assignment: arguments, results
  and temporaries, less the results that are in donated arguments. It is what the
  step holds on the device at its worst moment.
* **Traffic** is the bytes read and written by the program's operations. Where the
  compiler has a cost analysis (TPU, CPU) its "bytes accessed" is taken. Where it
  has none (CUDA), the operands and results of every instruction of the optimized
  HLO that runs as a kernel are added up: what happens inside a fusion stays in
  registers and does not count, a loop's body counts as often as the loop runs.
* **Off-chip traffic** (TPU) is the second way of counting with only the arrays in the
  device's main memory. A TPU's compiler places arrays in the memory on the chip and
  copies them there ahead of time; "bytes accessed" counts each such copy as further
  traffic: a read, a write, and the read of the copy.

Sharp edges: neither knows of caches, so traffic is a bound and not a measurement,
and the two ways of counting must not be compared with each other. "bytes accessed"
counts a loop's body once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..counter import counter


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of one compiled program, per device, in bytes (and `flops`).

    Attributes:
        memory: arguments + results - aliased + temporaries.
        arguments: bytes of all arguments.
        temporaries: bytes of the scratch buffer.
        aliased: bytes of the results that live in donated arguments.
        traffic: bytes read and written.
        traffic_by: `"cost analysis"` or `"operands and results"`.
        off_chip: bytes that cross the chip's edge; None where the compiler does not
            say what is on the chip.
        flops: floating point operations; None where the compiler does not say.
    """

    memory: int
    arguments: int
    temporaries: int
    aliased: int
    traffic: int
    traffic_by: str
    off_chip: int | None
    flops: int | None


def count(compiled: Any) -> Counts:
    """Counts of a `jax.stages.Compiled`."""
    sizes = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    text = compiled.as_text()
    if "bytes accessed" in cost:
        traffic, traffic_by = int(cost["bytes accessed"]), "cost analysis"
    else:
        traffic = operand_and_result_bytes(text)
        traffic_by = "operands and results"
    has_spaces = counter.ON_CHIP.search(text) is not None
    return Counts(
        memory=counter.memory(compiled),
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        traffic=traffic,
        traffic_by=traffic_by,
        off_chip=operand_and_result_bytes(text, on_chip=False) if has_spaces else None,
        flops=int(cost["flops"]) if "flops" in cost else None,
    )


# Instructions whose result is a tuple that has the operand in it.
_RESULT_HOLDS_OPERANDS = frozenset(
    {"copy-start", "all-gather-start", "collective-permute-start"}
)


def operand_and_result_bytes(text: str, on_chip: bool = True) -> int:
    """Bytes that the kernels of an optimized HLO module read and write.

    Args:
        text: `compiled.as_text()`.
        on_chip: whether arrays in the memory on the chip count.
    """

    def size(instruction: Any, shapes: dict[str, str]) -> int:
        opcode = instruction.opcode
        if opcode == "slice-start":
            # Its shape is ((operand), result, context); what is read of the operand is
            # as large as the result.
            operand, result, *_ = counter.ARRAY.finditer(instruction.shape)
            places = [
                x for x in (operand, result) if on_chip or not counter.is_on_chip(x)
            ]
            return len(places) * counter.bytes_of_shape(result[0])
        total = counter.bytes_of_shape(instruction.shape, on_chip)
        if opcode in _RESULT_HOLDS_OPERANDS:
            return total
        operands = [shapes[one] for one in instruction.operands if one in shapes]
        return total + sum(counter.bytes_of_shape(shape, on_chip) for shape in operands)

    bodies, entry = counter.bodies_of(text)
    return sum(times * size(*run) for *run, times in counter.runs(bodies, entry, size))
