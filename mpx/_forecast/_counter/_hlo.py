"""Reading the text of an optimized HLO module: computations and what runs in them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

# HLO's primitive types that are numbers (xla/xla_data.proto), with their bits.
_NUMBERS = re.compile(r"(?:b?f|s|u|c)(\d+)(?:e\d\w*)?")
_OTHERS = {"pred": 8, "token": 0, "opaque": 0}
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
# A layout's memory space; without one an array is in the device's main memory.
ON_CHIP = re.compile(r"S\([1-9]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s.*->.*\{\s*$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_PARENTHESIS = re.compile(r"[()]")
TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")

# Instructions that name or regroup buffers and move no bytes, and the second half of
# an asynchronous pair, whose first half has been counted.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "partition-id replica-id opt-barrier".split()
)


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
        if not on_chip and is_on_chip(array):
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


def is_on_chip(array: re.Match[str]) -> bool:
    """Whether an array, as `ARRAY` finds it, is in the memory on the chip."""
    return ON_CHIP.search(array[3] or "") is not None


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
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
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
    """Name, whether it is the entry, and instructions of each computation."""
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
                every, key=lambda one: sum(n * size(i, s) for i, s, n in one)
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


# --- Lines of code --------------------------------------------------------------------

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NUMBER = {
    name: re.compile(rf"\b{name}=(\d+)")
    for name in ("file_name_id", "function_name_id", "line")
    + ("file_location_id", "parent_frame_id")
}


def frames_of(text: str) -> dict[int, list[tuple[str, str, int]]]:
    """File, function and line of each stack frame and its callers, innermost first."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if line.strip() in tables:
            table = tables[line.strip()]
        elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
            table[int(row[1])] = row[2]
        elif table is not None and tables["StackFrames"]:
            break
    files, functions, locations, frames = tables.values()

    def number(row: str, name: str) -> int:
        found = _NUMBER[name].search(row)
        return int(found[1]) if found else 0

    # jaxlib 0.10 writes 1 more than a parent's number, so the first is its own.
    shift = int(number(frames.get(1, ""), "parent_frame_id") == 1)
    chains: dict[int, list[tuple[str, str, int]]] = {}
    for one in frames:
        chain, at, seen = [], one, set()
        while at in frames and at not in seen:
            seen.add(at)
            place = locations.get(number(frames[at], "file_location_id"), "")
            file = files.get(number(place, "file_name_id"), "").strip('"')
            function = functions.get(number(place, "function_name_id"), "").strip('"')
            chain.append((file, function, number(place, "line")))
            at = number(frames[at], "parent_frame_id") - shift
        chains[one] = chain
    return chains
