"""Following what is bad through the operations of a level, from results back.

Looking at every value of a program costs more than the program. So at first only a few
are looked at, those that are stored anyway: what products make, and what goes in. That
leaves a *region*: the operations between values that are good and the first that is
bad. Only in there every value is looked at.
"""

from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from .._dtypes import full_precision_of
from .._jax_compat import scan_counts
from .._program import PrimitiveClass, properties
from ._badness import is_number
from ._level import Level, Step, is_apart, operands_of

Bits = Mapping[int, np.ndarray]
"""For each value that is looked at whether it is bad, on each device."""

# A level of fewer values is looked at as a whole.
_FEW = 40


def is_bad(bits: Bits, value: int) -> bool:
    """Whether a value is known to be bad, on any device."""
    found = bits.get(value)
    return found is not None and bool(found.any())


def all_values(level: Level) -> list[int]:
    """The values that hold numbers, each once."""
    values = [*level.inputs, *level.constants]
    values += [v for step in level.steps for v in step.results]
    return _distinct(level, values)


def stored_values(level: Level) -> list[int]:
    """Those that are looked at first; all, if there are few."""
    every = all_values(level)
    if len(every) <= _FEW:
        return every
    values = [*level.inputs, *level.constants, *level.outputs]
    # The product that gives a weight's gradient is followed by the gradient itself; to
    # look at both holds more than the step does (a GPT of 4 layers: 142 MB, not 136).
    lead_on = _values_before_products(level)
    for step in level.steps:
        if step.primitive == "scan":
            # Not what it stacks: XLA would copy that for the loop of the backward
            # pass (jaxlib 0.10.2, 2026-11: twice the memory of a step).
            values += step.results[: scan_counts(step.equation.params)[1]]
        elif is_composite(step):
            values += step.results
        elif _is_product(step):
            values += [v for v in step.results if v in lead_on]
    return _distinct(level, values)


def _values_before_products(level: Level) -> set[int]:
    """The values that a product or a loop is made of, at whatever distance."""
    found: set[int] = set()
    for step in reversed(level.steps):
        if is_composite(step) or _is_product(step):
            found.update(step.operands)
        else:
            for result in found.intersection(step.results):
                found.update(operands_of(step, result))
    return found


def _is_product(step: Step) -> bool:
    return properties(step.primitive).kind is PrimitiveClass.HALF


def parts(level: Level, region: Iterable[int]) -> list[list[int]]:
    """A region in parts, in order, each of which ends where its first loop does."""
    found: list[list[int]] = [[]]
    for number in sorted(region):
        found[-1].append(number)
        if level.steps[number].primitive in ("scan", "while"):
            found.append([])
    return [part for part in found if part]


def values_around(level: Level, steps: Iterable[int]) -> list[int]:
    """The operands and results of operations."""
    values = []
    for number in steps:
        step = level.steps[number]
        values += [*step.operands, *step.results]
    return _distinct(level, values)


def _distinct(level: Level, values: Iterable[int]) -> list[int]:
    values = dict.fromkeys(level.source(v) for v in values)
    return [v for v in values if is_number(level.aval(v))]


def regions(level: Level, bits: Bits, ends: Iterable[int]) -> list[set[int]]:
    """Where something bad began that reached some values, the first region first.

    Args:
        level: The level.
        bits: What is known.
        ends: The values, which are bad.

    Returns:
        Places of operations. Each region ends in a value that is bad, and what comes
        into it is not.
    """
    found, seen, todo = [], set(), list(ends)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        region, before = _region(level, bits, value)
        if before:
            todo += before
        elif region:
            found.append(region)
    return sorted(found, key=lambda region: _order(level, max(region)))


def _region(level: Level, bits: Bits, end: int) -> tuple[set[int], list[int]]:
    """The operations from values that are looked at to one, and the bad ones of these.

    Those that only move numbers are none of them.
    """
    region, before, seen, todo = set(), [], set(), [end]
    while todo:
        value = todo.pop()
        number = level.makers.get(value)
        if value in seen or number is None:
            continue
        seen.add(value)
        region.add(number)
        for operand in operands_of(level.steps[number], value):
            operand = level.source(operand)
            if operand not in bits:
                todo.append(operand)
            elif is_bad(bits, operand):
                before.append(operand)
    return region, before


def roots(level: Level, bits: Bits, ends: Iterable[int]) -> list[int]:
    """The operations whose results are bad though their operands are not.

    As far as they reach some values, the first one first.
    """
    live = {value for value in ends if is_bad(bits, value)}
    found = []
    for number in range(len(level.steps) - 1, -1, -1):
        step = level.steps[number]
        bad = [v for v in step.results if v in live and is_bad(bits, v)]
        reached = {level.source(v) for r in bad for v in operands_of(step, r)}
        reached = {v for v in reached if is_bad(bits, v)}
        live |= reached
        if bad and not reached:
            found.append(number)
    return sorted(found, key=lambda number: _order(level, number))


def is_certain(level: Level, bits: Bits, chosen: Sequence[int], known: Bits) -> bool:
    """Whether one operation is the cause, with no run without its results.

    Its results come to a value that was looked at before by operations that make NaN or
    infinity of NaN or infinity.

    Args:
        level: The level.
        bits: What is known of all values there.
        chosen: The places of operations that may be the cause.
        known: What was known before.
    """
    if len(chosen) != 1:
        return False
    live = {v for v in level.steps[chosen[0]].results if is_bad(bits, v)}
    for step in level.steps[chosen[0] :]:
        if any(is_bad(known, v) for v in live):
            return True
        if is_apart(step):
            pairs = zip(step.operands, step.results, strict=True)
            live |= {result for operand, result in pairs if operand in live}
        elif live.intersection(step.operands) and _passes_on(step):
            live.update(step.results)
    return any(is_bad(known, v) for v in live)


def _passes_on(step: Step) -> bool:
    """Whether what is bad in an operand is bad in the result, infinity or NaN."""
    known = properties(step.primitive)
    is_whole = known.moves and not known.reads_part and not known.is_barrier
    is_cast = known.kind is PrimitiveClass.CONVERT
    return known.passes_on_bad or is_whole or is_cast


def _order(level: Level, number: int) -> tuple[bool, int]:
    """What is bad in the forward pass comes before what is in the backward pass."""
    return level.forward.isdisjoint(level.steps[number].results), number


def is_composite(step: Step) -> bool:
    """Whether an operation holds programs that can be looked into."""
    return step.primitive in ("scan", "while", "cond", "shard_map")


def bad_constants(level: Level) -> list[int]:
    """The constants that are not finite."""
    found = []
    for number, array in level.constants.items():
        aval = level.aval(number)
        if is_number(aval) and jnp.size(array):
            wide = np.asarray(array, full_precision_of(aval.dtype))
            if not np.all(np.isfinite(wide)):
                found.append(number)
    return found
