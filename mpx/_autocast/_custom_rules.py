"""Functions with custom derivative or batching rules.

The rule belongs to the equation. So the equation is bound in a function, and JAX
computes the derivative of that function in the declared dtypes. The resulting program,
which contains the user's rule, is rewritten like any other. The rewritten function and
its rewritten derivative are combined by the same public decorator. So nothing of the
rule is lost: neither its refusals to differentiate, nor values that are not gradients.

A cotangent has the dtype that its primal has at run time.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import PyTree

from .._base.jax_compat import (
    bind_equation,
    open_jaxpr,
    own_source_lines,
    symbolic_zero,
)
from .._base.typing import AnyArray, Aval, Program
from .._program import (
    aval_of,
    avals,
    constants_as_inputs,
    distinct_equations,
    is_inexact,
    is_proportional,
    program_of,
    with_lines_of,
    zero_results,
)
from .._recipe_state import NOTHING_KNOWN, StateOperands
from .._settings import trace
from ._context import Facts, Run, Value, computed, is_castable
from ._control_flow import (
    as_dtype,
    bind_with_program,
    make_values,
    rewrite_program,
    types_of,
)
from ._decide import Case
from ._demand import UNREAD, Demand, Wanted, demands_for, demands_of
from ._emit import Rewrite, evaluate
from ._unscaled_rules import ask_for_scale, is_settled, unscaled

_FLOAT0 = jax.dtypes.float0


def rules_of_users(program: Program) -> list[JaxprEqn]:
    """Returns the calls of functions whose VJP rule may need the loss scale."""
    return [
        equation
        for equation in distinct_equations(program)
        if equation.primitive.name == "custom_vjp_call"
        and not is_settled(equation, _OwnRule.function)
    ]


class _OwnRule:
    """A rewritten function with a custom rule.

    It outlives the run that it is made in, and holds neither the run nor operands. JAX
    may run it in several forms (value only, value with tangents, value with residuals),
    and all must have the dtypes of the form that ran first.
    """

    def __init__(self, case: Case) -> None:
        self.later = case.run.for_later()
        # Nothing inside the rule is quantized.
        self.place = dataclasses.replace(case.place, has_own_rule=True, reach=())
        self.equation, self._wanted = case.equation, case.demands
        self.facts = tuple(v.facts for v in case.operands)
        self._result_facts: tuple[Facts, ...] | None = None
        self._avals: tuple[Aval, ...] = ()

    def function(self, *arrays: AnyArray) -> list[AnyArray]:
        """Computes its value only."""
        values = make_values(arrays, self.facts)
        return self.settle(
            self.evaluated(program_of(self.equation), values, self._wanted)
        )

    def settled(self, *arrays: AnyArray) -> list[AnyArray]:
        """Does the same, under a name by which `is_settled` finds the rule handled."""
        return self.function(*arrays[: len(self.facts)])

    def called(
        self, function: Callable[..., Any], case: Case, *more: AnyArray
    ) -> list[Value]:
        """Calls the new function, and returns the values of its results."""
        arrays = function(*(v.array for v in case.operands), *more)
        assert self._result_facts is not None
        return [Value(x, f) for x, f in zip(arrays, self._result_facts, strict=True)]

    def evaluated(
        self, program: Program, values: list[Value], wanted: Wanted
    ) -> list[Value]:
        """Evaluates a program of this function, rewritten."""
        run = self.later()
        # It must not contain the arrays of the function around it.
        with run.at_step(NOTHING_KNOWN):
            return evaluate(run, self.place, program, values, wanted)

    def traced(self, func: Callable[..., PyTree], *args: PyTree) -> ClosedJaxpr:
        """Traces the user's rule; its operations keep their own source lines.

        Operations that JAX adds, and a backward pass, get the lines of the call.
        """
        with own_source_lines():
            closed = with_lines_of(trace(func)(*args), self.equation)
        _refuse_leaks(self.later(), self.equation, closed)
        return closed

    def bound(self, args: PyTree, active: Sequence[int]) -> Callable[..., Any]:
        """Returns the original function of its differentiated arguments only."""

        def original(*new: PyTree) -> list[AnyArray]:
            whole = list(args)
            for i, x in zip(active, new, strict=True):
                whole[i] = x
            return bind_equation(self.equation, *whole)

        return original

    def settle(self, values: list[Value]) -> list[AnyArray]:
        """Casts results to the dtypes of the form that ran first."""
        if self._result_facts is None:
            # A parameter that is returned is a result like any other.
            self._avals = tuple(jax.typeof(v.array) for v in values)
            self._result_facts = tuple(v.facts for v in values)
        pairs = zip(values, self._avals, strict=True)
        return [as_dtype(v, aval.dtype).array for v, aval in pairs]

    def wanted(self) -> Wanted:
        """Returns the demands on its results: their dtypes once a form has run."""
        if self._result_facts is None:
            return self._wanted
        return demands_for(self._avals, self.place.settings.dtype)


def _retyped(arrays: Sequence[AnyArray], avals: Sequence[Aval]) -> list[Any]:
    """Returns the types of arrays, in the dtypes of other types of the same shapes."""
    return [
        jax.typeof(x).update(dtype=a.dtype) if is_castable(a) else x
        for x, a in zip(arrays, avals, strict=True)
    ]


def rewrite_custom_jvp(case: Case) -> list[Value]:
    """Rewrites a function with a JVP rule."""
    own, equation = _OwnRule(case), case.equation
    is_float = [is_inexact(aval_of(v)) for v in equation.outvars]
    function = jax.custom_jvp(own.function)

    @_explaining_leaks(equation)
    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        active = [
            i
            for i, t in enumerate(tangents)
            # Tangents of integers are float0, and have no value.
            if not isinstance(t, SymbolicZero) and t.dtype != _FLOAT0
        ]
        _refuse_active_constants(equation, active)

        def derivative(args: PyTree, dots: PyTree) -> PyTree:
            given = [args[i] for i in active]
            out, out_dots = jax.jvp(own.bound(args, active), given, list(dots))
            return out, [d for d, f in zip(out_dots, is_float, strict=True) if f]

        dots, avals_in = [tangents[i] for i in active], avals(equation.invars)
        types = _retyped(dots, [avals_in[i] for i in active])
        closed = own.traced(derivative, _retyped(primals, avals_in), types)
        inside = [*make_values(primals, own.facts), *map(computed, dots)]
        wanted = own.wanted()
        # A tangent has the dtype of its primal.
        wanted += tuple(w for w, f in zip(wanted, is_float, strict=True) if f)
        results = own.evaluated(closed, inside, wanted)
        out = own.settle(results[: len(is_float)])
        are_zero = zero_results(closed.jaxpr)[len(is_float) :]
        out_dots = iter(zip(results[len(is_float) :], are_zero, strict=True))
        return out, [
            _tangent(*next(out_dots), x) if f else np.zeros(x.shape, _FLOAT0)
            for x, f in zip(out, is_float, strict=True)
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return own.called(function, case)


def _tangent(value: Value, is_zero: bool, primal: AnyArray) -> AnyArray | SymbolicZero:
    """Returns a tangent in the dtype of its primal, or JAX's symbolic zero."""
    if is_zero:
        return SymbolicZero(jax.typeof(primal).to_tangent_aval())
    return as_dtype(value, primal.dtype).array


