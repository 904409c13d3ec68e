"""Reading the text of an HLO module: computations, instructions, lines of code.

XLA prints a program in two states that matter here: as JAX *lowered* it (names without
`%`, called computations, relative operation names) and *optimized* (fusions, custom
calls, collectives, a schedule). One parser reads both.

Nothing of mpx is imported: benchmarks load this folder by its path, where `mpx` is
another package of that name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)(\s.*->.*)?\s*\{$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"([\w.\-]+)$")
_MARKED_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_WIDTHS = {"s": "int", "u": "uint", "f": "float", "c": "complex"}


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """An array's dtype, by numpy's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bits(self) -> int:
        """The bits of all elements; none for tokens."""
        width = re.match(r"[a-z]+(\d+)", self.dtype)
        each = 8 if self.dtype == "bool" else int(width[1]) if width else 0
        return each * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Its name, without `%`.
        shape: The type of its result, as it is written; a tuple's in parentheses.
        opcode: What it does.
        operands: Names of its operands.
        line: The line of text.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @functools.cached_property
    def results(self) -> tuple[ArrayType, ...]:
        """The arrays of its result."""
        return arrays_of(self.shape)

    @property
    def op_name(self) -> str:
        """The path of scopes and transforms that JAX wrote, or the empty text."""
        found = _OP_NAME.search(self.line)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls; the empty text for other instructions."""
        found = _TARGET.search(self.line)
        return found[1] if found else ""

    @property
    def frame(self) -> int:
        """The number of the stack frame that its line of code is in; 0 without one."""
        found = _FRAME.search(self.line)
        return int(found[1]) if found else 0

    @property
    def trips(self) -> int | None:
        """How often the compiler says that a loop runs."""
        found = _TRIPS.search(self.line)
        return int(found[1]) if found else None

    def attribute(self, key: str) -> str:
        """The text of `key=...`, without braces; empty where there is none."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|[^\s,]+)", self.line)
        return found[1].strip("{}") if found else ""

    def called(self, key: str) -> list[str]:
        """Names of the computations in `key=name` or `key={name, name}`."""
        names = self.attribute(key).split(",")
        return [name.strip().lstrip("%") for name in names if name.strip()]


def arrays_of(text: str) -> tuple[ArrayType, ...]:
    """The arrays of a type, a tuple's parts one after the other.

    >>> [str(array) for array in arrays_of("(bf16[8,4]{1,0}, f8e4m3fn[], pred[3])")]
    ['bfloat16[8,4]', 'float8_e4m3fn[]', 'bool[3]']
    """
    return tuple(
        ArrayType(_dtype(kind), tuple(int(x) for x in re.findall(r"\d+", sizes)))
        for kind, sizes in _ARRAY.findall(text)
    )


def _dtype(kind: str) -> str:
    """Numpy's name of an HLO type."""
    if kind in ("pred", "bf16"):
        return {"pred": "bool", "bf16": "bfloat16"}[kind]
    matched = re.fullmatch(r"([sufc])(\d+)(e\w+)?", kind)
    if matched is None:
        return kind
    family, width, variant = matched.groups()
    return _WIDTHS[family] + width + (f"_{variant}" if variant else "")


def computations(text: str) -> Iterator[tuple[str, bool, list[Instruction]]]:
    """Name, whether it is the entry, and instructions of each computation."""
    name, is_entry, body = "", False, None
    for line in text.splitlines():
        if body is None:
            header = _COMPUTATION.match(line)
            if header is not None:
                name, is_entry, body = header["name"], bool(header["entry"]), []
        elif line.startswith("}"):
            yield name, is_entry, body
            body = None
        elif (instruction := _instruction(line)) is not None:
            body.append(instruction)


def _instruction(line: str) -> Instruction | None:
    matched = _INSTRUCTION.match(line)
    if matched is None:
        return None
    rest = matched["rest"]
    # A tuple's type has spaces and parentheses of its own (layouts too).
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    arguments = rest[opcode.end() : _closing(rest, opcode.end() - 1) - 1]
    return Instruction(
        matched["name"], rest[:end], opcode["opcode"], _names(arguments, line), line
    )


