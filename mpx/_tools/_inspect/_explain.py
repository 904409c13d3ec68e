"""`mpx.explain`: every operation of a function, and what it costs."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import PyTree

from ..._autocast import (
    AmbientRecipe,
    FusedOperation,
    IslandNote,
    Note,
    autocast,
    in_contexts,
    operation_of,
    read_note,
    taking_notes,
)
from ..._base.errors import describe
from ..._base.typing import Aval, DTypeLike
from ..._base.wraps import name_of
from ..._program import OTHERS, Flops, Visit, aval_of, is_matmul, properties, walk
from ..._recipe_state import first_step
from ..._settings import Precision, read_weights, unwrapped, weights_in_call, weights_of
from ._costs import bytes_moved, flops, residual_bytes
from ._facts import Fact, Facts, Origin, but_constants, is_float_cast, promotion
from ._findings import dtype_name, precision_and_format
from ._registry import OF_A_PROGRAM, Seen, Whole, finding_of, whole_of
from ._report import LOW, PART, QUANTIZES, Island, Operation, totals_of
from ._traced import (
    Traced,
    function_path,
    innermost_note,
    leg_of,
    line_text,
    phase,
    scope_path,
    stack_text,
    trace,
    trace_gradient,
)
from ._views import Report

_CALL = "`mpx.explain`"


def explain(
    func: Callable[..., PyTree],
    dtype: DTypeLike | None = None,
    *args: object,
    weights: int | str | tuple[int | str, ...] | None = None,
    **options: Any,
) -> Callable[..., Report]:
    """Wraps a function to report every operation with its precision instead of running.

    Any JAX function works: with jit, scans, gradients, a whole training step. It is
    traced with the arguments that you pass, arrays or `jax.ShapeDtypeStruct`s, and
    never runs.

    Weights are the arrays of `func` if it is a callable PyTree such as an Equinox
    module, otherwise those of the first argument, or of the arguments in `weights`.
    Operations that use a weight name its path.

    For autocast functions, wherever they are called inside `func`, the report lists
    what autocast decided and why. For everything else it lists where the dtypes come
    from. Recipes with a state, `mpx.DelayedScaling`, need none here: they are shown
    with the scales of a first step, which are 1.

    Args:
        func: The function.
        dtype: With a dtype, or options, explains `mpx.autocast(func, dtype,
            **options)`; by default, `func` unchanged.
        *args: Not used; pass the arguments of `func` to the returned function.
        weights: The position or name of the argument that contains the weights, or
            several of them.
        **options: As in `mpx.autocast`.

    Returns:
        A function of the same arguments that returns a `mpx.reports.Report`.

    Raises:
        TypeError: `func` is not callable, arguments of it were passed here, or the
            report is requested inside a function that JAX is tracing.

    Examples:
        >>> import jax, jax.numpy as jnp, mpx
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.sin(x @ w))
        >>> w = jax.ShapeDtypeStruct((16, 4), jnp.float32)
        >>> x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        >>> report = mpx.explain(jax.grad(loss))(w, x)
        >>> [o.flops for o in report.operations if o.primitive == "dot_general"]
        [1024, 1024]
        >>> report.totals.residual_bytes  # cos(x @ w)
        128
    """
    if not callable(func):
        raise TypeError(
            "`mpx.explain(func)` needs a function or a callable PyTree as `func`; "
            f"got {describe(func)}. Pass the arguments to the returned function: "
            "`mpx.explain(func)(*args)`."
        )
    if args or (dtype is not None and not isinstance(dtype, str | np.dtype | type)):
        raise TypeError(
            f"{_CALL} got {describe(args[0] if args else dtype)} besides the "
            "function. Pass the arguments to the returned function: "
            "`mpx.explain(func)(*args)`."
        )
    said = read_weights(weights, _CALL)
    said = weights_of(func) if said is None else said
    if dtype is not None or options:
        func = autocast(func, dtype, weights=said, **options)
    inside, wrap = unwrapped(func)

    def report(*args: PyTree, **kwargs: PyTree) -> Report:
        positions = weights_in_call(inside, said, args, kwargs, _CALL)
        with taking_notes() as unused_rules, first_step():
            try:
                traced = trace(inside, args, kwargs, wrap, positions)
            except AmbientRecipe:  # of a layer outside a transformed function
                around = lambda func: wrap(in_contexts(func))  # noqa: E731
                traced = trace(inside, args, kwargs, around, positions)
            visits, operations = _operations(traced)
            return Report(
                name=name_of(inside),
                operations=operations,
                totals=totals_of(operations, *_residuals(traced)),
                unused_rules=tuple(unused_rules),
                islands=_islands(visits, operations),
            )

    return report


def _residuals(traced: Traced) -> tuple[int | None, str]:
    """Returns the residual bytes, and how they were counted."""
    own = residual_bytes(traced.jaxpr)
    if own is not None:
        return own, "made in the forward pass and read in the backward pass"
    try:
        gradient = trace_gradient(traced)
    # The user's code may raise anything when differentiated.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:120]
        return None, f"not differentiable: {type(error).__name__}: {first}"
    what = "the weights" if any(traced.is_weight) else "the arguments"
    return (
        residual_bytes(gradient) or 0,
        f"saved by a gradient of {what} for its backward pass",
    )


def _operations(traced: Traced) -> tuple[list[Visit[Fact]], tuple[Operation, ...]]:
    flow = Facts()
    inputs = [
        _input_fact(path, is_weight, aval_of(variable))
        for path, is_weight, variable in zip(
            traced.paths, traced.is_weight, traced.jaxpr.jaxpr.invars, strict=True
        )
    ]
    every = walk(traced.jaxpr, inputs, flow)
    visits = [visit for visit in every if not _is_for_others(visit)]
    program = whole_of(traced.jaxpr, visits)
    operations = [
        _operation(number, visit, flow, program) for number, visit in enumerate(visits)
    ]
    for finding, find in OF_A_PROGRAM.items():
        if (number := find(visits, operations)) is not None:
            found = dataclasses.replace(operations[number], finding=finding)
            operations[number] = found
    return visits, tuple(operations)


def _islands(
    visits: Sequence[Visit[Fact]], operations: Sequence[Operation]
) -> tuple[Island, ...]:
    """Returns the recomputed regions, in program order."""
    found: dict[IslandNote, list[Operation]] = {}
    for visit, operation in zip(visits, operations, strict=True):
        for entry in visit.scopes:
            note = read_note(entry.name)
            if isinstance(note, IslandNote) and operation.phase == "forward":
                found.setdefault(note, []).append(operation)
    return tuple(
        Island(
            where=_most(o.where for o in parts),
            primitives=tuple(dict.fromkeys(o.primitive for o in parts)),
            bytes_before=note.before * parts[0].executions,
            bytes_after=note.after * parts[0].executions,
            source=_most(o.source for o in parts),
        )
        for note, parts in found.items()
    )


def _most(texts: Iterable[str]) -> str:
    """Returns the most common text; "" only if there is no other."""
    counts = collections.Counter(text for text in texts if text)
    return max(counts, key=counts.__getitem__, default="")


def _is_for_others(visit: Visit[Fact]) -> bool:
    """Returns whether it is in a branch for another target than the report's."""
    names = [name for name in visit.place.inside if _BRANCH.fullmatch(name)]
    if not names:
        return False
    is_other = names[-1].endswith(OTHERS)
    operation = _fused(visit)
    if operation is not None:
        return is_other == (operation.platform is not None)
    note = innermost_note(visit.scopes) if is_other else None
    return note is not None and note.precision == Precision.LOW.value


