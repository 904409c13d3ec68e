"""From a cause in a program to a culprit that a person can read."""

import linecache
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from ..._program import PrimitiveClass, is_matmul, properties, scopes, user_frame
from .._inspect import function_path, innermost_note, line_text, phase, scope_path
from ._blame_report import Culprit, Range, is_number
from ._graph import Graph, Node, Scope, is_same_numbers
from ._replay import Replay
from ._search import Cause

# ----------------------------------------------------------------------------
# What a cause has to do with weights: which one, and in which of their gradients.


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


def _is_moved(step: Node) -> bool:
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


# ----------------------------------------------------------------------------
# Of which pass a cause is: the forward pass, the backward pass, or a recomputation.
#
# The loss depends on what the function computes without a derivative, and on nothing
# else. So a value that the loss depends on is of the forward pass. Any other one is of
# the gradient: cotangents, and what a derivative rule makes on the way forward (that of
# `x ** 0.5` computes `x ** -0.5`). Scopes of JAX cannot tell: both are under `jvp`.


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


def _is_same(graph: Graph, a: Node, b: Node) -> bool:
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


def _is_copied(step: Node) -> bool:
    """Copies and casts: what is computed again begins with a cast."""
    is_cast = properties(step.primitive).kind is PrimitiveClass.CONVERT
    return is_cast or is_same_numbers(step)


def _may_be_equal(x: object, y: object) -> bool:
    return x is None or y is None or np.array_equal(np.asarray(x), np.asarray(y))


def _operation(step: Node) -> tuple[object, ...]:
    return step.primitive, len(step.operands), str(step.equation.params)


# ----------------------------------------------------------------------------


def culprit_of(
    replay: Replay,
    cause: Cause,
    names: Sequence[str],
    weights: Sequence[str | None],
    above: float | None,
) -> Culprit:
    """Describes a cause.

    Args:
        replay: The step.
        cause: The cause.
        names: For each input of the step its name.
        weights: The same, None for what is no weight.
        above: What counts as large, if that was asked for.
    """
    step, entries, frames = cause.step, (), ()
    at = cause.scope if step is None else step
    if at is not None:
        entries = (*at.place.scopes, *scopes(at.equation))
        frames = at.place.frames_of(at.equation)
    note = innermost_note(entries)
    primitive = computed = step.primitive if step is not None else "input"
    if not cause.results:
        is_constant = cause.value in cause.graph.constants
        primitive = computed = "constant" if is_constant else "input"
    elif note is not None and note.primitive:
        primitive = note.primitive
    index = input_of(cause) if not cause.results else None
    parameters = parameters_of(cause, weights)
    when, gradient = phase_of(cause), ""
    if when == "backward":
        outputs = gradient_of(cause)
        gradient = "wgrad" if outputs else "dgrad"
        parameters = tuple(replay.places[i] for i in outputs) or parameters
    if note is not None and note.weight and not gradient:
        parameters = (note.weight,)
    kind = _kind(cause.made)
    if above is not None and kind in ("", "inf"):
        kind = "large"
    maker = _maker(cause)
    frame = user_frame(frames)
    code = "" if frame is None else linecache.getline(frame.file, frame.line).strip()
    return Culprit(
        primitive=primitive,
        computed=computed,
        kind=kind,
        scope=scope_path(entries),
        function=function_path(frames),
        line=line_text(frames),
        code=code,
        phase=when,
        gradient=gradient,
        parameters=parameters if index is None else (names[index],),
        inside=tuple(_inside(cause)),
        devices=cause.devices,
        operands=cause.ranges,
        results=cause.made,
        reason=_reason(cause, kind, above) + _of_zero(cause, maker),
        made_by="" if maker is None else maker.primitive,
        made_at=""
        if maker is None
        else line_text(maker.place.frames_of(maker.equation)),
    )


def _inside(cause: Cause) -> Iterator[str]:
    """The loops and branches that it stands in, the outermost first."""
    index = iter(cause.index)
    for scope in cause.step.around if cause.results and cause.step else ():
        at = next(index) if scope.length is not None else scope.branch
        if scope.primitive == "scan":
            yield f"scan, iteration {at} of {scope.length}"
        elif scope.primitive == "while":
            yield f"while, iteration {at}"
        elif scope.primitive == "cond":
            yield f"cond, branch {at + 1} of {len(scope.equation.params['branches'])}"


