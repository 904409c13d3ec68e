"""Of which pass a cause is: the forward pass, the backward pass, or a recomputation.

The loss depends on what the function computes without a derivative, and on nothing
else. So a value that the loss depends on is of the forward pass. Any other one is of
the gradient: cotangents, and what a derivative rule makes on the way forward (that of
`x ** 0.5` computes `x ** -0.5`). Scopes of JAX cannot tell: both are under `jvp`.
"""

import numpy as np

from .._inspect import phase
from .._program import PrimitiveClass, properties, scopes
from ._graph import Graph, Step, is_same_numbers
from ._search import Cause


def phase_of(cause: Cause) -> str:
    """`forward`, `backward`, or `recompute`: of the forward pass, computed again."""
    graph, step = cause.graph, cause.step
    if step is None:
        return "forward"
    bad = [step.results[k] for k in cause.results] or [cause.value]
    if not graph.forward.isdisjoint(bad):
        return "forward"
    entries = (*step.place.scopes, *scopes(step.equation))
    if phase(entries) != "recompute":
        return "backward"
    forward = (s for s in graph.steps if not graph.forward.isdisjoint(s.results))
    # A derivative in a checkpoint has the same scopes as what is computed again.
    is_again = any(_is_same(graph, step, other) for other in forward)
    return "recompute" if is_again else "backward"


def _is_same(graph: Graph, a: Step, b: Step) -> bool:
    """Whether two operations compute the same, as far as their scopes show.

    An input of a scope may be any value of its shape.
    """
    seen: set[tuple[int, int]] = set()
    if _operation(a) != _operation(b):
        return False
    todo = list(zip(a.operands, b.operands, strict=True))
    while todo:
        x, y = (graph.source(value, _is_copied) for value in todo.pop())
        if (x, y) in seen:
            continue
        seen.add((x, y))
        if np.shape(graph.aval(x)) != np.shape(graph.aval(y)):
            return False
        maker_a, maker_b = graph.makers.get(x), graph.makers.get(y)
        if maker_a is None and maker_b is None:
            if not _may_be_equal(graph.constants.get(x), graph.constants.get(y)):
                return False
        elif maker_a is not None and maker_b is not None:
            if _operation(maker_a) != _operation(maker_b):
                return False
            todo += zip(maker_a.operands, maker_b.operands, strict=True)
        elif x in graph.constants or y in graph.constants:
            return False
    return True


def _is_copied(step: Step) -> bool:
    """Copies and casts: what is computed again begins with a cast."""
    is_cast = properties(step.primitive).kind is PrimitiveClass.CONVERT
    return is_cast or is_same_numbers(step)


def _may_be_equal(x: object, y: object) -> bool:
    return x is None or y is None or np.array_equal(np.asarray(x), np.asarray(y))


def _operation(step: Step) -> tuple[object, ...]:
    return step.primitive, len(step.operands), str(step.equation.params)
