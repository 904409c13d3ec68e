"""What is in memory at the worst moment of a compiled program, by part.

The compiler says how many bytes a program's temporaries take. Which arrays they are is
read from its schedule: an array is in memory from the instruction that makes it to the
last one that reads it. At the moment at which most bytes are, those made by the forward
pass and read by the backward pass are *activations*, those of a weight's size that the
backward pass leaves for the update are *gradients*, all others *working memory*. The
compiler's figure is kept: working memory takes the difference.

Arrays that are made in place of an argument are that argument's. A loop needs what its
body needs at most, beside what it carries.
"""

import collections
import dataclasses
import re

from .._counter import Instruction, bodies_of, bytes_of_shape

ACTIVATIONS, GRADIENTS, WORKING = "activations", "gradients", "working memory"
_SAME = frozenset(
    "bitcast get-tuple-element tuple while opt-barrier copy-done copy-start "
    "all-gather-done all-reduce-done async-done call".split()
)
_FREE = frozenset({"parameter", "constant", "after-all", "partition-id", "replica-id"})
_LEAST = 65536
_INDEX = re.compile(r"index=(\d+)")


@dataclasses.dataclass
class _Buffer:
    """An array: its bytes, the first and last instruction that it is needed at."""

    size: int
    start: int
    maker: str
    end: int = 0
    reader: str = ""


def temporaries_by_part(
    text: str, total: int, weight_sizes: frozenset[int]
) -> dict[str, int]:
    """Bytes of a program's temporaries at its peak.

    Args:
        text: The optimized program.
        total: What the compiler says of them.
        weight_sizes: How many bytes weights have, in each width that they come in.
    """
    bodies, entry = bodies_of(text)
    alive = _at_peak(bodies, entry)
    parts = {ACTIVATIONS: 0, GRADIENTS: 0}
    for buffer in alive:
        part = _part(buffer, weight_sizes)
        if part in parts:
            parts[part] += buffer.size
    known = sum(parts.values())
    if known > total:  # the compiler puts arrays in one place that are alive together
        parts = {name: size * total // known for name, size in parts.items()}
    return parts | {WORKING: total - sum(parts.values())}


def _part(buffer: _Buffer, weight_sizes: frozenset[int]) -> str:
    is_backward = "transpose(" in buffer.maker
    if not is_backward and "jvp(" in buffer.maker and "transpose(" in buffer.reader:
        return ACTIVATIONS
    is_for_update = buffer.reader and "jvp(" not in buffer.reader
    if is_backward and is_for_update and buffer.size in weight_sizes:
        return GRADIENTS
    return WORKING


def _at_peak(bodies: dict[str, list[Instruction]], name: str) -> list[_Buffer]:
    """The arrays that are in memory when most bytes of a computation are."""
    body = bodies[name]
    buffers: list[_Buffer] = []
    inner: dict[int, list[_Buffer]] = {}
    held: dict[str, list[list[_Buffer]]] = {}
    for place, one in enumerate(body):
        given = [held.get(operand, [[]]) for operand in one.operands]
        if one.opcode == "while" and (
            found := re.search(r"body=%?([\w.\-]+)", one.line)
        ):
            inner[place] = _at_peak(bodies, found[1])
        source = _op_name(one)
        for buffer in (b for value in given for part in value for b in part):
            buffer.end = place
            buffer.reader = source or buffer.reader
        if one.opcode in _SAME:
            held[one.name] = _passed(one, given)
        elif one.opcode in _FREE:
            held[one.name] = [[]]
        elif re.search("update-slice|scatter", one.name) and given:
            held[one.name] = given[0]  # in place
        else:
            made = _Buffer(bytes_of_shape(one.shape), place, source, place)
            buffers += [made] * (made.size >= _LEAST)
            held[one.name] = [[made]]
    if body and body[-1].name in held:  # what comes out has a place of its own
        kept = {id(b) for part in held[body[-1].name] for b in part}
        buffers = [buffer for buffer in buffers if id(buffer) not in kept]
    return _most(buffers, inner, len(body))


def _passed(one: Instruction, given: list[list[list[_Buffer]]]) -> list[list[_Buffer]]:
    """What an instruction holds that makes nothing new."""
    everything = [[b for part in value for b in part] for value in given]
    if one.opcode == "tuple":
        return everything
    index = _INDEX.search(one.line)
    if one.opcode == "get-tuple-element" and index is not None and given:
        place = int(index[1])
        return [given[0][place]] if place < len(given[0]) else [everything[0]]
    return given[0] if given else [[]]


def _most(
    buffers: list[_Buffer], inner: dict[int, list[_Buffer]], count: int
) -> list[_Buffer]:
    changes: collections.Counter[int] = collections.Counter()
    for buffer in buffers:
        changes[buffer.start] += buffer.size
        changes[buffer.end + 1] -= buffer.size
    best, at, now = -1, 0, 0
    for place in range(count):
        now += changes[place]
        here = now + sum(buffer.size for buffer in inner.get(place, ()))
        if here > best:
            best, at = here, place
    alive = [buffer for buffer in buffers if buffer.start <= at <= buffer.end]
    return [*alive, *inner.get(at, ())]


def _op_name(one: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', one.line)
    return found[1] if found else ""