def rewrite_custom_vjp(case: Case) -> list[Value]:
    """Rewrites a function with a VJP rule.

    The rule sees which operands and results are differentiated, as JAX determines it
    for the new function.

    Invariants, each needed by a library that was tried: only differentiated operands
    are perturbed, so `symbolic_zeros` stays true of the others (Equinox's
    `filter_custom_vjp` asserts it, and with it all of Diffrax); a cotangent that is
    known to be zero stays symbolic on its way in and out; and the rule is traced in the
    declared dtypes, since it may read them.
    """
    case = case._replace(operands=_for_kernels(case))
    own, equation = _OwnRule(case), case.equation
    is_done = is_settled(equation, _OwnRule.function)
    more = () if is_done or case.run.scale is None else (case.run.scale,)
    function = jax.custom_vjp(own.settled if is_done or more else own.function)

    @_explaining_leaks(equation)
    def forward(*primals: Any) -> PyTree:
        count = len(equation.invars)
        # The scale, only for the derivative that is also taken by the scale.
        scale = [primal.value for primal in primals[count:] if primal.perturbed]
        primals = primals[:count]
        arrays = [primal.value for primal in primals]
        active = [
            i
            for i, (primal, v) in enumerate(zip(primals, equation.invars, strict=True))
            if primal.perturbed and is_inexact(aval_of(v))
        ]
        _refuse_active_constants(equation, active)
        closed, tree = _traced_forward(own, arrays, active)
        count = len(equation.outvars)
        residual_avals = closed.out_avals[count:]
        wanted = own.wanted() + (UNREAD,) * len(residual_avals)
        results = own.evaluated(closed, make_values(arrays, own.facts), wanted)
        residuals = results[count:]
        saved = _Saved(
            [v.array for v in residuals],
            tree,
            tuple(residual_avals),
            tuple(v.facts for v in residuals),
            tuple((i, jax.typeof(arrays[i])) for i in active),
            scale,
        )
        return own.settle(results[:count]), saved

    @_explaining_leaks(equation)
    def backward(saved: "_Saved", cotangents: PyTree) -> PyTree:
        given = [c for c in cotangents if not isinstance(c, SymbolicZero)]
        closed = _traced_backward(own, saved, cotangents)
        if not is_done and not more:
            ask_for_scale(closed, len(given))
        if saved.scale and not is_proportional(closed, len(given)):
            arrays = unscaled(closed, saved.arrays, given, *saved.scale)
            results = list(map(computed, arrays))
        else:
            inside = [*make_values(saved.arrays, saved.facts), *map(computed, given)]
            wanted = demands_for((a for _, a in saved.active), own.place.settings.dtype)
            results = own.evaluated(closed, inside, wanted)
        found: list[AnyArray | None] = [None] * len(equation.invars)
        for (i, aval), value, is_zero in zip(
            saved.active, results, zero_results(closed.jaxpr), strict=True
        ):
            found[i] = None if is_zero else as_dtype(value, aval.dtype).array
        return (*found, *(None for _ in more))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return own.called(function, case, *more)


