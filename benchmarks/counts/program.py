"""What a compiled program needs: memory, traffic, floating point operations.

* **Memory** comes from the executable's own buffer assignment: arguments, results
  and temporaries, less the results that live in donated arguments. It is what the
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
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

# HLO's primitive types that are numbers (xla/xla_data.proto), with their bits.
_NUMBERS = re.compile(r"(?:b?f|s|u|c)(\d+)(?:e\d\w*)?")
_OTHERS = {"pred": 8, "token": 0, "opaque": 0}
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
# A layout's memory space; without one an array is in the device's main memory.
_ON_CHIP = re.compile(r"S\([1-9]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s.*->.*\{\s*$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")

# What lowering writes for arguments placed on one device: shardings over an empty mesh.
_ON_ONE_DEVICE = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\n *sdy\.mesh @empty_mesh = [^\n]*", ""),
        (r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^\]]*\]>(, )?", ""),
        (r", \}", "}"),
        (r" \{\}", ""),
    )
)

# Instructions that name or regroup buffers and move no bytes, and the second half of
# an asynchronous pair, whose first half has been counted.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "partition-id replica-id opt-barrier".split()
)
# Instructions whose result is a tuple that has the operand in it.
_RESULT_HOLDS_OPERANDS = frozenset(
    {"copy-start", "all-gather-start", "collective-permute-start"}
)


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
    sizes = _sizes(compiled)
    cost = compiled.cost_analysis() or {}
    text = compiled.as_text()
    if "bytes accessed" in cost:
        traffic, traffic_by = int(cost["bytes accessed"]), "cost analysis"
    else:
        traffic = operand_and_result_bytes(text)
        traffic_by = "operands and results"
    has_spaces = _ON_CHIP.search(text) is not None
    return Counts(
        memory=memory(compiled),
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        traffic=traffic,
        traffic_by=traffic_by,
        off_chip=operand_and_result_bytes(text, on_chip=False) if has_spaces else None,
        flops=int(cost["flops"]) if "flops" in cost else None,
    )


def memory(compiled: Any) -> int:
    """Bytes that a `jax.stages.Compiled` needs: see `Counts`."""
    sizes = _sizes(compiled)
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


def _sizes(compiled: Any) -> Any:
    sizes = compiled.memory_analysis()
    if sizes is None:
        raise RuntimeError(
            "`count(compiled)` needs an executable with a memory analysis; this "
            "backend gives none. Compile for one of "
            "`benchmarks.counts.targets.TARGETS`."
        )
    return sizes


_PRODUCTS = frozenset({"convolution", "dot", "ragged-dot"})
_PRODUCT_CALL = re.compile(r'custom_call_target="__cu(?:blas|dnn)')


def products(text: str) -> int:
    """How many matrix products and convolutions an optimized HLO module has.

    One in the body of a loop counts once.
    """
    return sum(
        instruction.opcode in _PRODUCTS
        or _PRODUCT_CALL.search(instruction.line) is not None
        for _, _, body in computations(text)
        for instruction in body
    )


def fingerprint(lowered: Any) -> str:
    """A short hash of the program before the compiler sees it.

    Source lines are not part of the text, so moving code does not change it. Nor is
    the placement on a single device, so that a program lowered for a platform without
    a device of it has the same hash.
    """
    text = _KERNEL.sub(_without_lines, lowered.as_text())
    for pattern, replacement in _ON_ONE_DEVICE:
        text = pattern.sub(replacement, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# A kernel of Pallas for Triton: a module as bytes, with source lines and paths in it.
_KERNEL = re.compile(r'\bir = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-9A-F]{2}|.)", re.DOTALL)


def _without_lines(found: re.Match[str]) -> str:
    """The kernel as text, which has none."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    def byte(escaped: re.Match[bytes]) -> bytes:
        code = escaped.group(1)
        return bytes.fromhex(code.decode()) if len(code) == 2 else code

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(_ESCAPED.sub(byte, found.group(1).encode())))


def bytes_of_shape(text: str, on_chip: bool = True) -> int:
    """Bytes of an HLO shape; a tuple's are those of its parts.

    Args:
        text: the shape with its layout.
        on_chip: whether arrays in the memory on the chip count.

    >>> bytes_of_shape("bf16[8,4]{1,0}"), bytes_of_shape("(f32[], pred[3]{0})")
    (64, 7)
    """
    total = 0
    for array in ARRAY.finditer(text):
        kind, dimensions, _ = array.groups()
        if not on_chip and _on_chip(array):
            continue
        sizes = (int(one.lstrip("<=")) for one in dimensions.split(",") if one)
        total += (math.prod(sizes) * bits_of(kind) + 7) // 8
    return total


