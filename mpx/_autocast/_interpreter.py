"""Emitting a program again, equation by equation, each in its precision.

`evaluate` walks one jaxpr. Equations that hold a program of their own are rewritten by
the functions that the run was given (`_control_flow`, `_custom_rules`); everything else
is bound here, after casting its operands to what `choose` says.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._jax_compat import bind_equation, equation_context, scope_names
from ._choice import Choice, choose, is_join_of_declared
from ._classes import PrimitiveClass, class_of
from ._decisions import CastMade, Decision, Precision, Reason
from ._notes import noted
from ._plan import MOVES, Plan, Wish, plan
from ._settings import Place, Run
from ._values import (
    FULL,
    Colour,
    Facts,
    Value,
    computed,
    constant,
    declared,
    is_castable,
    literal,
)

Rewrite = Callable[[Run, Place, Any, list[Value], tuple[Wish, ...]], list[Value]]


def evaluate(
    run: Run,
    place: Place,
    jaxpr: Any,
    consts: Sequence[Any],
    operands: Sequence[Value],
    results: tuple[Wish, ...],
) -> list[Value]:
    """Emits a program again.

    Args:
        run: The run.
        place: Where the program stands.
        jaxpr: The program.
        consts: The arrays that it holds.
        operands: Its inputs.
        results: What is wanted of each of its results.

    Returns:
        Its results.
    """
    are_declared = tuple(v.facts.colour is Colour.DECLARED for v in operands)
    ahead = plan(run, jaxpr, are_declared, results)
    values: dict[Any, Value] = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, array in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = constant(array, parameter="")

    def read(atom: Any) -> Value:
        return literal(atom.val) if isinstance(atom, core.Literal) else values[atom]

    for index, equation in enumerate(jaxpr.eqns):
        inputs = [read(atom) for atom in equation.invars]
        with equation_context(equation):
            outputs = _emit(run, place, index, equation, inputs, ahead)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _emit(
    run: Run,
    place: Place,
    index: int,
    equation: Any,
    operands: list[Value],
    ahead: Plan,
) -> list[Value]:
    name = equation.primitive.name
    wishes = tuple(map(ahead.wish, equation.outvars))
    rewrite = run.rewrites.get(name)
    if rewrite is not None:
        if run.needs_scopes:
            place = place.within(scope_names(equation))
        choice = Choice(PrimitiveClass.RECURSE, Reason.RECURSES)
        results = rewrite(run, place.inside(index), equation, operands, wishes)
        _record(run, place, index, equation, choice, operands, (), results)
        return results
    if name == "convert_element_type":
        with noted(name, Choice(PrimitiveClass.CONVERT, Reason.CONVERTED)):
            return _emit_convert(run, place, index, equation, operands)
    if name in MOVES:
        with noted(name, Choice(class_of(name, FULL), Reason.MOVES)):
            return _emit_move(run, place, index, equation, operands)
    if is_join_of_declared(equation, operands):
        choice = Choice(class_of(name, run.settings.dtype), Reason.MOVES)
        with noted(name, choice):
            arrays = _declared_arrays(equation, operands)
            bound = bind_equation(equation, *arrays)
        results = [
            Value(x, Facts(Colour.DECLARED)) if is_castable(v.aval) else computed(x)
            for x, v in zip(bound, equation.outvars, strict=True)
        ]
        _record(run, place, index, equation, choice, operands, (), results)
        return results
    wish = Wish.ANY
    for one in wishes:
        wish |= one
    choice = choose(run, equation, operands, wish)
    with noted(name, choice):
        return emit_as(run, place, index, equation, operands, choice)


def emit_as(
    run: Run,
    place: Place,
    index: int,
    equation: Any,
    operands: list[Value],
    choice: Choice,
) -> list[Value]:
    """Emits an equation in the precision that was chosen for it."""
    arrays, casts = [], []
    for i, (value, atom) in enumerate(zip(operands, equation.invars, strict=True)):
        if not is_castable(atom.aval):
            arrays.append(value.array)
            continue
        target = atom.aval.dtype if choice.dtype is None else choice.dtype
        array, is_shared = _spread(equation, value, target).cast(target)
        arrays.append(array)
        if run.decisions is not None and array is not value.array:
            if not value.is_constant:
                casts.append(CastMade(i, value.dtype, target, is_shared))
    if choice.result is not None:
        bound = [_product(equation, arrays, choice.dtype, choice.result)]
    elif equation.primitive.name.startswith("scatter"):
        bound = [_scatter(equation, arrays)]
    else:
        bound = bind_equation(equation, *arrays)
    results = [_result(equation, x, choice) for x in bound]
    _record(
        run, place, index, equation, choice, operands, tuple(casts), results, arrays
    )
    return results


# Elementwise operations whose operands JAX broadcasts along axes of size one.
_BROADCASTING = frozenset("add add_any sub mul div max min".split())


def _spread(equation: Any, value: Value, target: Any) -> Value:
    """A declared value that will be cast, broadcast to what it meets.

    Before the cast: the gradient of a bias is a sum over the batch, which then runs in
    float32.
    """
    if (
        equation.primitive.name not in _BROADCASTING
        or value.facts.colour is not Colour.DECLARED
        or value.is_constant
        or value.dtype == target
    ):
        return value
    shape = equation.outvars[0].aval.shape
    if value.array.shape == shape or value.array.ndim != len(shape):
        return value
    axes = tuple(range(len(shape)))
    array = jax.lax.broadcast_in_dim(value.array, shape, axes)
    return Value(array, value.facts)


def _result(equation: Any, array: Any, choice: Choice) -> Value:
    if equation.primitive.name == "iota":
        return declared(array)
    return computed(array, is_product=choice.result is not None)


def _product(
    equation: Any, arrays: list[Any], dtype: Any, result: np.dtype
) -> jax.Array:
    """A product of half precision operands.

    A product that gives float32 would have backward products of float32 with half
    precision operands. So it is a product in half that is widened: XLA, which may keep
    more digits than it was asked for, drops the narrowing between the two.
    """
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    (half,) = bind_equation(equation.replace(params=params), *arrays)
    return half if half.dtype == result else jax.lax.convert_element_type(half, result)


_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def _scatter(equation: Any, arrays: list[Any]) -> jax.Array:
    """Emits a scatter, which holds a program of its own in the declared dtype."""
    params = equation.params
    scatter = _SCATTERS.get(equation.primitive.name)
    if scatter is None or arrays[0].dtype == equation.invars[0].aval.dtype:
        return bind_equation(equation, *arrays)[0]
    operand, indices, updates = arrays
    return scatter(
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )


def _emit_move(
    run: Run, place: Place, index: int, equation: Any, operands: list[Value]
) -> list[Value]:
    """Moves data in whatever precision it comes."""
    bound = bind_equation(equation, *(v.array for v in operands))
    is_parallel = len(bound) == len(operands)
    results = []
    for i, (array, variable) in enumerate(zip(bound, equation.outvars, strict=True)):
        source = operands[i] if is_parallel else operands[0]
        if not is_castable(variable.aval):
            results.append(computed(array))
            continue
        facts = source.facts
        if array.size > source.array.size and facts.colour is Colour.DECLARED:
            facts = facts._replace(is_broadcast=True)
        results.append(Value(array, facts))
    choice = Choice(class_of(equation.primitive.name, FULL), Reason.MOVES)
    _record(run, place, index, equation, choice, operands, (), results)
    return results


def _emit_convert(
    run: Run, place: Place, index: int, equation: Any, operands: list[Value]
) -> list[Value]:
    """A cast of the user's own."""
    (value,), target = operands, equation.params["new_dtype"]
    from_aval, to_aval = equation.invars[0].aval, equation.outvars[0].aval
    choice = Choice(PrimitiveClass.CONVERT, Reason.CONVERTED)
    if not is_castable(from_aval) or not is_castable(to_aval):
        (array,) = bind_equation(equation, value.array)
        is_number = jax.numpy.issubdtype(from_aval.dtype, jax.numpy.integer)
        is_number = is_number or from_aval.dtype == np.bool_
        result = declared(array) if is_number else computed(array)
    elif from_aval.dtype == target and equation.params.get("sharding") is None:
        result = value
    elif from_aval.dtype == target:
        params = {**equation.params, "new_dtype": value.dtype}
        (array,) = bind_equation(equation.replace(params=params), value.array)
        result = Value(array, value.facts)
    else:
        array, _ = value.cast(target)
        colour = Colour.FULL if target == FULL else Colour.HALF
        facts = value.facts._replace(colour=colour, is_broadcast=False)
        if facts.literal is not None:
            facts = facts._replace(colour=Colour.DECLARED, is_broadcast=True)
        result = Value(array, facts, value.is_constant)
    _record(run, place, index, equation, choice, operands, (), [result])
    return [result]


