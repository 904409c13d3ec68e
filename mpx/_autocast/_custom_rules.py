"""Functions with derivative or batching rules of their own.

The rule belongs to the equation. So the equation is bound in a function, JAX is asked
for the derivative of that function in the declared dtypes, and the program that comes
out, which holds what the user's rule does, is rewritten like any other. The rewritten
function and its rewritten derivative are put together again with the same public
decorator, and nothing of the rule is lost: not what is not differentiable, not a
gradient that is no gradient.

A cotangent has the dtype that its primal has when it runs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import PyTree

from .._ambient_record import trace
from .._jax_compat import (
    bind_equation,
    open_jaxpr,
    own_source_lines,
    symbolic_zero,
)
from .._program import (
    aval_of,
    constants_as_inputs,
    program_of,
    with_lines_of,
    zero_results,
)
from .._recipe_state import StateOperands
from .._typing import AnyArray, Atom, Aval
from ._context import Facts, Place, Run, Value, computed, is_castable
from ._control_flow import (
    as_dtype,
    bind_with_program,
    make_values,
    rewrite_program,
    types_of,
)
from ._demand import UNREAD, Wanted, demand_for
from ._emit import Rewrite, evaluate

_FLOAT0 = jax.dtypes.float0


class _Results:
    """The results of a function that JAX may run in several forms.

    Its value alone, its value with tangents, its value with residuals: all must have
    the dtypes of the form that ran first.
    """

    def __init__(self) -> None:
        self.facts: tuple[Facts, ...] | None = None
        self._avals: tuple[Aval, ...] = ()

    def settle(self, values: list[Value]) -> list[AnyArray]:
        if self.facts is None:
            # A parameter that comes back is a result like any other.
            self._avals = tuple(jax.typeof(v.array) for v in values)
            self.facts = tuple(v.facts for v in values)
        pairs = zip(values, self._avals, strict=True)
        return [as_dtype(v, aval.dtype).array for v, aval in pairs]

    def values(self, arrays: Sequence[AnyArray]) -> list[Value]:
        assert self.facts is not None
        return [Value(x, f) for x, f in zip(arrays, self.facts, strict=True)]

    def demands(self, otherwise: Wanted, half: np.dtype) -> Wanted:
        if self.facts is None:
            return otherwise
        return tuple(demand_for(aval, half) for aval in self._avals)


def _is_inexact(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _declared_avals(arrays: Sequence[AnyArray], variables: Sequence[Atom]) -> list[Any]:
    """The types of arrays if each had its declared dtype."""
    return [
        jax.typeof(x).update(dtype=aval_of(v).dtype) if is_castable(aval_of(v)) else x
        for x, v in zip(arrays, variables, strict=True)
    ]


def _merged(
    args: Sequence[PyTree], positions: Sequence[int], new: Sequence[Any]
) -> PyTree:
    args = list(args)
    for i, x in zip(positions, new, strict=True):
        args[i] = x
    return args


def _own(place: Place) -> Place:
    """The place inside: what the rule computes is not ours to quantize."""
    return dataclasses.replace(place, has_own_rule=True, reach=())


def rewrite_custom_jvp(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A function with a rule for its tangents."""
    place, later = _own(place), run.for_later()
    facts = tuple(v.facts for v in operands)
    jaxpr = program_of(equation)
    is_float = [_is_inexact(aval_of(v)) for v in equation.outvars]
    form = _Results()

    @jax.custom_jvp
    def function(*arrays: AnyArray) -> list[AnyArray]:
        values = make_values(arrays, facts)
        return form.settle(evaluate(later(), place, jaxpr, values, demands))

    @_explaining_leaks(equation)
    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        active = [
            i
            for i, t in enumerate(tangents)
            # Integers have tangents of float0, which are none.
            if not isinstance(t, SymbolicZero) and t.dtype != _FLOAT0
        ]
        _refuse_active_constants(equation, active)

        def derivative(args: PyTree, dots: PyTree) -> PyTree:
            def original(*new: PyTree) -> list[AnyArray]:
                return bind_equation(equation, *_merged(args, active, new))

            out, out_dots = jax.jvp(original, [args[i] for i in active], list(dots))
            return out, [d for d, f in zip(out_dots, is_float, strict=True) if f]

        variables = [equation.invars[i] for i in active]
        dots = [tangents[i] for i in active]
        avals = _declared_avals(primals, equation.invars)
        closed = _traced(equation, derivative, avals, _declared_avals(dots, variables))
        _refuse_leaks(later(), equation, closed)
        inside = [*make_values(primals, facts), *map(computed, dots)]
        wanted = form.demands(demands, place.settings.dtype)
        # A tangent has the dtype of its primal.
        wanted += tuple(w for w, f in zip(wanted, is_float, strict=True) if f)
        results = evaluate(later(), place, closed, inside, wanted)
        out = form.settle(results[: len(is_float)])
        are_zero = zero_results(closed.jaxpr)[len(is_float) :]
        out_dots = iter(zip(results[len(is_float) :], are_zero, strict=True))
        return out, [
            _tangent(*next(out_dots), x) if f else np.zeros(x.shape, _FLOAT0)
            for x, f in zip(out, is_float, strict=True)
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return form.values(function(*(v.array for v in operands)))


def _traced(
    equation: JaxprEqn, func: Callable[..., PyTree], *args: PyTree
) -> ClosedJaxpr:
    """The program of what runs a user's rule: operations have the lines of the rule.

    Those that JAX adds, and a backward pass, have the lines of the call.
    """
    with own_source_lines():
        return with_lines_of(trace(func)(*args), equation)


def _tangent(value: Value, is_zero: bool, primal: AnyArray) -> AnyArray | SymbolicZero:
    """A tangent in the dtype of its primal, or JAX's sign that there is none."""
    if is_zero:
        return SymbolicZero(jax.typeof(primal).to_tangent_aval())
    return as_dtype(value, primal.dtype).array


def rewrite_custom_vjp(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A function with a rule for its cotangents.

    What the rule is told of its operands and results, whether they are differentiated,
    is what JAX says of those of the new function.

    Invariants, each of which a library that was tried depends on: only operands that
    are differentiated are, so `symbolic_zeros` stays true of the others (Equinox's
    `filter_custom_vjp` asserts it, and with it all of Diffrax); a cotangent that is
    known to be zero comes in, and goes out, as such; and the rule is traced in the
    declared dtypes, since it may ask for them.
    """
    place, later = _own(place), run.for_later()
    facts = tuple(v.facts for v in operands)
    jaxpr = program_of(equation)
    form = _Results()

    @jax.custom_vjp
    def function(*arrays: AnyArray) -> list[AnyArray]:
        values = make_values(arrays, facts)
        return form.settle(evaluate(later(), place, jaxpr, values, demands))

    @_explaining_leaks(equation)
    def forward(*primals: Any) -> PyTree:
        arrays = [primal.value for primal in primals]
        active = [
            i
            for i, (primal, v) in enumerate(zip(primals, equation.invars, strict=True))
            if primal.perturbed and _is_inexact(aval_of(v))
        ]
        _refuse_active_constants(equation, active)
        closed, tree = _traced_forward(equation, arrays, active)
        _refuse_leaks(later(), equation, closed)
        count = len(equation.outvars)
        residual_avals = closed.out_avals[count:]
        wanted = form.demands(demands, place.settings.dtype) + (UNREAD,) * len(
            residual_avals
        )
        results = evaluate(later(), place, closed, make_values(arrays, facts), wanted)
        residuals = results[count:]
        saved = _Saved(
            [v.array for v in residuals],
            tree,
            tuple(residual_avals),
            tuple(v.facts for v in residuals),
            tuple((i, jax.typeof(arrays[i])) for i in active),
        )
        return form.settle(results[:count]), saved

    @_explaining_leaks(equation)
    def backward(saved: "_Saved", cotangents: PyTree) -> PyTree:
        given = [c for c in cotangents if not isinstance(c, SymbolicZero)]
        closed = _traced_backward(equation, saved, cotangents)
        _refuse_leaks(later(), equation, closed)
        inside = [*make_values(saved.arrays, saved.facts), *map(computed, given)]
        half = place.settings.dtype
        wanted = tuple(demand_for(aval, half) for _, aval in saved.active)
        results = evaluate(later(), place, closed, inside, wanted)
        found: list[AnyArray | None] = [None] * len(equation.invars)
        for (i, aval), value, is_zero in zip(
            saved.active, results, zero_results(closed.jaxpr), strict=True
        ):
            found[i] = None if is_zero else as_dtype(value, aval.dtype).array
        return tuple(found)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return form.values(function(*(v.array for v in operands)))


def _traced_forward(
    equation: JaxprEqn, arrays: Sequence[AnyArray], active: Sequence[int]
) -> tuple[Any, Any]:
    """The program of results and residuals, and how to make a pullback of the latter.

    Only what is `active` is differentiated.
    """
    trees: list[Any] = []

    def declared(*args: PyTree) -> PyTree:
        def original(*new: PyTree) -> list[AnyArray]:
            return bind_equation(equation, *_merged(args, active, new))

        out, pullback = jax.vjp(original, *(args[i] for i in active))
        residuals, tree = jax.tree.flatten(pullback)
        trees[:] = [tree]
        return out, residuals

    closed = _traced(equation, declared, *_declared_avals(arrays, equation.invars))
    return closed, trees[0]


def _traced_backward(equation: JaxprEqn, saved: "_Saved", cotangents: PyTree) -> PyTree:
    """The program of a pullback, given the cotangents that are not known to be zero."""
    pairs = list(zip(cotangents, equation.outvars, strict=True))
    pairs = [(None if isinstance(c, SymbolicZero) else c, v) for c, v in pairs]

    def declared(residuals: PyTree, given: Any) -> PyTree:
        given = iter(given)
        full = [
            symbolic_zero(aval_of(v)) if c is None else next(given) for c, v in pairs
        ]
        return jax.tree.unflatten(saved.tree, residuals)(full)

    given = [c for c, _ in pairs if c is not None]
    variables = [v for c, v in pairs if c is not None]
    arrays = _retyped(saved.arrays, saved.avals)
    return _traced(equation, declared, arrays, _declared_avals(given, variables))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["tree", "avals", "facts", "active"],
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the forward pass leaves to the backward pass.

    The arrays that the pullback holds, how to put it together, the types and facts of
    the arrays, and of the operands that are differentiated the positions and types.
    """

    arrays: list[AnyArray]
    tree: Any
    avals: tuple[Aval, ...]
    facts: tuple[Facts, ...]
    active: tuple[tuple[int, Aval], ...]


def _retyped(arrays: Sequence[AnyArray], avals: Sequence[Aval]) -> list[Any]:
    """The types of arrays, with the dtypes of other types of the same shapes."""
    return [
        jax.typeof(x).update(dtype=a.dtype) if is_castable(a) else x
        for x, a in zip(arrays, avals, strict=True)
    ]


def _refuse_active_constants(equation: JaxprEqn, active: Sequence[int]) -> None:
    """Raises where a function closes over what is differentiated.

    JAX knows no derivative by it: the rule gives none.
    """
    if all(i >= equation.params["num_consts"] for i in active):
        return
    raise ValueError(
        f"`mpx.autocast` met the function {_named(equation)}, whose derivative rule "
        "is its own, and which closes over an array that is differentiated. The rule "
        "gives no derivative by that array. Make it an argument of the function."
    )


_LEAK = "The derivative rule of the function "


@contextlib.contextmanager
def _explaining_leaks(equation: JaxprEqn) -> Iterator[None]:
    """Says which function has a rule that needs an array which is no more."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        if str(error).startswith(_LEAK):  # of a function inside
            raise
        raise _leak(equation) from error


def _refuse_leaks(run: Run, equation: JaxprEqn, closed: ClosedJaxpr) -> None:
    """Raises where the program of a rule holds what the function was traced with.

    Under `jax.jit` JAX takes it for an array of the function around, and says much
    later, or not at all where a program is compiled ahead of time, that it is none.
    """
    traced = [found for found in (ref() for ref in run.traced) if found is not None]
    if any(constant is array for constant in closed.consts for array in traced):
        raise _leak(equation)


def _leak(equation: JaxprEqn) -> jax.errors.UnexpectedTracerError:
    return jax.errors.UnexpectedTracerError(
        f"{_LEAK}{_named(equation)} closes over an array of the function around it. "
        "`mpx.autocast` runs the rule when the function around it has been traced, as "
        "`jax.checkpoint` and `jax.grad` of a jitted function do, and then the array "
        "is no more. Make it an argument of the function with the rule."
    )


def _named(equation: JaxprEqn) -> str:
    """The name of a function with a rule, and where it stands."""
    info = open_jaxpr(program_of(equation)).debug_info
    name, _, place = info.func_src_info.partition(" at ")
    return f"`{name}` at {place}" if place else f"`{name}`"


def rewrite_custom_vmap(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A function with a rule for `vmap`."""
    place, later = _own(place), run.for_later()
    facts = tuple(v.facts for v in operands)
    jaxpr = program_of(equation)
    form = _Results()

    @jax.custom_batching.custom_vmap
    def function(*arrays: AnyArray) -> list[AnyArray]:
        values = make_values(arrays, facts)
        return form.settle(evaluate(later(), place, jaxpr, values, demands))

    @function.def_vmap
    def rule(axis_size: int, in_batched: Any, *arrays: AnyArray) -> PyTree:
        axes = [0 if b else None for b in in_batched]
        original: Callable[..., PyTree] = lambda *args: bind_equation(equation, *args)  # noqa: E731
        batched = jax.vmap(original, in_axes=axes, axis_size=axis_size)
        closed = _traced(equation, batched, *_declared_avals(arrays, equation.invars))
        inside = make_values(arrays, facts)
        wanted = form.demands(demands, place.settings.dtype)
        results = evaluate(later(), place, closed, inside, wanted)
        out = form.settle(results)
        return out, [True] * len(out)

    return form.values(function(*(v.array for v in operands)))


def rewrite_remat_opt(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A forward rule, in whose place the function itself runs if that is enough.

    So JAX does with `defvjp(..., optimize_remat=True)` where nobody needs what the rule
    saves, as in the forward pass of something that is recomputed.
    """
    place, later = _own(place), run.for_later()
    params = equation.params
    count, saved = params["num_consts"], params["num_res"]
    nothing, types = StateOperands(()), types_of(operands)
    made, facts = rewrite_program(
        run, place, params["fwd_jaxpr"], types, demands, nothing
    )
    jaxpr, constants = constants_as_inputs(made)
    results = made.out_avals[saved:]
    dtypes = tuple(aval.dtype for aval in results)
    own = types_of(operands[count:])

    @functools.cache
    def alone() -> tuple[Any, Sequence[Any]]:
        closed = core.ClosedJaxpr(*params["fun_jaxpr_thunk"]())
        half = place.settings.dtype
        wanted = tuple(demand_for(aval, half) for aval in results)
        found, _ = rewrite_program(later(), place, closed, own, wanted, nothing, dtypes)
        return open_jaxpr(found), found.consts

    new = {
        "fwd_jaxpr": jaxpr,
        "fun_jaxpr_thunk": alone,
        "num_consts": count + len(constants),
    }
    arrays = [*constants, *(v.array for v in operands)]
    return bind_with_program(equation, new, facts, arrays)


REWRITES: dict[str, Rewrite] = {
    "custom_jvp_call": rewrite_custom_jvp,
    "custom_vjp_call": rewrite_custom_vjp,
    "custom_vmap_call": rewrite_custom_vmap,
    "remat_opt": rewrite_remat_opt,
}