def bits_of(kind: str) -> int:
    """Bits of an HLO type."""
    found = _NUMBERS.fullmatch(kind)
    if found is None and kind not in _OTHERS:
        raise ValueError(
            f"`bits_of(kind)` does not know the HLO type {kind!r}. Add it to `_OTHERS`."
        )
    return int(found[1]) if found else _OTHERS[kind]


def _on_chip(array: re.Match[str]) -> bool:
    return _ON_CHIP.search(array[3] or "") is not None


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def _closing(text: str, start: int) -> int:
    """Index after the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    return len(text)


def _instruction(line: str) -> Instruction | None:
    matched = _INSTRUCTION.match(line)
    if matched is None:
        return None
    rest = matched["rest"]
    # A tuple's shape has spaces and parentheses of its own (layouts too).
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    arguments = rest[opcode.end() - 1 : _closing(rest, opcode.end() - 1)]
    return Instruction(
        name=matched["name"],
        shape=rest[:end],
        opcode=opcode["opcode"],
        operands=tuple(_OPERAND.findall(arguments)),
        line=line,
    )


def computations(text: str) -> Iterator[tuple[str, bool, list[Instruction]]]:
    name, entry, body = "", False, None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None and body is None:
            name, entry, body = header["name"], bool(header["entry"]), []
        elif line.startswith("}") and body is not None:
            yield name, entry, body
            body = None
        elif body is not None:
            instruction = _instruction(line)
            if instruction is not None:
                body.append(instruction)


def bodies_of(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of an optimized HLO module by name, and which is the entry."""
    every = list(computations(text))
    entry = [name for name, is_entry, _ in every if is_entry]
    if not entry:
        raise ValueError(
            "`bodies_of(text)` needs an HLO module with an ENTRY computation; found "
            "none. Pass `compiled.as_text()`."
        )
    return {name: body for name, _, body in every}, entry[-1]


def operand_and_result_bytes(text: str, on_chip: bool = True) -> int:
    """Bytes that the kernels of an optimized HLO module read and write.

    Args:
        text: `compiled.as_text()`.
        on_chip: whether arrays in the memory on the chip count.
    """

    def size(instruction: Instruction, shapes: dict[str, str]) -> int:
        opcode = instruction.opcode
        if opcode == "slice-start":
            # Its shape is ((operand), result, context); what is read of the operand is
            # as large as the result.
            operand, result, *_ = ARRAY.finditer(instruction.shape)
            places = [x for x in (operand, result) if on_chip or not _on_chip(x)]
            return len(places) * bytes_of_shape(result[0])
        total = bytes_of_shape(instruction.shape, on_chip)
        if opcode in _RESULT_HOLDS_OPERANDS:
            return total
        operands = [shapes[one] for one in instruction.operands if one in shapes]
        return total + sum(bytes_of_shape(shape, on_chip) for shape in operands)

    bodies, entry = bodies_of(text)
    return sum(times * size(*run) for *run, times in runs(bodies, entry, size))


Run = tuple[Instruction, dict[str, str], int]


def runs(
    bodies: dict[str, list[Instruction]],
    name: str,
    size: Callable[[Instruction, dict[str, str]], int],
    times: int = 1,
) -> Iterator[Run]:
    """What runs as a kernel in a computation, with its body's shapes, and how often.

    Loops count as often as their known trip count (once where it is not known), a
    conditional counts the branch that is largest by `size`.
    """
    shapes = {instruction.name: instruction.shape for instruction in bodies[name]}
    for instruction in bodies[name]:
        opcode, line = instruction.opcode, instruction.line
        if opcode in FREE or opcode.endswith("-done"):
            continue
        if opcode == "conditional":
            branches = called(line, "branch_computations") or [
                *called(line, "true_computation"),
                *called(line, "false_computation"),
            ]
            every = [list(runs(bodies, one, size, times)) for one in branches]
            yield from max(
                every, key=lambda one: sum(n * size(*run) for *run, n in one)
            )
        elif opcode in _INSIDE:
            trips = TRIPS.search(line) if opcode == "while" else None
            inner = times * (int(trips[1]) if trips else 1)
            for one in called(line, _INSIDE[opcode]):
                yield from runs(bodies, one, size, inner)
        else:
            yield instruction, shapes, times


_INSIDE = {"while": "body", "call": "to_apply", "async-start": "calls"}


def called(line: str, key: str) -> list[str]:
    """Names of the computations in `key=%name` or `key={%name, %name}`."""
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", line)
    if found is None:
        return []
    return [name.strip().lstrip("%") for name in found[1].strip("{}").split(",")]
