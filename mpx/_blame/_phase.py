"""Of which pass a cause is: the forward pass, the backward pass, or a recomputation.

The loss depends on what the function computes without a derivative, and on nothing
else. So a value that the loss depends on is of the forward pass. Any other one is of
the gradient: cotangents, and what a derivative rule makes on the way forward (that of
`x ** 0.5` computes `x ** -0.5`). Scopes of JAX cannot tell: both are under `jvp`.
"""

from collections.abc import Iterator

import numpy as np

from .._inspect import phase
from .._program import PrimitiveClass, properties, scopes, sub_jaxprs
from ._descend import Found
from ._graph import is_composite
from ._level import Level, Step, is_same_numbers


def phase_of(found: Found) -> str:
    """`forward`, `backward`, or `recompute`: of the forward pass, computed again."""
    level, step = found.cause.level, found.cause.step
    if step is None:
        return "forward"
    bad = [step.results[k] for k in found.cause.results] or [found.cause.value]
    if not level.forward.isdisjoint(bad):
        return "forward"
    entries = (*step.place.scopes, *scopes(step.equation))
    if phase(entries) != "recompute":
        return "backward"
    root = found.way[0].level if found.way else level
    # A derivative in a checkpoint has the same scopes as what is computed again.
    again = any(_is_same(level, step, *other) for other in _forward_steps(root))
    return "recompute" if again else "backward"


def _forward_steps(level: Level) -> Iterator[tuple[Level, Step]]:
    for step in level.steps:
        if level.forward.isdisjoint(step.results):
            continue
        yield level, step
        if is_composite(step):
            for sub in sub_jaxprs(step.equation):
                yield from _forward_steps(level.entered(step, sub))


def _is_same(a: Level, step_a: Step, b: Level, step_b: Step) -> bool:
    """Whether two operations compute the same, as far as their levels show.

    An input of a level may be any value of its shape.
    """
    seen: set[tuple[int, int]] = set()
    if _operation(step_a) != _operation(step_b):
        return False
    todo = list(zip(step_a.operands, step_b.operands, strict=True))
    while todo:
        x, y = todo.pop()
        x, y = a.source(x, _is_copied), b.source(y, _is_copied)
        if (x, y) in seen:
            continue
        seen.add((x, y))
        if np.shape(a.aval(x)) != np.shape(b.aval(y)):
            return False
        maker_a, maker_b = a.maker(x), b.maker(y)
        if maker_a is None and maker_b is None:
            if not _may_be_equal(a.constants.get(x), b.constants.get(y)):
                return False
        elif maker_a is not None and maker_b is not None:
            if _operation(maker_a) != _operation(maker_b):
                return False
            todo += zip(maker_a.operands, maker_b.operands, strict=True)
        elif x in a.constants or y in b.constants:
            return False
    return True


def _is_copied(step: Step) -> bool:
    """Copies and casts: what is computed again begins with a cast."""
    is_cast = properties(step.primitive).kind is PrimitiveClass.CONVERT
    return is_cast or is_same_numbers(step)


def _may_be_equal(x: object, y: object) -> bool:
    return x is None or y is None or np.array_equal(np.asarray(x), np.asarray(y))


def _operation(step: Step) -> tuple[object, ...]:
    is_plain = not sub_jaxprs(step.equation)
    params = str(step.equation.params) if is_plain else ""
    return step.primitive, len(step.operands), params
