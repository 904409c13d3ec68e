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
import operator
import re
from collections.abc import Callable, Iterator

_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*(?P<rest>.*)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)(\s.*->.*)?\s*\{$")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"([\w.\-]+)$")
_MARKED_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_LOOP = {"while": ("body",), "call": ("to_apply",), "async-start": ("calls",)}
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
# The computations that an instruction runs, by the names of its attributes.
_RUN = _LOOP | {"fusion": ("calls",), "conditional": _BRANCHES}
# Instructions that name or regroup buffers: they move no bytes, and make no array.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency "
    "partition-id replica-id opt-barrier".split()
)
COLLECTIVES = tuple(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all "
    "collective-permute collective-broadcast".split()
)
RESULT_HOLDS_OPERANDS = ("copy-start", "all-gather-start", "collective-permute-start")
"""Instructions whose result is a tuple that includes the operand."""

# HLO's primitive types that are numbers (xla/xla_data.proto), with their bits.
_NUMBERS = re.compile(r"(b?f|s|u|c)(\d+)(e\d\w*)?")
_OTHERS = {"pred": 8, "token": 0, "opaque": 0}
_NUMPY = {"s": "int", "u": "uint", "f": "float", "c": "complex", "bf": "bfloat"}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
# A layout's memory space; without one an array is in the device's main memory.
_ON_CHIP = re.compile(r"S\([1-9]")


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """An array's type.

    Attributes:
        kind: Its dtype, by HLO's name.
        shape: Its shape.
        is_on_chip: Whether it is in the memory on the chip.
    """

    kind: str
    shape: tuple[int, ...]
    is_on_chip: bool = False

    @property
    def dtype(self) -> str:
        """Returns NumPy's name of the dtype."""
        found = _NUMBERS.fullmatch(self.kind)
        if found is None:
            return "bool" if self.kind == "pred" else self.kind
        family, width, variant = found.groups()
        return _NUMPY[family] + width + (f"_{variant}" if variant else "")

    @property
    def bits_each(self) -> int:
        """Returns the bits of an element; 0 for tokens."""
        found = _NUMBERS.fullmatch(self.kind)
        if found is None and self.kind not in _OTHERS:
            raise ValueError(
                f"The text of a compiled program must have known HLO types; got "
                f"{self.kind!r}. Add it to `_OTHERS`."
            )
        return int(found[2]) if found else _OTHERS[self.kind]

    @property
    def bits(self) -> int:
        """Returns the bits of all elements."""
        return self.bits_each * math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Returns the bytes of all elements."""
        return (self.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@functools.lru_cache(4096)
def arrays_of(text: str) -> tuple[ArrayType, ...]:
    """Returns the arrays of a type; of a tuple, those of each part in order.

    >>> [str(array) for array in arrays_of("(bf16[8,4]{1,0}, f8e4m3fn[], pred[3])")]
    ['bfloat16[8,4]', 'float8_e4m3fn[]', 'bool[3]']
    """
    found = []
    for kind, sizes, layout in _ARRAY.findall(text):
        shape = tuple(map(int, re.findall(r"\d+", sizes)))
        found.append(ArrayType(kind, shape, _ON_CHIP.search(layout) is not None))
    return tuple(found)


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
    def bytes(self) -> int:
        """The bytes of its result; of a tuple, the sum of its parts."""
        return sum(array.bytes for array in self.results)

    @property
    def main_bytes(self) -> int:
        """The bytes of its result that are in the main memory."""
        return sum(array.bytes for array in self.results if not array.is_on_chip)

    @property
    def size(self) -> int:
        """The count of numbers in the first array of its result."""
        return math.prod(self.results[0].shape) if self.results else 1

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

    @property
    def number(self) -> int:
        """Returns the position of a parameter among the arguments."""
        return int(self.line.partition("parameter(")[2].partition(")")[0])

    def attribute(self, key: str) -> str:
        """The text of `key=...`, without braces; empty where there is none."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|[^\s,]+)", self.line)
        return found[1].strip("{}") if found else ""

    def called(self, key: str) -> list[str]:
        """Names of the computations in `key=name` or `key={name, name}`."""
        names = self.attribute(key).split(",")
        return [name.strip().lstrip("%") for name in names if name.strip()]

    @property
    def runs(self) -> list[str]:
        """Returns the computations that it runs; of a conditional all branches."""
        return [x for key in _RUN.get(self.opcode, ()) for x in self.called(key)]

    @property
    def makes_nothing(self) -> bool:
        """Returns whether it moves no bytes, or its first half was counted instead."""
        return self.opcode in _FREE or self.opcode.endswith("-done")

    def collective(self, home: str) -> str:
        """Returns the kind of collective, in a computation; "" if it is not one."""
        kind = self.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return ""
        # As a TPU's compiler writes it.
        return "reduce-scatter" if home.startswith("all-reduce-scatter") else kind


Body = dict[str, Instruction]
"""The instructions of a computation by name, in the order of the text."""


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


# --- Scalars --------------------------------------------------------------------------

# Returns a parameter, or a part of a tuple that is the only one, by number.
Read = Callable[[int], int | None]
_MOST_TRIPS = 65536
_COPIES = ("copy", "bitcast", "convert", "reshape")
_ARITHMETIC = {"add": "add", "subtract": "sub", "multiply": "mul", "and": "and_"}
_LITERAL = re.compile(r"\bconstant\((-?\d+|true|false)\)")
_INDEX = re.compile(r"\bindex=(\d+)")