def _maker(cause: Cause) -> Node | None:
    """The operation that made what an operation cannot take.

    Of a cast a number that does not fit, of a division or a logarithm a zero, of what
    makes NaN of an infinity that infinity.
    """
    graph, step = cause.graph, cause.step
    if step is None or not cause.results:
        return None
    if cause.meant_by is not None:
        return cause.meant_by
    if step.primitive != _CAST:
        return _zero_maker(cause, step)
    return graph.makers.get(graph.source(step.operands[0]))


def _zero_maker(cause: Cause, step: Node) -> Node | None:
    """The operation that made a zero of numbers in half precision that are none.

    An underflow, or a difference that is rounded away.
    """
    graph, zeros = cause.graph, cause.zeros
    if not _divides(step) and step.primitive not in _LOGARITHMS:
        return None
    value = step.operands[-1]
    while zeros.get(value) and (maker := graph.makers.get(value)) is not None:
        numbers = [v for v in maker.operands if v in zeros]
        before = [v for v in numbers if zeros[v]]
        if not before:
            dtype = getattr(graph.aval(value), "dtype", None)
            is_small = dtype is not None and dtype.itemsize < 4
            return maker if is_small and numbers else None
        value = before[0]
    return None


def _kind(made: Sequence[Range]) -> str:
    has_nan = any(one.nans for one in made)
    has_inf = any(one.infinities for one in made)
    return " and ".join(["nan"] * has_nan + ["inf"] * has_inf)


def _of_zero(cause: Cause, maker: Node | None) -> str:
    step = cause.step
    if maker is None or step is None or step.primitive == _CAST or cause.meant_by:
        return ""
    dtype = cause.graph.aval(maker.results[0]).dtype
    what = "rounded to" if maker.primitive in ("add", "sub") else "underflowed to"
    return f", which {what} it in {dtype}"


def _reason(cause: Cause, kind: str, above: float | None) -> str:
    step = cause.step
    if step is None or not cause.results:
        is_constant = cause.value in cause.graph.constants
        what = "a constant" if is_constant else "an input of the step"
        is_finite = above is not None and not any(one.bad for one in cause.made)
        how = f"above {above:g}" if is_finite else "not finite"
        return f"it is {what} that is {how}"
    operands, made = cause.ranges, cause.made
    if above is not None and kind == "large":
        return f"a number above {above:g}"
    result = cause.graph.aval(cause.value)
    if kind == "inf" and operands and not any(o.bad for o in operands):
        amax = max(o.amax for o in operands)
        largest = float(jnp.finfo(result.dtype).max)
        if step.primitive == _CAST:
            return f"does not fit in {result.dtype}: {amax:.3g} > {largest:.5g}"
        if _divides(step) and any(o.zeros for o in operands):
            return "a division by zero"
        if step.primitive in _LOGARITHMS:
            return "the logarithm of zero"
        return f"the result does not fit in {result.dtype} (largest {largest:.5g})"
    if cause.meant_by is not None:
        return _OF_INFINITIES.get(step.primitive, "it makes NaN of infinities")
    if step.primitive == "select_n":
        return f"its condition chooses a constant that is {kind}"
    if step.primitive == "gather" and not any(o.bad for o in operands):
        return "an index is out of bounds, which gives NaN"
    if kind == "nan" and _divides(step):
        return "zero divided by zero" if any(o.zeros for o in operands) else ""
    if _divides(step) and any(o.zeros for o in operands):
        return "a division by zero"  # some of them of zeros
    return _domain(step, operands, made)


_CAST = "convert_element_type"
_LOGARITHMS = ("log", "log2", "log1p")
_OF_INFINITIES = {
    "sub": "infinity minus infinity",
    "mul": "zero times infinity",
    "div": "infinity divided by infinity",
}


def _divides(step: Node) -> bool:
    return step.primitive in ("div", "rem", "rsqrt", "integer_pow", "pow")


def _domain(step: Node, operands: Sequence[Range], made: Sequence[Range]) -> str:
    is_negative = bool(operands) and operands[0].least < 0
    if step.primitive in ("sqrt", "rsqrt", "pow", *_LOGARITHMS) and is_negative:
        return f"of a negative number, {operands[0].least:.3g}"
    if is_matmul(step.equation) and made and not any(o.bad for o in operands):
        return "the matmul or its sum overflows"
    return ""
