"""A compiled program as `mpx.expect` reads it: its instructions and their lines."""

import dataclasses
import functools
import os
import re
from pathlib import Path

from .._hlo_text import Instruction, computations, frames_of

_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
# Where operations come from that no line of the user's wrote: the call of `lower`.
_LOWERS = str(Path(__file__).with_name("_program.py"))
_OWN = f"{Path(__file__).parents[1]}{os.sep}"


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
        if instruction.frame:
            return self.sources.get(instruction.frame, "")
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
        _sources(text),
    )


def _sources(text: str) -> dict[int, str]:
    found = {number: _source(chain) for number, chain in frames_of(text).items()}
    return {number: source for number, source in found.items() if source}


def _source(chain: list[tuple[str, str, int]]) -> str:
    """The innermost line that is not of mpx, which computes for whoever called it."""
    lines = [(file, f"{file}:{line}") for file, _, line in chain if file]
    is_outside = [file == _LOWERS for file, _ in lines] + [True]
    lines = lines[: is_outside.index(True)]
    others = [line for file, line in lines if not file.startswith(_OWN)]
    return (others or [line for _, line in lines] or [""])[0]