def _trips(loop: Instruction, home: Body, bodies: dict[str, Body]) -> int | None:
    """Returns how often a loop runs, by its counter; None if that is unknown."""
    condition, body = (bodies[loop.called(x)[0]] for x in ("condition", "body"))
    start, after = home.get(loop.operands[0]), _root(body)
    if start is None or {start.opcode, after.opcode} != {"tuple"}:
        return None

    @functools.cache
    def part(turn: int, index: int) -> int | None:
        if not turn:
            return _scalar(start.operands[index], home, lambda _: None, bodies)
        before = functools.partial(part, turn - 1)
        return _scalar(after.operands[index], body, before, bodies)

    root = _root(condition).name
    for turn in range(_MOST_TRIPS):
        goes_on = _scalar(root, condition, functools.partial(part, turn), bodies)
        if not goes_on:
            return None if goes_on is None else turn
    return None


def _scalar(name: str, body: Body, read: Read, bodies: dict[str, Body]) -> int | None:
    """Returns the value of an integer scalar; None if that is unknown."""
    one = body.get(name)
    if one is None or [x.shape for x in one.results] != [()]:
        return None

    def operand(number: int) -> int | None:
        return _scalar(one.operands[number], body, read, bodies)

    value: int | None = None
    if one.opcode == "constant" and (found := _LITERAL.search(one.line)):
        value = int(found[1] == "true") if found[1].isalpha() else int(found[1])
    elif one.opcode == "parameter":
        value = read(one.number)
    elif one.opcode == "get-tuple-element" and (index := _INDEX.search(one.line)):
        source = body.get(one.operands[0])
        if source is not None and source.opcode == "parameter":
            value = read(int(index[1]))
    elif one.opcode in _COPIES:
        value = operand(0)
    elif one.opcode in ("fusion", "call"):
        inner = bodies[one.runs[0]]
        value = _scalar(_root(inner).name, inner, operand, bodies)
    elif named := _ARITHMETIC.get(one.opcode) or one.attribute("direction").lower():
        several = [operand(number) for number in range(len(one.operands))]
        value = None if None in several else int(getattr(operator, named)(*several))
    kind, bits = one.results[0].kind[0], one.results[0].bits_each
    least = -(1 << bits - 1) if kind == "s" else 0
    # One that does not fit wraps around; a float is not followed.
    is_held = value is not None and least <= value < least + (1 << bits)
    return value if is_held and kind in "sup" else None


def _root(body: Body) -> Instruction:
    """Returns the instruction whose result is the computation's."""
    several = list(body.values())
    roots = (one for one in several if one.line.lstrip().startswith("ROOT"))
    return next(roots, several[-1])


# --- Programs -------------------------------------------------------------------------

Run = tuple[Instruction, Body, int]


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module.

    Attributes:
        text: All of it.
        entry: The name of the computation that runs.
        computations: The bodies of computations by name.
    """

    text: str = dataclasses.field(repr=False)
    entry: str
    computations: dict[str, Body]

    def kernels(
        self,
        size: Callable[[Instruction, Body], int],
        name: str | None = None,
        times: int = 1,
    ) -> Iterator[Run]:
        """Yields what runs as a kernel, with its body, and how often.

        Loops count as often as they run (once where that is unknown, see `trips`), a
        conditional counts the branch that is largest by `size`.

        Args:
            size: Of an instruction, with its body.
            name: The computation that runs; the entry by default.
            times: How often it runs.
        """
        body = self.computations[self.entry if name is None else name]
        for instruction in body.values():
            if instruction.makes_nothing:
                continue
            if instruction.opcode == "conditional":
                branches = (self.kernels(size, x, times) for x in instruction.runs)
                yield from max(
                    map(list, branches),
                    key=lambda one: sum(n * size(i, b) for i, b, n in one),
                )
            elif instruction.opcode in _LOOP:
                for one in instruction.runs:
                    yield from self.kernels(size, one, times * self.turns(instruction))
            else:
                yield instruction, body, times

    @functools.cached_property
    def trips(self) -> dict[str, int | None]:
        """How often each loop runs, by its name; None if unknown.

        XLA:TPU does not say so: the loop's counter is followed from its start through
        its steps until the condition is false.
        """
        bodies = self.computations
        return {
            one.name: _trips(one, body, bodies) if one.trips is None else one.trips
            for body in bodies.values()
            for one in body.values()
            if one.opcode == "while"
        }

    def turns(self, instruction: Instruction) -> int:
        """Returns how often it runs its computations; 1 if unknown."""
        trips = self.trips.get(instruction.name)
        return 1 if trips is None else trips

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
            for instruction in body.values()
            for called in instruction.called("calls")
        }

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The arguments of the program, by number."""
        return {
            instruction.number: instruction
            for instruction in self.computations[self.entry].values()
            if instruction.opcode == "parameter"
        }

    @property
    def aliased(self) -> set[int]:
        """The numbers of the arguments whose buffers hold a result."""
        found = _ALIASES.search(self.text)
        pairs = re.findall(r":\s*\((\d+),", found[1]) if found else []
        return {int(number) for number in pairs}


_ALIASES = re.compile(
    r"^HloModule.*input_output_alias=\{((?:[^{}]|\{[^}]*\})*)\}", re.MULTILINE
)


def parse(text: str) -> Module:
    """Reads a module.

    Raises:
        ValueError: The text has no entry computation.
    """
    entry, found = "", dict[str, Body]()
    header, body = None, Body()
    for line in text.splitlines():
        if header is None:
            header, body = _COMPUTATION.match(line), {}
        elif line.startswith("}"):
            found[header["name"]] = body
            entry = header["name"] if header["entry"] else entry
            header = None
        elif (instruction := _instruction(line)) is not None:
            body[instruction.name] = instruction
    if not entry:
        raise ValueError(
            "The text of a compiled program must have an ENTRY computation; found "
            f"none in {text[:80]!r}. Pass what XLA compiled: `compiled.as_text()`."
        )
    return Module(text, entry, found)
