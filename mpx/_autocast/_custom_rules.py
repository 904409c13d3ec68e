"""Functions with derivative or batching rules of their own.

The rule belongs to the equation. So the equation is bound in a function, JAX is asked
for the derivative of that function in the declared dtypes, and the program that comes
out, which holds what the user's rule does, is rewritten like any other. The rewritten
function and its rewritten derivative are put together again with the same public
decorator, and nothing of the rule is lost: not what is not differentiable, not a
gradient that is no gradient.

A cotangent has the dtype that its primal has when it runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jax_compat import bind_equation
from ._control_flow import as_dtype, enter, evaluate_closed
from ._interpreter import Rewrite
from ._plan import Wish, program_of, wish_for
from ._region import trace
from ._settings import Place, Run
from ._values import Facts, Value, computed, is_castable

_FLOAT0 = jax.dtypes.float0


class _Results:
    """The results of a function that JAX may run in several forms.

    Its value alone, its value with tangents, its value with residuals: all must have
    the dtypes of the form that ran first.
    """

    def __init__(self) -> None:
        self.facts: tuple[Facts, ...] | None = None
        self._dtypes: tuple[Any, ...] = ()

    def settle(self, values: list[Value]) -> list[Any]:
        if self.facts is None:
            # A parameter that comes back is a result like any other.
            self._dtypes = tuple(v.dtype for v in values)
            self.facts = tuple(
                v.facts._replace(literal=None, is_broadcast=False) for v in values
            )
        return [as_dtype(v, d).array for v, d in zip(values, self._dtypes, strict=True)]

    def values(self, arrays: Sequence[Any]) -> list[Value]:
        assert self.facts is not None
        return [Value(x, f) for x, f in zip(arrays, self.facts, strict=True)]

    def wishes(self, otherwise: tuple[Wish, ...]) -> tuple[Wish, ...]:
        if self.facts is None:
            return otherwise
        return tuple(map(wish_for, self._dtypes))


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _declared_avals(arrays: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The types of arrays if each had its declared dtype."""
    return [
        jax.typeof(x).update(dtype=v.aval.dtype) if is_castable(v.aval) else x
        for x, v in zip(arrays, variables, strict=True)
    ]


def _merged(args: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> Any:
    args = list(args)
    for i, x in zip(positions, new, strict=True):
        args[i] = x
    return args


def _own(place: Place) -> Place:
    """The place inside: what the rule computes is not ours to quantize."""
    return dataclasses.replace(place, has_own_rule=True, ends=())


def rewrite_custom_jvp(
    run: Run, place: Place, equation: Any, operands: list[Value], wishes: Any
) -> list[Value]:
    """A function with a rule for its tangents."""
    place = _own(place)
    facts = tuple(v.facts for v in operands)
    jaxpr = program_of(equation)
    is_float = [_is_inexact(v.aval) for v in equation.outvars]
    form = _Results()

    @jax.custom_jvp
    def function(*arrays: Any) -> list[Any]:
        values = enter(arrays, facts)
        return form.settle(evaluate_closed(run, place, jaxpr, values, wishes))

    def rule(primals: Any, tangents: Any) -> Any:
        active = [
            i
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero) and t.dtype != _FLOAT0
        ]

        def derivative(args: Any, dots: Any) -> Any:
            def original(*new: Any) -> list[Any]:
                return bind_equation(equation, *_merged(args, active, new))

            out, out_dots = jax.jvp(original, [args[i] for i in active], list(dots))
            return out, [d for d, f in zip(out_dots, is_float, strict=True) if f]

        variables = [equation.invars[i] for i in active]
        dots = [tangents[i] for i in active]
        closed = trace(derivative)(
            _declared_avals(primals, equation.invars), _declared_avals(dots, variables)
        )
        inside = [*enter(primals, facts), *map(computed, dots)]
        wanted = form.wishes(wishes)
        # A tangent has the dtype of its primal.
        wanted += tuple(w for w, f in zip(wanted, is_float, strict=True) if f)
        results = evaluate_closed(run, place, closed, inside, wanted)
        out = form.settle(results[: len(is_float)])
        out_dots = iter(results[len(is_float) :])
        return out, [
            as_dtype(next(out_dots), x.dtype).array if f else np.zeros(x.shape, _FLOAT0)
            for x, f in zip(out, is_float, strict=True)
        ]

    function.defjvp(rule, symbolic_zeros=True)
    return form.values(function(*(v.array for v in operands)))


