"""From a cause in a program to a culprit that a person can read."""

import linecache
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from .._inspect import (
    function_path,
    innermost_note,
    line_text,
    scope_path,
)
from .._program import properties, scopes, user_frame
from ._badness import Range
from ._graph import Step
from ._origin import gradient_of, input_of, parameters_of
from ._phase import phase_of
from ._replay import Replay
from ._report import Culprit
from ._search import Cause


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


def _maker(cause: Cause) -> Step | None:
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


def _zero_maker(cause: Cause, step: Step) -> Step | None:
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


def _of_zero(cause: Cause, maker: Step | None) -> str:
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


def _divides(step: Step) -> bool:
    return step.primitive in ("div", "rem", "rsqrt", "integer_pow", "pow")


def _domain(step: Step, operands: Sequence[Range], made: Sequence[Range]) -> str:
    is_negative = bool(operands) and operands[0].least < 0
    if step.primitive in ("sqrt", "rsqrt", "pow", *_LOGARITHMS) and is_negative:
        return f"of a negative number, {operands[0].least:.3g}"
    is_product = properties(step.primitive).is_quantizable
    if is_product and made and not any(o.bad for o in operands):
        return "the matmul or its sum overflows"
    return ""
