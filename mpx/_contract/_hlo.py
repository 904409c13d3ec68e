"""Reading the text of an HLO module: computations, instructions, source lines.

XLA prints a program in two states that matter here: as JAX *lowered* it (names without
`%`, called computations, relative operation names) and *optimized* (fusions, custom
calls, collectives, a schedule). One parser reads both.

`benchmarks/counts/program.py` reads such text on its own: it also runs where `mpx` is
the published package of that name, and can import nothing from here.
"""

import dataclasses
import functools
import math
import re
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)(\s.*->.*)?\s*\{$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")

_WIDTHS = {"s": "int", "u": "uint", "f": "float", "c": "complex"}
# Where operations come from that no line of the user's wrote: the call of `lower`.
_LOWERS = str(Path(__file__).with_name("_program.py"))
_TABLES = ("FileNames", "FileLocations", "StackFrames")


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
        type_text: The type of its result, as it is written; a tuple's in parentheses.
        opcode: What it does.
        operands: Names of its operands.
        line: The line of text.
    """

    name: str
    type_text: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @functools.cached_property
    def results(self) -> tuple[ArrayType, ...]:
        """The arrays of its result."""
        return arrays_of(self.type_text)

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

    def attribute(self, key: str) -> str:
        """The text of `key=...`, without braces; empty where there is none."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|[^\s,]+)", self.line)
        return found[1].strip("{}") if found else ""

    def called(self, key: str) -> list[str]:
        """Names of the computations in `key=name` or `key={name, name}`."""
        names = self.attribute(key).split(",")
        return [name.strip().lstrip("%") for name in names if name.strip()]

    @property
    def trips(self) -> int | None:
        """How often the compiler says that a loop runs."""
        found = _TRIPS.search(self.line)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module.

    Attributes:
        header: Its first line.
        entry: The name of the computation that runs.
        computations: Instructions by the name of the computation.
        sources: `file:line` by the number of the stack frame.
    """

    header: str
    entry: str
    computations: dict[str, list[Instruction]]
    sources: dict[int, str]

    def source(self, instruction: Instruction) -> str:
        """The line of the user's code, or the empty text where it is not known."""
        frame = _FRAME.search(instruction.line)
        if frame is not None:
            return self.sources.get(int(frame[1]), "")
        source = _SOURCE.search(instruction.line)
        return f"{source[1]}:{source[2]}" if source else ""

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


def parse(text: str) -> Module:
    """Reads a module.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    header, entry, table, body = "", "", None, None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif body is None and (found := _COMPUTATION.match(line)) is not None:
            body = computations.setdefault(found["name"], [])
            entry = found["name"] if found["entry"] else entry
        elif body is not None and line.startswith("}"):
            body = None
        elif body is not None:
            instruction = _instruction(line)
            if instruction is not None:
                body.append(instruction)
        elif line.strip() in tables:
            table = tables[line.strip()]
        elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
            table[int(row[1])] = row[2]
        else:
            table = None
    if not entry:
        raise ValueError(
            "The text of a compiled program must have an ENTRY computation; found "
            f"none in {text[:80]!r}. `mpx.expect` reads what XLA compiled."
        )
    return Module(header, entry, computations, _sources(tables))


def _sources(tables: dict[str, dict[int, str]]) -> dict[int, str]:
    files, locations, frames = (tables[name] for name in _TABLES)
    lines = {}
    for number, text in locations.items():
        found = re.search(r"file_name_id=(\d+).*? line=(\d+)", text)
        if found is not None:
            file = files.get(int(found[1]), "").strip('"')
            lines[number] = f"{file}:{found[2]}"
    sources = {}
    for number, text in frames.items():
        found = re.search(r"file_location_id=(\d+)", text)
        line = lines.get(int(found[1]), "") if found else ""
        if line and not line.startswith(_LOWERS):
            sources[number] = line
    return sources


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


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
    # Commas inside of a type's brackets and braces separate no operands.
    flat = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "", arguments)
    names = (_NAME.search(part.strip()) for part in flat.split(","))
    return Instruction(
        name=matched["name"],
        type_text=rest[:end],
        opcode=opcode["opcode"],
        operands=tuple(name[1] for name in names if name is not None),
        line=line,
    )