# The name of the branches of `jax.lax.platform_dependent`.
_BRANCH = re.compile("cond for .*")


def _fused(visit: Visit[Fact]) -> FusedOperation | None:
    """Returns the fused operation of mpx that it is a part of; None if none."""
    found = [operation_of(entry.name) for entry in visit.scopes]
    return next((operation for operation in reversed(found) if operation), None)


def _input_fact(path: str, is_weight: bool, aval: Aval) -> Fact:
    origin = Origin(f"`{path}`, which is {aval.dtype}")
    return Fact((path,) if is_weight else None, origin)


def _operation(
    number: int, visit: Visit[Fact], flow: Facts, program: Whole
) -> Operation:
    equation, place = visit.equation, visit.place
    entries, frames = visit.scopes, visit.frames
    note = innermost_note(entries)
    leg = leg_of(entries) if is_matmul(equation) else None
    precision, format = precision_and_format(equation, note, leg)
    rule, reason = _decision(visit, flow, note)
    count = flops(equation)
    paths = [p for fact in visit.operands for p in fact.parameters or ()]
    if note is not None and note.weight:
        paths = [note.weight]  # quantizing a weight counts as using it
    return Operation(
        number=number,
        primitive=equation.primitive.name,
        scope=scope_path(entries),
        function=function_path(frames),
        phase=phase(entries),
        leg="" if leg is None else leg.value,
        inside=place.inside,
        inputs=tuple(_type(aval_of(v)) for v in equation.invars),
        outputs=tuple(_type(aval_of(v)) for v in equation.outvars),
        precision=precision,
        format=format,
        rule=rule,
        reason=reason,
        finding=finding_of(Seen(visit, flow, note, precision, program)),
        executions=place.executions,
        unknown_loops=place.unknown_loops,
        flops=None if count is None else count * place.executions,
        bytes=bytes_moved(equation) * place.executions,
        is_cast=is_float_cast(equation),
        parameters=tuple(dict.fromkeys(paths)),
        source=line_text(frames),
        stack=stack_text(frames),
    )


