"""What a compiled program sends from device to device: bytes by collective and dtype.

Bytes are what one device sends over a ring of $n$ devices, the least that is possible:
of an array of $B$ bytes, an all-gather and a reduce-scatter send $B (n - 1) / n$ of the
whole, an all-reduce twice that, an all-to-all once. A loop's body counts as often as
the loop runs. What a switch on the way adds up is left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from .._hlo_text import Instruction
from ._hlo import ARRAY, bodies_of, bytes_of_shape

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of one array.

    Attributes:
        kind: The collective.
        dtype: Of what travels, in HLO's words.
        bytes: Of the whole array, which all devices together hold or make.
        times: How often it runs.
        devices: Among how many.
    """

    kind: str
    dtype: str
    bytes: int
    times: int
    devices: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends."""
        share = (self.devices - 1) / self.devices
        if self.kind == "collective-permute":
            share = 1
        return self.times * self.bytes * share * (1 + (self.kind == "all-reduce"))


def messages(text: str, devices: int) -> list[Message]:
    """The collectives of an optimized HLO module."""
    bodies, entry = bodies_of(text)
    return list(_messages(bodies, entry, 1, devices))


def _messages(
    bodies: dict[str, list[Instruction]], name: str, times: int, devices: int
) -> Iterator[Message]:
    shapes = {instruction.name: instruction.shape for instruction in bodies[name]}
    for instruction in bodies[name]:
        kind = instruction.opcode.removesuffix("-start")
        if kind in _KINDS:
            if name.startswith("all-reduce-scatter"):  # as a TPU's compiler writes it
                kind = "reduce-scatter"
            yield from _of(instruction, kind, shapes, times, devices)
        trips = instruction.trips if kind == "while" else None
        inner = times * (1 if trips is None else trips)
        keys = ("body", "calls", "branch_computations", "called_computations")
        keys += ("true_computation", "false_computation")
        keys += ("to_apply",) if kind == "call" else ()
        for key in keys:
            for one in instruction.called(key):
                if one in bodies:
                    yield from _messages(bodies, one, inner, devices)


def _of(
    instruction: Instruction,
    kind: str,
    shapes: dict[str, str],
    times: int,
    devices: int,
) -> Iterator[Message]:
    given = " ".join(shapes[name] for name in instruction.operands)
    group = _group(instruction.line) or devices
    for array in ARRAY.finditer(given):
        size = bytes_of_shape(array[0])
        whole = size * group if kind == "all-gather" else size
        yield Message(kind, array[1], whole, times, group)


def _group(line: str) -> int | None:
    """Among how many devices a collective is."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    sized = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    return int(sized[1]) if sized else None
