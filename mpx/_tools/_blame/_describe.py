"""Describes a cause in a program as a culprit, for the report."""

import linecache
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from ..._program import PrimitiveClass, is_matmul, properties, scopes, user_frame
from .._inspect import (
    function_path,
    innermost_note,
    leg_of,
    line_text,
    phase,
    scope_path,
)
from ._blame_report import Culprit, Range, is_number
from ._graph import Graph, Node, Scope, is_copied
from ._replay import Replay
from ._search import Cause

# --- Weights and gradients ------------------------------------------------------------


def parameters_of(cause: Cause, names: Sequence[str | None]) -> tuple[str, ...]:
    """Returns the weights among the operands of a cause, maybe moved, cut or cast.

    Args:
        cause: The cause.
        names: For each input of the program, the path of its weight, or None.
    """
    values = cause.step.operands if cause.step is not None else (cause.value,)
    indices = (_input_of(cause.graph, value) for value in values)
    found = (names[i] for i in indices if i is not None)
    return tuple(dict.fromkeys(name for name in found if name is not None))


def input_of(cause: Cause) -> int | None:
    """Returns the position of the program's input that a cause is; None if none."""
    return _input_of(cause.graph, cause.value)


def _input_of(graph: Graph, value: int) -> int | None:
    """Returns the input of the program whose values `value` has; None if none."""
    value = graph.source(value, _is_moved)
    while value in graph.enters:
        scope, position = graph.enters[value]
        operand = scope.sub.operands[position]
        if operand is None:
            return None
        value = graph.source(scope.operands[operand], _is_moved)
    return graph.inputs.index(value) if value in graph.inputs else None


def _is_moved(step: Node) -> bool:
    """Returns whether an operation moves or casts its first operand."""
    known = properties(step.primitive)
    return known.moves or known.kind is PrimitiveClass.CONVERT


def gradient_of(cause: Cause) -> tuple[int, ...]:
    """Returns the outputs (gradients) that a cause ends in, if nothing else uses it.

    Empty if a matmul uses it: then it is a cotangent that is passed on.
    """
    if cause.step is None:
        return ()
    graph, scope = cause.graph, cause.step.scope
    ends = _ends_of(graph, cause.step.results, scope)
    while scope is not None and ends is not None:
        places = {scope.sub.results[i] for i in ends}
        # A loop's carry is summed over the iterations: it goes in as it came out.
        values = [scope.results[i] for i in places if i is not None]
        scope = scope.outer
        ends = None if None in places else _ends_of(graph, values, scope)
    return tuple(sorted(ends or ()))


def _ends_of(
    graph: Graph, values: Sequence[int], scope: Scope | None
) -> set[int] | None:
    """Returns the outputs of a scope that use the values; None if others do."""
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
            # Matmuls are the operations that pass a cotangent on.
            kind = properties(step.primitive).kind
            if kind in (PrimitiveClass.HALF, PrimitiveClass.RECURSE):
                return None
            todo += [r for r in step.results if value in step.operands_of(r)]
    outputs = graph.outputs if scope is None else scope.outputs
    return {i for i, value in enumerate(outputs) if value in seen}


# --- Phase: forward, backward or recompute --------------------------------------------
#
# The loss depends only on what the function computes without a derivative. So a value
# that the loss depends on is in the forward pass. Any other value is for the gradient:
# cotangents, and what a derivative rule computes in the forward pass (that of
# `x ** 0.5` computes `x ** -0.5`). The scopes of JAX do not show this: both are under
# `jvp`.


def phase_of(cause: Cause) -> str:
    """Returns `forward`, `backward`, or `recompute` (the forward pass repeated)."""
    graph, step = cause.graph, cause.step
    if step is None:
        return "forward"
    bad = [step.results[k] for k in cause.results] or [cause.value]
    if not graph.forward.isdisjoint(bad):
        return "forward"
    if phase((*step.place.scopes, *scopes(step.equation))) != "recompute":
        return "backward"
    forward = (s for s in graph.steps if not graph.forward.isdisjoint(s.results))
    # A derivative in a checkpoint has the same scopes as a recomputed operation.
    is_again = any(_is_same(graph, step, other) for other in forward)
    return "recompute" if is_again else "backward"


def _is_same(graph: Graph, a: Node, b: Node) -> bool:
    """Returns whether two operations compute the same, as far as their scopes show.

    Inputs of scopes count as equal if their shapes are.
    """
    seen: set[tuple[int, int]] = set()
    if _operation(a) != _operation(b):
        return False
    todo = list(zip(a.operands, b.operands, strict=True))
    while todo:
        x, y = (graph.source(value, is_copied) for value in todo.pop())
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


def _may_be_equal(x: object, y: object) -> bool:
    return x is None or y is None or np.array_equal(np.asarray(x), np.asarray(y))


def _operation(step: Node) -> tuple[object, ...]:
    return step.primitive, len(step.operands), str(step.equation.params)


# --- Culprits -------------------------------------------------------------------------


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
        names: The name of each input of the step.
        weights: The same for weights; None for other inputs.
        above: The limit above which values count as large; None if not set.
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
    when, gradient, outputs = phase_of(cause), "", ()
    leg = leg_of(entries)
    if when == "backward":
        outputs = gradient_of(cause)
        gradient = leg.value if leg else "wgrad" if outputs else "dgrad"
        parameters = tuple(replay.places[i] for i in outputs) or parameters
    if note is not None and note.weight and (leg or not gradient) and not outputs:
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
    """Yields the loops and branches around the cause, the outermost first."""
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
    """Returns the operation that made the offending operand; None if unknown.

    The operand is, of a cast, a number that overflows; of a division or a logarithm,
    a zero; of an operation that makes NaN of an infinity, that infinity.
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
    """Returns the half-precision operation that made a zero of nonzero numbers.

    It is an underflow, or a difference that is rounded away.
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
        return "a division by zero"  # of a part that includes zeros
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
