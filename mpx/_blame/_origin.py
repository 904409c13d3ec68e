"""What a cause has to do with weights: which one, and in which of their gradients."""

from collections.abc import Sequence

from .._program import PrimitiveClass, properties
from ._badness import is_number
from ._graph import Graph, Scope, Step
from ._search import Cause


def parameters_of(cause: Cause, names: Sequence[str | None]) -> tuple[str, ...]:
    """The weights among the operands of a cause, moved, cut or cast perhaps.

    Args:
        cause: The cause.
        names: For each input of the program the path of the weight that it is.
    """
    values = cause.step.operands if cause.step is not None else (cause.value,)
    indices = (_input_of(cause.graph, value) for value in values)
    found = (names[i] for i in indices if i is not None)
    return tuple(dict.fromkeys(name for name in found if name is not None))


def input_of(cause: Cause) -> int | None:
    """The input of the program that a cause is, if it is one."""
    return _input_of(cause.graph, cause.value)


def _input_of(graph: Graph, value: int) -> int | None:
    """The input of the program whose numbers a value holds."""
    value = graph.source(value, _is_moved)
    while value in graph.enters:
        scope, position = graph.enters[value]
        operand = scope.sub.operands[position]
        if operand is None:
            return None
        value = graph.source(scope.operands[operand], _is_moved)
    return graph.inputs.index(value) if value in graph.inputs else None


def _is_moved(step: Step) -> bool:
    """Whether an operation moves or casts its first operand."""
    known = properties(step.primitive)
    return known.moves or known.kind is PrimitiveClass.CONVERT


def gradient_of(cause: Cause) -> tuple[int, ...]:
    """The gradients, outputs of the program, that are all that a cause goes into.

    Empty where a product is computed with it: a cotangent that goes on.
    """
    if cause.step is None:
        return ()
    graph, scope = cause.graph, cause.step.scope
    ends = _ends_of(graph, cause.step.results, scope)
    while scope is not None and ends is not None:
        places = {scope.sub.results[i] for i in ends}
        # What a loop carries is summed on in its turns: it comes in as it went out.
        values = [scope.results[i] for i in places if i is not None]
        scope = scope.outer
        ends = None if None in places else _ends_of(graph, values, scope)
    return tuple(sorted(ends or ()))


def _ends_of(
    graph: Graph, values: Sequence[int], scope: Scope | None
) -> set[int] | None:
    """The outputs of a scope that values go into; None if into something else, too."""
    seen, todo = set(), list(values)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in graph.held:
            return None
        for step in graph.users.get(value, ()):
            if not any(is_number(graph.aval(v)) for v in step.results):
                continue  # a check
            # Products are the operations by which a cotangent goes on.
            kind = properties(step.primitive).kind
            if kind in (PrimitiveClass.HALF, PrimitiveClass.RECURSE):
                return None
            todo += [r for r in step.results if value in step.operands_of(r)]
    outputs = graph.outputs if scope is None else scope.outputs
    return {i for i, value in enumerate(outputs) if value in seen}