def _declared_arrays(equation: Any, operands: list[Value]) -> list[Any]:
    return [
        v.cast(atom.aval.dtype)[0] if is_castable(atom.aval) else v.array
        for v, atom in zip(operands, equation.invars, strict=True)
    ]


def _record(
    run: Run,
    place: Place,
    index: int,
    equation: Any,
    choice: Choice,
    operands: list[Value],
    casts: tuple[CastMade, ...],
    results: list[Value],
    arrays: list[Any] | None = None,
) -> None:
    if run.decisions is None:
        return
    inputs = [v.array for v in operands] if arrays is None else arrays
    precision = choice.precision
    if choice.reason in (Reason.MOVES, Reason.CONVERTED) and results:
        dtype = results[0].dtype
        if is_castable(equation.outvars[0].aval):
            precision = Precision.FULL if dtype == FULL else Precision.HALF
    run.decisions[place.path, index] = Decision(
        primitive=equation.primitive.name,
        primitive_class=choice.kind,
        precision=precision,
        reason=choice.reason,
        scopes=place.scopes + scope_names(equation),
        equation=equation,
        in_dtypes=tuple(x.dtype for x in inputs),
        out_dtypes=tuple(v.dtype for v in results),
        casts=casts,
        executions=place.executions,
        is_bounded=place.is_bounded,
        parameters=tuple(v.facts.parameter or None for v in operands),
    )
