"""Emitting a program again, equation by equation, each in its precision.

`evaluate` walks one program. Equations that hold a program of their own are rewritten
by the functions that the run was given (`_control_flow`, `_custom_rules`); islands are
emitted by `_rematerialize`; everything else is bound here, after casting its operands
to what `_decide` says.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._jax_compat import (
    bind_equation,
    equation_context,
    is_differentiated,
    open_jaxpr,
    scope_names,
)
from .._program import (
    Island,
    PrimitiveClass,
    aval_of,
    avals,
    class_of,
    count,
    parts,
    properties,
)
from .._rules import Precision, Rule
from .._typing import AnyArray, Atom, Aval
from ._context import (
    FLOAT16,
    FULL,
    UNUSED,
    Facts,
    Place,
    Provenance,
    Run,
    Value,
    computed,
    constant,
    declared,
    is_castable,
    literal,
)
from ._decide import Case, Choice, Reason, choose, ruled
from ._demand import Demand, Demands, Wanted, demands_of
from ._notes import note_other, noted, refuse_accident, refuse_unknown
from ._products import emit_quantized, quantized, reach_in
from ._rematerialize import Values, emit_island
from ._travel import (
    moved_later,
    product_of_weight,
    summed_weight,
    travelled_weight,
)

Rewrite = Callable[[Run, Place, JaxprEqn, list[Value], tuple[Demand, ...]], list[Value]]


def evaluate(
    run: Run,
    place: Place,
    program: Jaxpr | ClosedJaxpr,
    operands: Sequence[Value],
    results: Wanted,
) -> list[Value]:
    """Emits a program again.

    Args:
        run: The run.
        place: Where the program stands.
        program: The program.
        operands: Its inputs.
        results: What is wanted of each of its results.

    Returns:
        Its results.
    """
    jaxpr, consts = open_jaxpr(program), getattr(program, "consts", ())
    are_declared = tuple(v.facts.provenance is Provenance.DECLARED for v in operands)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, results)
    reach = reach_in(jaxpr, place.reach) if place.reach else {}
    values: Values = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, array in zip(jaxpr.constvars, consts, strict=True):
        # A parameter without a path, so no data: a recipe quantizes no product with it,
        # and a vector may be a bias.
        values[variable] = constant(array, parameter="")

    def emit(place: Place, equation: JaxprEqn, values: Values) -> None:
        inputs = [_read(values, atom) for atom in equation.invars]
        with equation_context(equation):
            here = place.inside(equation, run.needs_scopes)
            if run.has_recipe and not place.has_own_rule:
                found = tuple(reach.get(v, UNUSED) for v in equation.outvars)
                here = dataclasses.replace(here, reach=found)
            outputs = _emit(run, here, equation, inputs, ahead)
        if any(value.dtype == FLOAT16 for value in outputs):
            run.used.add(FLOAT16)
        values.update(zip(equation.outvars, outputs, strict=True))

    for part in _parts(run, place, jaxpr, values, ahead.residuals):
        if isinstance(part, Island):
            emit_island(run, place, part, values, ahead, emit)
        else:
            emit(place, part, values)
    return [_read(values, atom) for atom in jaxpr.outvars]


def _read(values: Values, atom: Atom) -> Value:
    return literal(atom.val) if isinstance(atom, Literal) else values[atom]


def _parts(
    run: Run, place: Place, jaxpr: Jaxpr, values: Values, residuals: frozenset[Var]
) -> Sequence[JaxprEqn | Island]:
    """The equations of a program, those of islands together."""
    is_whole = place.has_own_rule or place.is_recomputed
    if is_whole or place.settings.residuals is None:
        return jaxpr.eqns

    kinds = ("small", "fast outside") if place.is_in_loop else ("small",)

    def may_join(equation: JaxprEqn) -> bool:
        settings = place.settings.at(scope_names(equation))
        is_ours = settings.is_enabled or run.only_recomputes
        is_asked_for = is_ours and settings.residuals in kinds
        is_stream = any(v in residuals for v in equation.outvars)
        return is_asked_for and not is_stream and not is_differentiated(equation)

    weights = [v for v in jaxpr.invars if values[v].facts.is_weight]
    return parts(jaxpr, weights, may_join)


def _emit(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], ahead: Demands
) -> list[Value]:
    name = equation.primitive.name
    demands = tuple(map(ahead.demand, equation.outvars))
    rewrite = run.rewrites.get(name)
    if rewrite is not None:
        rule = place.settings.rules._find_for_program(name)
        if rule is None:
            return rewrite(run, place, equation, operands, demands)
        run.used.add(rule)
        note_other(run, place, equation)
        choice = Choice(PrimitiveClass.RECURSE, Reason.RULE, rule=rule)
        with noted(name, choice):
            return emit_operation(equation, operands, choice)
    number = _number(equation, operands)
    if number is not None:
        return [number]
    if name == "convert_element_type":
        with noted(name, Choice(PrimitiveClass.CONVERT, Reason.CONVERTED)):
            return [_convert(place, equation, operands[0])]
    known = properties(name)
    if known.moves:
        travelled = moved_later(equation, operands)
        if travelled is None:
            travelled = travelled_weight(place, equation, operands, demands)
        if travelled is not None:
            with noted(name, Choice(class_of(name, FULL), Reason.MOVES)):
                return [travelled]
        with noted(name, Choice(class_of(name, FULL), Reason.MOVES)):
            moved = _move(equation, operands)
            if place.settings.residual_stream != "half":
                return moved
            begins = any(v in ahead.beginnings for v in equation.outvars)
            return [_rounded(place, v) for v in moved] if begins else moved
    if known.joins and _are_declared(equation, operands):
        with noted(name, Choice(class_of(name, FULL), Reason.MOVES)):
            return _join(equation, operands)
    demand = Demand.ANY
    for one in demands:
        demand |= one
    first = equation.outvars[0] if equation.outvars else None
    is_residual, is_scaling = first in ahead.residuals, first in ahead.scalings
    case = Case(place, equation, operands, demand, is_residual, is_scaling)
    return _emit_case(run, case)


# Rounded to the nearest by IEEE 754 wherever they run.
_ARITHMETIC = {
    "abs": np.abs,
    "add": np.add,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "sub": np.subtract,
}


def _number(equation: JaxprEqn, operands: list[Value]) -> Value | None:
    """The number that arithmetic on numbers of the program gives, such as `1 - rate`.

    Left to the program it would be a value that was computed in float32, and what it
    meets would be computed in float32, too.
    """
    function = _ARITHMETIC.get(equation.primitive.name)
    if function is None or not all(v.is_constant for v in operands):
        return None
    with np.errstate(all="ignore"):
        return literal(function(*(np.asarray(v.array) for v in operands)))


def _emit_case(run: Run, case: Case) -> list[Value]:
    """Decides on one operation and binds it.

    A recipe has its say last, for it takes only what would be a product in half
    precision, or what a rule asks for by `Precision.LOW`.
    """
    case, rule = ruled(run, case)
    if rule is not None and not isinstance(rule.precision, Precision):
        note_other(run, case.place, case.equation)
        kind = class_of(case.name, case.settings.dtype)
        with noted(case.name, Choice(kind, Reason.RULE, rule=rule)):
            return _rewritten_by(rule, case)
    choice = choose(case, rule)
    is_asked_for = rule is not None and rule.precision is Precision.LOW
    if is_asked_for or choice.reason is Reason.PRODUCT:
        choice = quantized(run, case, choice, is_asked_for)
        if is_asked_for and choice.recipe is None:
            choice = choice._replace(reason=Reason.PRODUCT, rule=None)
    if choice.dtype == FLOAT16:
        run.used.add(FLOAT16)
    if case.settings.is_strict:
        refuse_unknown(case, choice)
        refuse_accident(case, choice)
    if choice.recipe is not None:
        return emit_quantized(run, case, choice)
    note_other(run, case.place, case.equation)
    with noted(case.name, choice):
        weight = summed_weight(case, choice)
        if weight is not None:
            return [product_of_weight(case, choice, weight)]
        return emit_operation(case.equation, case.operands, choice)


def _rewritten_by(rule: Rule, case: Case) -> list[Value]:
    """Binds an equation to what the user's function says.

    A result that autocast cannot carry on, such as half precision in the place of
    float64, goes back to the dtype that the program declares.
    """
    operands = [v.array for v in case.operands]
    arrays, params = rule._rewritten(case.candidate, operands)
    equation = case.equation.replace(params=params)
    results = []
    for x, variable in zip(
        bind_equation(equation, *arrays), case.equation.outvars, strict=True
    ):
        if not (is_castable(aval_of(variable)) and is_castable(jax.typeof(x))):
            declared_dtype = aval_of(variable).dtype
            if x.dtype != declared_dtype:
                x = jax.lax.convert_element_type(x, declared_dtype)
        results.append(computed(x))
    return results


def _are_declared(equation: JaxprEqn, operands: list[Value]) -> bool:
    return all(
        v.facts.provenance is Provenance.DECLARED
        for v, atom in zip(operands, equation.invars, strict=True)
        if is_castable(aval_of(atom))
    )


def _rounded(place: Place, value: Value) -> Value:
    """The beginning of a residual stream that is to be in half precision."""
    is_half = place.settings.is_enabled and is_castable(jax.typeof(value.array))
    return computed(value.cast(place.settings.dtype)[0]) if is_half else value


def _join(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Puts declared values side by side: the result is one, too."""
    bound = bind_equation(equation, *(v.array for v in operands))
    weights = [v for v in operands if v.facts.is_weight]
    facts = Facts(Provenance.DECLARED, is_weight=bool(weights))
    slots = weights[0].slots if weights else None
    return [
        Value(x, facts, slots=slots) if is_castable(aval_of(v)) else computed(x)
        for x, v in zip(bound, equation.outvars, strict=True)
    ]


