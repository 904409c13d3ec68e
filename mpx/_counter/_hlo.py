"""The kernels of an optimized HLO module, in the order and as often as they run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from .._hlo_text import Instruction, computations

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
