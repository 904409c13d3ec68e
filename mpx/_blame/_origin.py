"""What a cause has to do with weights: which one, and in which of their gradients."""

from collections.abc import Sequence

from .._program import PrimitiveClass, properties
from ._badness import is_number
from ._descend import Found, Within
from ._level import Level, Step, operands_of


def parameters_of(found: Found, names: Sequence[str | None]) -> tuple[str, ...]:
    """The weights among the operands of a cause, moved, cut or cast perhaps.

    Args:
        found: The cause, and the way to it.
        names: For each input of the whole program the path of the weight that it is.
    """
    cause = found.cause
    values = cause.step.operands if cause.step is not None else (cause.value,)
    paths = (_input_of(cause.level, value, found.way) for value in values)
    indices = (i for i in paths if i is not None)
    return tuple(dict.fromkeys(n for i in indices if (n := names[i]) is not None))


def input_of(found: Found) -> int | None:
    """The input of the whole program that a cause is, if it is one."""
    return _input_of(found.cause.level, found.cause.value, found.way)


def _input_of(level: Level, value: int, way: Sequence[Within]) -> int | None:
    """The input of the whole program whose numbers a value holds."""
    value = level.source(value, _is_moved)
    if value not in level.inputs:
        return None
    index = level.inputs.index(value)
    if not way:
        return index
    *outer, last = way
    operand = last.sub.operands[index]
    if operand is None:
        return None
    return _input_of(last.level, last.step.operands[operand], outer)


def _is_moved(step: Step) -> bool:
    """Whether an operation moves or casts its first operand."""
    known = properties(step.primitive)
    return step.is_barrier or known.moves or known.kind is PrimitiveClass.CONVERT


def gradient_of(found: Found) -> tuple[int, ...]:
    """The gradients, outputs of the whole program, that are all that a cause goes into.

    Empty where a product is computed with it: a cotangent that goes on.
    """
    cause = found.cause
    if cause.step is None:
        return ()
    outputs = _ends_of(cause.level, cause.step.results, found.way)
    return () if outputs is None else tuple(sorted(outputs))


def _ends_of(
    level: Level, values: Sequence[int], way: Sequence[Within]
) -> set[int] | None:
    seen, todo, ends = set(), list(values), set()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        ends |= {i for i, v in enumerate(level.outputs) if v == value}
        for number in level.users.get(value, ()):
            step = level.steps[number]
            if not any(is_number(level.aval(v)) for v in step.results):
                continue  # a check
            if not _is_elementwise(step):
                return None
            todo += [r for r in step.results if value in operands_of(step, r)]
    if not way:
        return ends
    *outer, last = way
    places = {last.sub.results[i] for i in ends}
    if None in places:
        return None
    # What a loop carries is summed on in its turns: it comes in as it went out.
    results = [last.step.results[i] for i in places if i is not None]
    return _ends_of(last.level, results, outer)


def _is_elementwise(step: Step) -> bool:
    """Whether an operation is none of those by which a cotangent goes on: products."""
    kind = properties(step.primitive).kind
    holds = (PrimitiveClass.HALF, PrimitiveClass.RECURSE)
    return step.is_barrier or kind not in holds