def _for_kernels(case: Case) -> list[Value]:
    """Returns operands, rounded already where a Pallas kernel inside reads them so.

    Otherwise the backward pass would save them in float32.
    """
    program, settings = program_of(case.equation), case.settings
    if "pallas_call" not in {e.primitive.name for e in distinct_equations(program)}:
        return case.operands
    are_declared = tuple(v.facts.is_declared for v in case.operands)
    ahead = demands_of(case.run, settings, program, are_declared, case.demands)
    return [
        computed(v.cast(settings.dtype)) if d == Demand.HALF else v
        for v, d in zip(case.operands, ahead.inputs, strict=True)
    ]


def _traced_forward(
    own: _OwnRule, arrays: Sequence[AnyArray], active: Sequence[int]
) -> tuple[ClosedJaxpr, Any]:
    """Traces results and residuals; returns also the tree that makes a pullback.

    Only `active` arguments are differentiated.
    """
    trees: list[Any] = []

    def declared(*args: PyTree) -> PyTree:
        out, pullback = jax.vjp(own.bound(args, active), *(args[i] for i in active))
        residuals, tree = jax.tree.flatten(pullback)
        trees[:] = [tree]
        return out, residuals

    return own.traced(declared, *_retyped(arrays, avals(own.equation.invars))), trees[0]


def _traced_backward(own: _OwnRule, saved: "_Saved", cotangents: PyTree) -> ClosedJaxpr:
    """Traces a pullback, given the cotangents that are not known to be zero."""
    are_given = [not isinstance(c, SymbolicZero) for c in cotangents]
    pairs = list(zip(are_given, avals(own.equation.outvars), strict=True))

    def declared(residuals: PyTree, given: Any) -> PyTree:
        given = iter(given)
        full = [next(given) if is_in else symbolic_zero(a) for is_in, a in pairs]
        return jax.tree.unflatten(saved.tree, residuals)(full)

    given = [c for c, is_in in zip(cotangents, are_given, strict=True) if is_in]
    types = _retyped(given, [aval for is_in, aval in pairs if is_in])
    return own.traced(declared, _retyped(saved.arrays, saved.avals), types)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "scale"],
    meta_fields=["tree", "avals", "facts", "active"],
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The residuals that the forward pass saves for the backward pass.

    They are the arrays in the pullback, with their tree, types and facts; the positions
    and types of the differentiated operands; and the loss scale, if the rule may need
    it.
    """

    arrays: list[AnyArray]
    tree: Any
    avals: tuple[Aval, ...]
    facts: tuple[Facts, ...]
    active: tuple[tuple[int, Aval], ...]
    scale: list[AnyArray]


def _refuse_active_constants(equation: JaxprEqn, active: Sequence[int]) -> None:
    """Raises if a function closes over a differentiated array.

    The rule has no derivative with respect to it.
    """
    if all(i >= equation.params["num_consts"] for i in active):
        return
    raise ValueError(
        f"`mpx.autocast` found the function {_named(equation)}, which has a custom "
        "derivative rule and closes over a differentiated array. The rule has no "
        "derivative with respect to that array. Make it an argument of the function."
    )


_LEAK = "The derivative rule of the function "


@contextlib.contextmanager
def _explaining_leaks(equation: JaxprEqn) -> Iterator[None]:
    """Names the function whose rule needs an array that no longer exists."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        if str(error).startswith(_LEAK):  # of a function inside
            raise
        raise _leak(equation) from error


