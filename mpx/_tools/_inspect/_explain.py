"""`mpx.explain`: every operation of a function, and what it costs."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
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
from ..._program import (
    OTHERS,
    Flops,
    Visit,
    aval_of,
    avals,
    is_along_vmap,
    is_matmul,
    properties,
    walk,
)
from ..._recipe_state import first_step
from ..._settings import Precision, read_weights, unwrapped, weights_in_call, weights_of
from ._costs import bytes_moved, flops, residual_bytes
from ._facts import Fact, Facts, Origin, but_constants, is_float_cast, promotion
from ._findings import (
    FINDING as UNSCALED,
    LARGEST,
    deciding_comparisons,
    dtype_name,
    factored_products,
    hides_a_program,
    precision_and_format,
    rounded_integers,
    unscaled_gradient,
    uses_half,
)
from ._report import HALF, LOW, PART, QUANTIZES, Island, Operation, totals_of
from ._traced import (
    Traced,
    function_path,
    innermost_note,
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


def _operations(
    traced: Traced,
) -> tuple[list[Visit[Fact]], tuple[Operation, ...]]:
    flow = Facts()
    inputs = [
        _input_fact(path, is_weight, aval_of(variable))
        for path, is_weight, variable in zip(
            traced.paths, traced.is_weight, traced.jaxpr.jaxpr.invars, strict=True
        )
    ]
    every = walk(traced.jaxpr, inputs, flow)
    visits = [visit for visit in every if not _is_for_others(visit)]
    is_mixed = any(uses_half(visit.equation) for visit in visits)
    # By `id` of equations, which `traced` keeps alive.
    ends: frozenset[int] = frozenset()
    if is_mixed and any(visit.place.unknown_loops for visit in visits):
        ends = deciding_comparisons(traced.jaxpr.jaxpr)
    rounded = _rounded_products(traced.jaxpr) if is_mixed else {}
    operations = [
        _operation(number, visit, flow, is_mixed, id(visit.equation) in ends, rounded)
        for number, visit in enumerate(visits)
    ]
    slow = next(
        (i for i, v in enumerate(visits) if _is_slow(v) and not operations[i].finding),
        None,
    )
    if slow is not None:  # reported once, at the first
        operations[slow] = dataclasses.replace(operations[slow], finding=_SLOW)
    unscaled = unscaled_gradient(visits)
    if unscaled is not None:
        found = dataclasses.replace(operations[unscaled], finding=UNSCALED)
        operations[unscaled] = found
    return visits, tuple(operations)


def _rounded_products(jaxpr: ClosedJaxpr) -> dict[int, str]:
    """Returns findings of matmuls that must not round, by identity of equations."""
    found = {
        product: f"feeds {name}, which magnifies its rounding: compute it in float32"
        for product, name in factored_products(jaxpr).items()
    }
    for product, short in rounded_integers(jaxpr).items():
        text = f"may round integers: {short} holds those up to {LARGEST[short]}"
        found[product] = text
    return found


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
    number: int,
    visit: Visit[Fact],
    flow: Facts,
    is_mixed: bool,
    ends_loop: bool,
    rounded: Mapping[int, str],
) -> Operation:
    equation, place = visit.equation, visit.place
    entries, frames = visit.scopes, visit.frames
    note = innermost_note(entries)
    precision, format = precision_and_format(equation, note, phase(entries))
    rule, reason = _decision(visit, flow, note)
    finding = _finding(visit, flow, precision) if is_mixed and note is None else ""
    if note is not None and not note.is_switched_off and is_matmul(equation):
        finding = _wide_product(equation)
    if ends_loop:
        finding = "ends a loop by half-precision matmuls"
    if (is_mixed or note is not None) and hides_a_program(equation):
        finding = "contains a program that cannot be inspected"
    is_forward = phase(entries) == "forward"
    if is_forward:
        finding = rounded.get(id(equation)) or finding
    if note is not None and note.without_units and is_forward and is_matmul(equation):
        finding = "quantized, but computed without hardware for it"
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
        inside=place.inside,
        inputs=tuple(_type(aval_of(v)) for v in equation.invars),
        outputs=tuple(_type(aval_of(v)) for v in equation.outvars),
        precision=precision,
        format=format,
        rule=rule,
        reason=reason,
        finding=finding,
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


# Operations that lose precision or range in half precision.
_CRITICAL = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh
    cumlogsumexp cumprod cumsum digamma erf_inv exp exp2 expm1 igamma igamma_grad_a
    igammac lgamma log log1p log2 polygamma polynomial pow random_gamma
    random_gamma_grad reduce_prod reduce_sum reduce_window_sum
    regularized_incomplete_beta rsqrt scatter-add scatter-mul scatter-sub sin sinh sqrt
    tan zeta
    """.split()
)
_KERNELS = (Flops.ATTENTION_FORWARD, Flops.ATTENTION_BACKWARD)


def _decision(visit: Visit[Fact], flow: Facts, note: Note | None) -> tuple[str, str]:
    """Returns the rule that decided an operation's precision, and the reason."""
    if note is None:
        return "as written", _reason(visit, flow)
    equation = visit.equation
    rule = note.rule or note.kind
    name = equation.primitive.name
    if note.precision == Precision.LOW.value:
        rule = note.rule or LOW
        if not is_matmul(equation):
            return QUANTIZES, f"for {note.primitive}: {note.reason}"
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


def _product_in(equation: JaxprEqn) -> str:
    dtypes = dict.fromkeys(str(a.dtype) for a in avals(equation.invars[:2]))
    return f"matmul in {' by '.join(dtypes)}"


_SLOW = "float16 on a CPU, which has no units for it"


def _is_slow(visit: Visit[Fact]) -> bool:
    """Returns whether it is a float16 matmul that autocast emits for a CPU."""
    note = innermost_note(visit.scopes)
    if note is None or note.platform != "cpu" or not is_matmul(visit.equation):
        return False
    return {a.dtype for a in avals(visit.equation.invars[:2])} == {jnp.dtype("float16")}


def _wide_product(equation: JaxprEqn) -> str:
    """Returns the finding of a matmul under autocast, which leaves float64 unchanged.

    With x64, one array of NumPy's default dtype makes a whole program float64.
    """
    is_wide = any(a.dtype == jnp.float64 for a in avals(equation.invars[:2]))
    return _product_in(equation) if is_wide else ""


def _finding(visit: Visit[Fact], flow: Facts, precision: str) -> str:
    """Returns a probable mistake in a program that uses half precision; "" if none."""
    equation, facts = visit.equation, visit.operands
    if promotion(equation, facts) is not None and phase(visit.scopes) == "forward":
        return "half precision promoted"
    if id(equation) in flow.promotions:
        return ""  # said of the operation that it was made for
    if is_matmul(equation) and precision in ("float32", "float64", "mixed"):
        return _product_in(equation)
    if precision not in HALF:
        return ""
    # Sums of one number occur if axes of length 1 are dropped.
    name = equation.primitive.name
    known = properties(name)
    is_range_short = precision == "float16" and name in ("integer_pow", "square")
    is_sum = known.is_sparse or (known.sums and is_along_vmap(equation))
    if (name in _CRITICAL or is_range_short or is_sum) and flops(equation) != 0:
        return f"{name} in {precision}"
    return ""