def rewrite_custom_vjp(
    run: Run, place: Place, equation: Any, operands: list[Value], wishes: Any
) -> list[Value]:
    """A function with a rule for its cotangents."""
    place = _own(place)
    facts = tuple(v.facts for v in operands)
    jaxpr = program_of(equation)
    is_float = [_is_inexact(v.aval) for v in equation.outvars]
    active = [i for i, v in enumerate(equation.invars) if _is_inexact(v.aval)]
    form = _Results()

    @jax.custom_vjp
    def function(*arrays: Any) -> list[Any]:
        values = enter(arrays, facts)
        return form.settle(evaluate_closed(run, place, jaxpr, values, wishes))

    def forward(*arrays: Any) -> Any:
        trees: list[Any] = []

        def declared(*args: Any) -> Any:
            def original(*new: Any) -> list[Any]:
                return bind_equation(equation, *_merged(args, active, new))

            out, pullback = jax.vjp(original, *(args[i] for i in active))
            residuals, tree = jax.tree.flatten(pullback)
            trees[:] = [tree]
            return out, residuals

        closed = trace(declared)(*_declared_avals(arrays, equation.invars))
        residual_avals = closed.out_avals[len(is_float) :]
        wanted = form.wishes(wishes) + (Wish.ANY,) * len(residual_avals)
        inside = enter(arrays, facts)
        results = evaluate_closed(run, place, closed, inside, wanted)
        out = form.settle(results[: len(is_float)])
        residuals = results[len(is_float) :]
        saved = _Saved(
            [v.array for v in residuals],
            trees[0],
            tuple(residual_avals),
            tuple(v.facts for v in residuals),
            tuple(x.dtype for x in arrays),
        )
        return out, saved

    def backward(saved: "_Saved", cotangents: Any) -> Any:
        residuals = saved.arrays

        def declared(residuals: Any, given: Any) -> Any:
            given = iter(given)
            full = [
                next(given) if f else np.zeros(v.aval.shape, _FLOAT0)
                for f, v in zip(is_float, equation.outvars, strict=True)
            ]
            return jax.tree.unflatten(saved.tree, residuals)(full)

        given = [c for c, f in zip(cotangents, is_float, strict=True) if f]
        variables = [v for v, f in zip(equation.outvars, is_float, strict=True) if f]
        closed = trace(declared)(
            _retyped(residuals, saved.avals), _declared_avals(given, variables)
        )
        inside = [*enter(residuals, saved.facts), *map(computed, given)]
        dtypes = [saved.dtypes[i] for i in active]
        wanted = tuple(map(wish_for, dtypes))
        results = evaluate_closed(run, place, closed, inside, wanted)
        found: list[Any] = [None] * len(saved.dtypes)
        for i, value, dtype in zip(active, results, dtypes, strict=True):
            found[i] = as_dtype(value, dtype).array
        return tuple(found)

    function.defvjp(forward, backward)
    return form.values(function(*(v.array for v in operands)))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["tree", "avals", "facts", "dtypes"],
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the forward pass leaves to the backward pass.

    The arrays that the pullback holds, how to put it together, the types and facts of
    the arrays, and the dtypes of the function's operands.
    """

    arrays: list[Any]
    tree: Any
    avals: Any
    facts: Any
    dtypes: Any


def _retyped(arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """The types of arrays, with the dtypes of other types of the same shapes."""
    return [
        jax.typeof(x).update(dtype=a.dtype) if is_castable(a) else x
        for x, a in zip(arrays, avals, strict=True)
    ]


def rewrite_custom_vmap(
    run: Run, place: Place, equation: Any, operands: list[Value], wishes: Any
) -> list[Value]:
    """A function with a rule for `vmap`."""
    place = _own(place)
    facts = tuple(v.facts for v in operands)
    jaxpr = program_of(equation)
    form = _Results()

    @jax.custom_batching.custom_vmap
    def function(*arrays: Any) -> list[Any]:
        values = enter(arrays, facts)
        return form.settle(evaluate_closed(run, place, jaxpr, values, wishes))

    @function.def_vmap
    def rule(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        axes = [0 if b else None for b in in_batched]
        original: Callable[..., Any] = lambda *args: bind_equation(equation, *args)  # noqa: E731
        batched = jax.vmap(original, in_axes=axes, axis_size=axis_size)
        closed = trace(batched)(*_declared_avals(arrays, equation.invars))
        inside = enter(arrays, facts)
        wanted = form.wishes(wishes)
        results = evaluate_closed(run, place, closed, inside, wanted)
        out = form.settle(results)
        return out, [True] * len(out)

    return form.values(function(*(v.array for v in operands)))


REWRITES: dict[str, Rewrite] = {
    "custom_jvp_call": rewrite_custom_jvp,
    "custom_vjp_call": rewrite_custom_vjp,
    "custom_vmap_call": rewrite_custom_vmap,
}