def _move(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Moves data in whatever precision it comes."""
    name = equation.primitive.name
    known = properties(name)
    # Bound, a number would be an array like any other, and unknown.
    if name == "stop_gradient" and operands[0].is_constant:
        return operands
    bound = bind_equation(equation, *(v.array for v in operands))
    # Several operands give one result where the others say what is moved, and as many
    # results where each is moved by itself (`optimization_barrier`).
    is_parallel = len(bound) == len(operands)
    results = []
    for i, (array, variable) in enumerate(zip(bound, equation.outvars, strict=True)):
        source = operands[i] if is_parallel else operands[0]
        if not is_castable(aval_of(variable)):
            results.append(computed(array))
            continue
        facts = source.facts
        # Only this makes a bias of a vector. A lookup in a small table, too, gives more
        # numbers than the table has, and yet is the beginning of a residual stream.
        if known.repeats and count(array.shape) > count(source.array.shape):
            facts = facts._replace(is_broadcast=True)
        slots = source.slots
        if name == "gather":  # rows of a table are data, whoever learned them
            facts = facts._replace(is_broadcast=False, parameter=None, is_weight=False)
            slots = None
        results.append(Value(array, facts, slots=slots))
    return results


def _convert(place: Place, equation: JaxprEqn, value: Value) -> Value:
    """A cast of the user's own."""
    if not place.settings.is_enabled:
        choice = Choice(PrimitiveClass.CONVERT, Reason.REGION)
        return emit_operation(equation, [value], choice)[0]
    target = equation.params["new_dtype"]
    from_aval, to_aval = avals((equation.invars[0], equation.outvars[0]))
    if not is_castable(from_aval) or not is_castable(to_aval):
        (array,) = bind_equation(equation, value.array)
        # Masks, positions, labels: like arguments they may become half at each use.
        # `_demand` knows of it.
        is_number = jax.numpy.issubdtype(from_aval.dtype, jax.numpy.integer)
        is_number = is_number or from_aval.dtype == np.bool_
        return declared(array) if is_number else computed(array)
    if from_aval.dtype == target:
        # A cast to what the program has already does not undo what was chosen: half
        # precision stays so.
        if equation.params.get("sharding") is None:
            return value
        params = {**equation.params, "new_dtype": value.dtype}
        (array,) = bind_equation(equation.replace(params=params), value.array)
        return Value(array, value.facts, slots=value.slots)
    array, _ = value.cast(target)
    provenance = Provenance.FULL if target == FULL else Provenance.HALF
    facts = value.facts._replace(provenance=provenance, is_broadcast=False)
    if facts.literal is not None:
        facts = facts._replace(provenance=Provenance.DECLARED, is_broadcast=True)
    result = Value(array, facts, value.is_constant, value.slots)
    if target == FULL:
        result.widened_by, result.narrow = equation, value.array
    elif value.facts.is_weight and value.dtype == FULL:
        result.wide = value
    return result


# --- Binding one equation in the precision that was chosen ----------------------------


def emit_operation(
    equation: JaxprEqn, operands: list[Value], choice: Choice
) -> list[Value]:
    """Casts operands and binds an equation.

    Args:
        equation: The equation.
        operands: Its operands.
        choice: What was chosen for it.

    Returns:
        Its results.
    """
    arrays = [
        _operand(equation, value, aval_of(atom), choice)
        for value, atom in zip(operands, equation.invars, strict=True)
    ]
    if choice.dtype is not None and choice.result is not None:
        return [_product(equation, arrays, choice.dtype, choice.result)]
    if equation.primitive.name in _SCATTERS:
        bound = [_scatter(equation, arrays)]
    else:
        bound = bind_equation(equation, *arrays)
    if equation.primitive.name == "iota":
        # Positions were not computed in float32, and make nothing float32 that meets
        # them.
        return [declared(x) for x in bound]
    values = [
        v
        for v, atom in zip(operands, equation.invars, strict=True)
        if is_castable(aval_of(atom))
    ]
    is_fixed = bool(values) and all(map(_is_fixed, values))
    results = [computed(x, is_fixed=is_fixed) for x in bound]
    weights = [v for v in values if v.facts.is_weight] if is_fixed else []
    if weights:
        for result in results:
            result.facts = result.facts._replace(is_weight=True)
            result.slots = weights[0].slots
    if is_fixed and all(v.facts.is_broadcast for v in values):
        for result in results:
            result.facts = result.facts._replace(is_broadcast=True)
    return results


def _is_fixed(value: Value) -> bool:
    facts = value.facts
    return facts.is_fixed or facts.parameter is not None or facts.literal is not None


def _operand(equation: JaxprEqn, value: Value, aval: Aval, choice: Choice) -> AnyArray:
    if not is_castable(aval):
        return value.array
    target = aval.dtype if choice.dtype is None else choice.dtype
    return _spread(equation, value, target).cast(target)[0]


def _spread(equation: JaxprEqn, value: Value, target: np.dtype) -> Value:
    """A declared value that will be cast, broadcast to what it meets.

    JAX broadcasts the operands of binary operations along axes of size one. Before the
    cast: the gradient of a bias is a sum over the batch, which then runs in float32.
    """
    if (
        not properties(equation.primitive.name).is_binary
        or value.facts.provenance is not Provenance.DECLARED
        or value.is_constant
        or value.dtype == target
    ):
        return value
    result = aval_of(equation.outvars[0])
    shape, sharding = result.shape, result.sharding
    if value.array.shape == shape or value.array.ndim != len(shape):
        return value
    axes = tuple(range(len(shape)))
    # Where types know of shardings, one of none would have its gradient gathered.
    place = sharding if sharding.mesh.explicit_axes else None
    array = jax.lax.broadcast_in_dim(value.array, shape, axes, out_sharding=place)
    return Value(array, value.facts, slots=value.slots)


def _product(
    equation: JaxprEqn, arrays: list[AnyArray], dtype: np.dtype, result: np.dtype
) -> Value:
    """A product of operands in half precision, or of float32 ones if a rule says so.

    A product of half precision operands that gives float32 would have backward products
    of float32 with half precision operands, and XLA's CPU compiler (jaxlib 0.10.2)
    knows not all of them. So a result that is wanted in float32 is a product in half
    that is widened. XLA may drop the narrowing between the two (it does on CPUs), or
    write half as many bytes (on GPUs). The gradient of a ViT block has the same error
    both ways, 3.0e-3.
    """
    params = dict(equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    (half,) = bind_equation(equation.replace(params=params), *arrays)
    if half.dtype == result:
        return computed(half, is_product=True)
    made = computed(jax.lax.convert_element_type(half, result), is_product=True)
    made.narrow = half
    return made


_SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def _scatter(equation: JaxprEqn, arrays: list[AnyArray]) -> AnyArray:
    """Emits a scatter, which holds a program of its own in the declared dtype."""
    if arrays[0].dtype == aval_of(equation.invars[0]).dtype:
        return bind_equation(equation, *arrays)[0]
    params = equation.params
    operand, indices, updates = arrays
    return _SCATTERS[equation.primitive.name](
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