def _type(aval: Aval) -> str:
    if hasattr(aval, "shape") and hasattr(aval, "dtype"):
        return f"{dtype_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"
    return str(aval)


# --- Reasons and findings -------------------------------------------------------------


_KERNELS = (Flops.ATTENTION_FORWARD, Flops.ATTENTION_BACKWARD, Flops.PALLAS)


def _decision(visit: Visit[Fact], flow: Facts, note: Note | None) -> tuple[str, str]:
    """Returns the rule that decided an operation's precision, and the reason."""
    if note is None:
        return "as written", _reason(visit, flow)
    equation = visit.equation
    rule = note.rule or note.kind
    name = equation.primitive.name
    if note.precision == Precision.LOW.value:
        if not is_matmul(equation):
            return QUANTIZES, f"for {note.primitive}: {note.reason}"
        leg = leg_of(visit.scopes)
        if leg is None or leg in note.legs:
            rule = note.rule or LOW
    if is_float_cast(equation) and note.primitive != name:
        return "cast", f"for {note.primitive}: {note.reason}"
    is_whole = is_matmul(equation) or properties(name).flops in _KERNELS
    if not is_whole and _fused(visit) is not None:
        return PART, f"of {note.primitive}"
    if phase(visit.scopes) == "backward":
        return rule, f"derivative of {note.primitive}: {note.reason}"
    return rule, note.reason


def _reason(visit: Visit[Fact], flow: Facts) -> str:
    equation, facts = visit.equation, visit.operands
    if is_float_cast(equation):
        if id(equation) in flow.promotions:
            return "an implicit cast: the other operand is wider"
        return "set by the program"
    promoted = promotion(equation, facts)
    if promoted is not None:
        cause = promoted.cause
        if cause.is_promotion:
            return cause.text
        return f"{promoted.cast.source} promoted by {cause.text}"
    origins = _origins(equation, facts)
    if not origins:
        return ""
    texts = list(dict.fromkeys(origin.text for origin in origins))
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _origins(equation: JaxprEqn, facts: Sequence[Fact]) -> list[Origin]:
    """Returns the origins of floating operands; constants only if all are."""
    found = [
        fact.origin
        for fact, variable in zip(facts, equation.invars, strict=True)
        if jnp.issubdtype(getattr(aval_of(variable), "dtype", bool), jnp.inexact)
    ]
    return but_constants(found)