def _refuse_leaks(run: Run, equation: JaxprEqn, closed: ClosedJaxpr) -> None:
    """Raises if the program of a rule contains a tracer of the finished outer trace.

    Under `jax.jit` JAX takes it for an array of the function around, and raises much
    later, or not at all where a program is compiled ahead of time.
    """
    traced = [found for found in (ref() for ref in run.traced) if found is not None]
    if any(constant is array for constant in closed.consts for array in traced):
        raise _leak(equation)


def _leak(equation: JaxprEqn) -> jax.errors.UnexpectedTracerError:
    return jax.errors.UnexpectedTracerError(
        f"{_LEAK}{_named(equation)} closes over an array of the function around it. "
        "`mpx.autocast` runs the rule after the function around it was traced, as "
        "`jax.checkpoint` and `jax.grad` of a jitted function do, and then the "
        "array no longer exists. Make it an argument of the function with the rule."
    )


def _named(equation: JaxprEqn) -> str:
    """Returns the name of a function with a rule, and its source line."""
    info = open_jaxpr(program_of(equation)).debug_info
    name, _, place = info.func_src_info.partition(" at ")
    return f"`{name}` at {place}" if place else f"`{name}`"


def rewrite_custom_vmap(case: Case) -> list[Value]:
    """Rewrites a function with a rule for `vmap`."""
    own, equation = _OwnRule(case), case.equation
    function = jax.custom_batching.custom_vmap(own.function)

    @function.def_vmap
    def rule(axis_size: int, in_batched: Any, *arrays: AnyArray) -> PyTree:
        axes = [0 if b else None for b in in_batched]
        original = functools.partial(bind_equation, equation)
        batched = jax.vmap(original, axes, axis_size=axis_size)
        closed = own.traced(batched, *_retyped(arrays, avals(equation.invars)))
        inside = make_values(arrays, own.facts)
        out = own.settle(own.evaluated(closed, inside, own.wanted()))
        return out, [True] * len(out)

    return own.called(function, case)


def rewrite_remat_opt(case: Case) -> list[Value]:
    """Rewrites a forward rule that is replaced by the function where that is enough.

    JAX does so with `defvjp(..., optimize_remat=True)` where the rule's residuals are
    not needed, as in the forward pass of a recomputed region.
    """
    own, params, operands = _OwnRule(case), case.equation.params, case.operands
    count, saved = params["num_consts"], params["num_res"]
    nothing, types = StateOperands(()), types_of(operands)
    made, facts = rewrite_program(
        case.run, own.place, params["fwd_jaxpr"], types, case.demands, nothing
    )
    jaxpr, constants = constants_as_inputs(made)
    results, of_function = made.out_avals[saved:], types_of(operands[count:])
    dtypes = tuple(aval.dtype for aval in results)

    @functools.cache
    def alone() -> tuple[Any, Sequence[Any]]:
        closed = core.ClosedJaxpr(*params["fun_jaxpr_thunk"]())
        wanted = demands_for(results, own.place.settings.dtype)
        found, _ = rewrite_program(
            own.later(), own.place, closed, of_function, wanted, nothing, dtypes
        )
        return open_jaxpr(found), found.consts

    new = {
        "fwd_jaxpr": jaxpr,
        "fun_jaxpr_thunk": alone,
        "num_consts": count + len(constants),
    }
    arrays = [*constants, *(v.array for v in operands)]
    return bind_with_program(case.equation, new, facts, arrays)


REWRITES: dict[str, Rewrite] = {
    "custom_jvp_call": rewrite_custom_jvp,
    "custom_vjp_call": rewrite_custom_vjp,
    "custom_vmap_call": rewrite_custom_vmap,
    "remat_opt": rewrite_remat_opt,
}