def _names(arguments: str, line: str) -> tuple[str, ...]:
    """The operands of an instruction; in optimized text all names have a mark."""
    if "%" in line:
        return tuple(_MARKED_NAME.findall(arguments))
    # Commas inside of a type's brackets and braces separate no operands.
    flat = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "", arguments)
    names = (_NAME.search(part.strip()) for part in flat.split(","))
    return tuple(name[1] for name in names if name is not None)


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


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


# ----------------------------------------------------------------------------
# The kernels of an optimized HLO module, in the order and as often as they run.

# HLO's primitive types that are numbers (xla/xla_data.proto), with their bits.
_NUMBERS = re.compile(r"(?:b?f|s|u|c)(\d+)(?:e\d\w*)?")
_OTHERS = {"pred": 8, "token": 0, "opaque": 0}
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
# A layout's memory space; without one an array is in the device's main memory.
ON_CHIP = re.compile(r"S\([1-9]")

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
            f"`kind` of `bits_of(kind)` must be a known HLO type; got {kind!r}. Add "
            "it to `_OTHERS`."
        )
    return int(found[1]) if found else _OTHERS[kind]


def is_on_chip(array: re.Match[str]) -> bool:
    """Whether an array, as `ARRAY` finds it, is in the memory on the chip."""
    return ON_CHIP.search(array[3] or "") is not None


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
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith("-done"):
            continue
        if opcode == "conditional":
            branches = instruction.called("branch_computations") or [
                *instruction.called("true_computation"),
                *instruction.called("false_computation"),
            ]
            every = [list(runs(bodies, one, size, times)) for one in branches]
            yield from max(
                every, key=lambda one: sum(n * size(i, s) for i, s, n in one)
            )
        elif opcode in _INSIDE:
            trips = instruction.trips if opcode == "while" else None
            inner = times * (1 if trips is None else trips)
            for one in instruction.called(_INSIDE[opcode]):
                yield from runs(bodies, one, size, inner)
        else:
            yield instruction, shapes, times


_INSIDE = {"while": "body", "call": "to_apply", "async-start": "calls"}


# ----------------------------------------------------------------------------
# A compiled program as `mpx.expect` reads it: its instructions and their lines.


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module.

    Attributes:
        header: Its first line.
        entry: The name of the computation that runs.
        computations: Instructions by the name of the computation.
        text: All of it.
    """

    header: str
    entry: str
    computations: dict[str, list[Instruction]]
    text: str = dataclasses.field(repr=False)

    @functools.cached_property
    def frames(self) -> dict[int, list[tuple[str, str, int]]]:
        """File, function and line of each stack frame and its callers."""
        return frames_of(self.text)

    @functools.cached_property
    def fusions(self) -> dict[str, Instruction]:
        """The instruction that runs a computation as its body, by its name."""
        return {
            called: instruction
            for body in self.computations.values()
            for instruction in body
            for called in instruction.called("calls")
        }

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The arguments of the program, by number."""
        return {
            int(number[1]): instruction
            for instruction in self.computations[self.entry]
            if (number := re.search(r" parameter\((\d+)\)", instruction.line))
        }

    @property
    def aliased(self) -> set[int]:
        """The numbers of the arguments whose buffers hold a result."""
        found = re.search(r"input_output_alias=\{((?:[^{}]|\{[^}]*\})*)\}", self.header)
        pairs = re.findall(r":\s*\((\d+),", found[1]) if found else []
        return {int(number) for number in pairs}


def parse(text: str) -> Module:
    """Reads a module.

    Raises:
        ValueError: The text has no entry computation.
    """
    every = list(computations(text))
    entries = [name for name, is_entry, _ in every if is_entry]
    if not entries:
        raise ValueError(
            "The text of a compiled program must have an ENTRY computation; found "
            f"none in {text[:80]!r}. `mpx.expect` reads what XLA compiled."
        )
    header = re.search(r"^HloModule.*$", text, re.MULTILINE)
    return Module(
        header[0] if header else "",
        entries[-1],
        {name: body for name, _, body in every},
        text,
    )
