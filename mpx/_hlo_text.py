"""Reading the text of an HLO module: computations, instructions, lines of code.

XLA prints a program in two states that matter here: as JAX *lowered* it (names without
`%`, called computations, relative operation names) and *optimized* (fusions, custom
calls, collectives, a schedule). One parser reads both.

Nothing of mpx is imported: benchmarks load this file by its path, beside `_counter`,
where `mpx` is another package of that name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

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
