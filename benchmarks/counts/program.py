"""What a compiled program needs: memory and traffic, per device.

* **Memory** comes from the executable's own buffer assignment: arguments, results
  and temporaries, less the results that are in donated arguments. It is what the
  step holds on the device at its worst moment.
* **Traffic** is the bytes read and written by the program's operations: the operands
  and results of every instruction of the optimized HLO that runs as a kernel. What
  happens inside a fusion stays in registers and does not count, a loop's body counts
  as often as the loop runs. Of a TPU both memories count as one: small models are in
  the one on the chip, as the compiler places them. A CPU's is its "bytes accessed",
  with a loop's body once.

Sharp edges: none knows of caches, so traffic is a bound and not a measurement, and
counts of different compilers must not be compared with each other.
"""

from __future__ import annotations

import re
from typing import Any

from ..counter import TARGETS, counter


def compile(lowered: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The program, for a TPU without its machine code, and nothing beside."""
    target = TARGETS[fields["target"]]
    if target.platform != "tpu":
        return lowered.compile(), {}
    devices = counter.compile_only_devices(target, fields.get("devices", 1))
    return counter.program_of(lowered, target, devices), {}


def text_of(compiled: Any) -> str:
    """The optimized HLO of what `compile` returns."""
    return getattr(compiled, "text", "") or compiled.as_text()


# Between the memories of a TPU.
_COPY = re.compile(r"^.* (?:copy|slice|async)-start\(.*$", re.MULTILINE)


def anywhere(text: str) -> str:
    """The program of a TPU as if it had one memory, and so no copy to another."""
    return re.sub(r"S\(\d\)", "", _COPY.sub("", text))


def count(compiled: Any, fields: dict[str, Any]) -> dict[str, int]:
    """Bytes of what `compile` returns: memory, the scratch buffer of it, traffic."""
    if isinstance(compiled, counter.Program):
        return {
            "memory": compiled.memory,
            "temporaries": compiled.temporaries,
            "traffic": counter.traffic(counter.kernels_of(anywhere(compiled.text))),
        }
    known = (compiled.cost_analysis() or {}).get("bytes accessed")
    if known is None:
        known = operand_and_result_bytes(compiled.as_text())
    return {
        "memory": counter.memory(compiled),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "traffic": int(known),
    }


def operand_and_result_bytes(text: str) -> int:
    """Bytes that the kernels of an optimized HLO module read and write."""

    def size(instruction: Any, body: dict[str, Any]) -> int:
        if instruction.opcode in counter.RESULT_HOLDS_OPERANDS:
            return instruction.bytes
        operands = (body[one] for one in instruction.operands if one in body)
        return instruction.bytes + sum(one.bytes for one in operands)

    return sum(times * size(*run) for *run, times in counter.parse(text).kernels(size))
