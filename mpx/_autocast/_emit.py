"""Emits a program again, equation by equation, each in its precision.

`evaluate` walks one program. Equations that contain a program are rewritten by the
functions of the run (`_control_flow`, `_loops`, `_custom_rules`); islands are emitted
by `_rematerialize`; everything else is bound here, after its operands are cast as
`_decide` chose.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence, Set

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._base.jax_compat import (
    bind_equation,
    equation_context,
    is_differentiated,
    open_jaxpr,
    scope_names,
)
from .._base.typing import AnyArray, Atom
from .._program import (
    Island,
    PrimitiveClass,
    aval_of,
    count,
    in_cpu_form,
    is_along_vmap,
    parts,
    properties,
    with_factor,
    with_flat_gradient,
    with_gradients_at_once,
    with_half_blocks,
)
from .._settings import Precision, Rule
from ._context import (
    FLOAT16,
    FULL,
    Facts,
    Place,
    Run,
    Tap,
    Usage,
    Value,
    computed,
    declared,
    is_castable,
    literal,
    stream,
    tapped,
)
from ._decide import Case, Choice, Reason, apply_rules, choose, noted, refuse_unknown
from ._demand import Demand, Wanted, blocks_in_half, demands_of, operands_in_half
from ._products import choose_recipe, emit_quantized
from ._reach import CONSTANT, UNUSED, Origin, reach_in
from ._rematerialize import (
    Site,
    Values,
    emit_island,
    for_readers,
    of_float32,
    read_by_one,
)
from ._rewrites import (
    SCATTERS,
    converted,
    finds_one_in_each_row,
    handed_on,
    look_up,
    scatter,
    sum_in_float32,
    with_rounded_gradient,
)
from ._stacks import cast_stacks, emit_wide, widened
from ._travel import (
    MARKS,
    asks_for_half_sums,
    moved_later,
    moved_payload,
    note_origins,
    product_of_weight,
    travelled_weight,
)

Rewrite = Callable[[Case], list[Value]]
_FIXED = frozenset((CONSTANT, Origin.WEIGHT))


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
        place: The place of the program.
        program: The program.
        operands: Its inputs.
        results: The demand on each of its results.

    Returns:
        Its results.
    """
    jaxpr, consts = open_jaxpr(program), getattr(program, "consts", ())
    are_declared = tuple(v.facts.is_declared for v in operands)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, results)
    reach = reach_in(jaxpr, place.reach) if place.reach else {}
    values: Values = dict(zip(jaxpr.invars, operands, strict=True))
    if ahead.moved_weights:
        values.update(cast_stacks(run, place, values, ahead))
    stored = {v for v, is_stored in ahead.handed.items() if is_stored}
    ends = ahead.residuals | ahead.sums | ahead.unbiased | stored
    found = _parts(run, place, jaxpr, values, ends)
    alone = read_by_one(found, ahead)
    for variable in jaxpr.invars:
        values[variable] = for_readers(variable, values[variable], ahead, alone)
    for variable, array in zip(jaxpr.constvars, consts, strict=True):
        # A parameter without a path, so not data: its products are not quantized.
        values[variable] = declared(array, parameter="")

    def emit(place: Place, equation: JaxprEqn, values: Values) -> None:
        inputs = [_read(values, atom) for atom in equation.invars]
        with equation_context(equation):
            here = place.inside(equation, run.uses.scopes)
            if place.reach and not place.has_own_rule:
                found = tuple(reach.get(v, UNUSED) for v in equation.outvars)
                here = dataclasses.replace(here, reach=found)
            demands = ahead.wanted(equation, here.settings.dtype)
            case = Case(run, here, equation, inputs, demands, ahead)
            outputs = handed_on(case, _emit(case))
            if here.has_wide_loop:
                outputs = widened(outputs)
            if run.uses.recipes:
                note_origins(case, outputs)
            pairs = zip(equation.outvars, outputs, strict=True)
            outputs = [for_readers(v, value, ahead, alone) for v, value in pairs]
        if FLOAT16 in [value.dtype for value in outputs]:
            run.note(Usage(computes_float16=True))
        values.update(zip(equation.outvars, outputs, strict=True))

    site = Site(run, place, ahead, values, emit)
    for part in found:
        if isinstance(part, Island):
            emit_island(site, part)
        else:
            emit(place, part, values)
    return [_read(values, atom) for atom in jaxpr.outvars]


def evaluate_within(case: Case, program: Jaxpr | ClosedJaxpr) -> list[Value]:
    """Emits an equation's program in the place of the equation."""
    return evaluate(case.run, case.place, program, case.operands, case.demands)


def _read(values: Values, atom: Atom) -> Value:
    return literal(atom.val) if isinstance(atom, Literal) else values[atom]


def _parts(
    run: Run, place: Place, jaxpr: Jaxpr, values: Values, ends: Set[Atom]
) -> Sequence[JaxprEqn | Island]:
    """Returns the equations of a program, with islands grouped."""
    if place.has_own_rule or place.is_recomputed or place.settings.residuals is None:
        return jaxpr.eqns
    words = ("small", "loops") if place.is_in_loop else ("small",)

    def may_join(equation: JaxprEqn) -> bool:
        settings = place.settings.at(scope_names(equation))
        is_ours = settings.is_enabled or run.only_recomputes
        is_asked_for = is_ours and settings.residuals in words
        is_end = any(v in ends for v in equation.outvars)
        return is_asked_for and not is_end and not is_differentiated(equation)

    weights = [v for v in jaxpr.invars if values[v].facts.is_weight]
    return parts(jaxpr, weights, may_join)


def _emit(case: Case) -> list[Value]:
    run, equation, settings = case.run, case.equation, case.settings
    rewrite = run.rewrites.get(case.name)
    if rewrite is not None:
        rule = settings.rules._find_for_program(case.name)
        if rule is None:
            operands = [v.as_float32() if v.is_shared else v for v in case.operands]
            return rewrite(case._replace(operands=operands))
        run.note(Usage(rules=frozenset((rule,))))
        choice = Choice(PrimitiveClass.RECURSE, Reason.RULE, rule=rule)
        with _noted(case, choice):
            return _emit_operation(case, choice)
    known = properties(case.name)
    if known.kind is PrimitiveClass.CONVERT:
        with _noted(case, Choice(known.kind, Reason.CONVERTED)):
            if settings.is_enabled:
                return [converted(equation, case.operands[0])]
            return _emit_operation(case, Choice(known.kind, Reason.REGION))
    is_declared = known.joins and all(v.facts.is_declared for v in case.castable)
    if known.moves or is_declared:
        with _noted(case, Choice(known.kind, Reason.MOVES)):
            return _emit_move(case) if known.moves else _join(case)
    if (scaled := _scaled_already(case)) is not None:
        with _noted(case, Choice(known.kind, Reason.SCALED, scaled.dtype)):
            return [scaled]
    results = _biased(case) or _emit_decided(case)
    if any(v in case.ahead.unbiased for v in equation.outvars):
        results[0].summands = case.operands
    if any(v in case.ahead.sums for v in equation.outvars):
        results[0].facts = results[0].facts._replace(is_stored_in_half=True)
    if settings.has_half_stream and known.kind is PrimitiveClass.FULL:
        return [stream(v.array) if v.is_computed_in_half else v for v in results]
    return results


def _scaled_already(case: Case) -> Value | None:
    """Returns the matmul that is multiplied here, if it was multiplied already."""
    if not any(v in case.ahead.scaled for v in case.equation.outvars):
        return None
    for value in case.operands:
        if value.facts.is_scaled:
            return Value(value.array, value.facts._replace(is_scaled=False))
    return None


def _emit_move(case: Case) -> list[Value]:
    """Emits an operation that moves data, weights between devices included."""
    stored = None
    if case.run.uses.wire or (case.operands and case.operands[0].stored):
        stored = moved_payload(case)
        travelled = moved_later(case, stored) or travelled_weight(case, stored)
        if travelled:
            return [travelled]
    moved = _move(case)
    if stored is not None:
        moved[0].stored = stored
    if not case.settings.has_half_stream:
        return moved
    begins = any(v in case.ahead.beginnings for v in case.equation.outvars)
    return [_rounded(case.place, v) for v in moved] if begins else moved


def _biased(case: Case) -> list[Value] | None:
    """Emits `(x + y) + bias`, with a stream `x`, as `x + (y + bias)`; None for others.

    So the branch is summed in float32, and the half-precision stream is rounded once.
    """
    is_ours = case.name == "add" and not case.settings.rules._first_of("add")
    pairs = (case.operands, case.operands[::-1]) if is_ours else ()
    for summed, bias in pairs:
        if summed.summands:
            y, x = sorted(summed.summands[::-1], key=lambda v: v.facts.is_stream)
            kind, inner = properties(case.name).kind, case._replace(operands=[y, bias])
            choice = Choice(kind, Reason.BETWEEN, FULL)
            with _noted(case, choice):
                branch = with_rounded_gradient(inner, _emit_operation(inner, choice))
            choice = Choice(kind, Reason.STREAM, case.settings.dtype)
            with _noted(case, choice):
                return _emit_operation(case._replace(operands=[x, *branch]), choice)
    return None


def _emit_decided(case: Case) -> list[Value]:
    """Decides on one operation and binds it.

    A recipe applies last: it quantizes only products that would be in half precision,
    or that a rule selects by `Precision.LOW`.
    """
    rule = None
    if case.settings.rules.rules:
        case, rule = apply_rules(case)
    if rule is not None and not isinstance(rule.precision, Precision):
        kind = properties(case.name).kind
        with _noted(case, Choice(kind, Reason.RULE, rule=rule)):
            return _rewritten_by(rule, case)
    choice = choose(case, rule)
    is_asked_for = rule is not None and rule.precision is Precision.LOW
    may_be_low = is_asked_for or choice.reason is Reason.PRODUCT
    if case.settings.recipe is not None and may_be_low:
        choice = choose_recipe(case, choice, is_asked_for)
    if is_asked_for and choice.recipe is None:
        choice = choice._replace(reason=Reason.PRODUCT, rule=None)
    if choice.dtype == FLOAT16:
        case.run.note(Usage(computes_float16=True))
    if case.settings.is_strict:
        refuse_unknown(case, choice)
    if choice.recipe is not None:
        return emit_quantized(case, choice)
    with _noted(case, choice):
        product = product_of_weight(case, choice) if case.run.uses.wire else None
        if product is not None:
            return [product]
        results = _emit_operation(case, choice)
        is_sum = case.name == "add" and results[0].dtype == FULL
        is_sum = is_sum and not case.ahead.handed.get(case.equation.outvars[0])
        return with_rounded_gradient(case, results) if is_sum else results


def _noted(case: Case, choice: Choice) -> contextlib.AbstractContextManager[object]:
    """Returns a context that notes a choice on what is emitted inside."""
    if not case.run.uses.notes:
        return contextlib.nullcontext()
    return noted(case.name, choice, platform=case.settings.device.platform)


def _rewritten_by(rule: Rule, case: Case) -> list[Value]:
    """Binds an equation as the user's rewriting function returns it.

    A result that autocast cannot handle, such as half precision in the place of
    float64, is cast back to its declared dtype.
    """
    arrays, params = rule._rewritten(case.candidate, [v.array for v in case.operands])
    equation = case.equation.replace(params=params)
    with rule._binding(case.candidate):
        bound = bind_equation(equation, *arrays)
    results = []
    for x, variable in zip(bound, case.equation.outvars, strict=True):
        rule._check_shape(case.candidate, x, aval_of(variable))
        if not (is_castable(aval_of(variable)) and is_castable(jax.typeof(x))):
            declared_dtype = aval_of(variable).dtype
            if x.dtype != declared_dtype:
                x = jax.lax.convert_element_type(x, declared_dtype)
        results.append(computed(x))
    return results


def _rounded(place: Place, value: Value) -> Value:
    """Rounds the beginning of a residual stream, if half precision is enabled."""
    is_half = place.settings.is_enabled and is_castable(jax.typeof(value.array))
    return stream(value.cast(place.settings.dtype)) if is_half else value


def _join(case: Case) -> list[Value]:
    """Joins declared values into one that is declared, too."""
    bound = bind_equation(case.equation, *(v.array for v in case.operands))
    origin = _origin_of_all(case.castable)
    return [Value(x, declared(x).facts._replace(origin=origin)) for x in bound]


def _move(case: Case) -> list[Value]:
    """Moves data in its present precision.

    A value computed in half precision is read in float32 where a user reads it so, and
    where elements may be read repeatedly: so gradients are summed in float32.
    """
    name, equation, operands = case.name, case.equation, case.operands
    known, demand = properties(name), case.demand
    # Bound, a constant would become an array. A barrier may have no operands.
    if not operands or (name == "stop_gradient" and operands[0].is_constant):
        return operands
    if known.is_barrier and len(operands) == 1 and operands[0].is_shared:
        return [_stored(equation, operands[0])]
    arrays = [v.cast(v.dtype) for v in operands]
    narrow = None
    first = operands[0]
    if case.settings.is_enabled and first.is_computed_in_half:
        result = aval_of(equation.outvars[0])
        repeats = known.repeats or (known.gathers and is_along_vmap(equation))
        is_repeated = repeats and (
            name == "gather" or count(result.shape) > count(first.shape)
        )
        # Barriers are for stored or communicated values: a name, a sharding, another
        # device. Rearranging a whole value sums no gradients.
        is_only_reader = all(map(case.ahead.is_read_once, equation.invars))
        stays = known.is_barrier or (known.rearranges and is_only_reader)
        is_read = Demand.FULL in demand and not stays
        if is_repeated or is_read:
            arrays[0] = first.cast(FULL)
            narrow = None if Demand.FULL in demand else first.dtype
    if name == "gather" and finds_one_in_each_row(equation):
        bound = [look_up(equation, *arrays)]
    else:
        bound = bind_equation(equation, *arrays)
    # Several operands give one result where the others are indices and the like, and
    # one result each where all are moved (`optimization_barrier`).
    is_parallel = len(bound) == len(operands)
    results = []
    for i, (array, variable) in enumerate(zip(bound, equation.outvars, strict=True)):
        source = operands[i] if is_parallel else first
        if not is_castable(aval_of(variable)):
            results.append(Value(array, source.facts))
            continue
        if narrow is not None:
            array = jax.lax.convert_element_type(array, narrow)
        facts, slots = source.facts, source.slots
        if source.is_computed_in_half and array.dtype == FULL:
            facts = facts._replace(is_stored_in_half=True)
        if name == "gather":  # rows of a table, even of a parameter
            facts = Facts(is_declared=facts.is_declared)
        if slots is not None and name not in MARKS:
            # Several arrays may be joined.
            numbers = [v for v in operands if is_castable(jax.typeof(v.array))]
            slots = slots.moved(is_mixed=len(numbers) > 1)
        stored = source.stored if name in MARKS else None
        results.append(Value(array, facts, slots=slots, stored=stored))
    return results


def _stored(equation: JaxprEqn, value: Value) -> Value:
    """Stores or sends a value in half precision, with its gradient in float32."""
    both = value.array, value.cast(FULL)
    half, wide = (bind_equation(equation, x)[0] for x in both)
    facts = value.facts._replace(is_stored_in_half=True)
    return Value(of_float32(half, wide), facts, slots=value.slots)


# --- Binding one equation in the chosen precision -------------------------------------


def _emit_operation(case: Case, choice: Choice) -> list[Value]:
    """Casts operands to the chosen dtype, and binds an equation."""
    if case.place.has_wide_loop:
        return emit_wide(case, choice, _emit_operation)
    equation = case.equation
    if choice.reason is Reason.KERNEL:
        return _kernel(case)
    pairs = zip(case.operands, equation.invars, strict=True)
    arrays = [_cast(v, atom, choice.dtype) for v, atom in pairs]
    if choice.reason is Reason.MASKED:
        fills = [v.facts.fill for v in case.operands]
        with_fills = zip(arrays, fills, strict=True)
        arrays = [x if n is None else jnp.full_like(x, n) for x, n in with_fills]
    if choice.dtype is not None and properties(case.name).kind is PrimitiveClass.HALF:
        return _product(case, arrays, choice.dtype)
    if case.name in SCATTERS:
        bound = [scatter(equation, arrays)]
    else:
        bound = bind_equation(equation, *arrays)
    facts = Facts(origin=_origin_of_all(case.castable))
    return [Value(x, facts) for x in bound]


def _cast(value: Value, atom: Atom, dtype: np.dtype | None) -> AnyArray:
    """Returns an operand in a dtype, or in its declared one, if it may be cast."""
    declared_as = aval_of(atom)
    is_ours = is_castable(declared_as)
    return value.cast(dtype or declared_as.dtype) if is_ours else value.array


def _kernel(case: Case) -> list[Value]:
    """Calls a Pallas kernel with operands and results in half precision."""
    equation, dtype = case.equation, case.settings.dtype
    blocks = blocks_in_half(case.settings, equation, case.demands)
    halves = operands_in_half(equation, blocks)
    arrays = [
        _cast(v, atom, dtype if is_half else None)
        for v, atom, is_half in zip(case.operands, equation.invars, halves, strict=True)
    ]
    kernel = with_half_blocks(equation, blocks, dtype)
    return list(map(computed, bind_equation(kernel, *arrays)))


def _origin_of_all(values: list[Value]) -> Origin:
    """Returns the joint origin: weight or constant if all values are, else data."""
    origins = {v.facts.origin for v in values}
    if not origins or not origins <= _FIXED:
        return Origin.DATA
    return Origin.WEIGHT if Origin.WEIGHT in origins else CONSTANT


def _product(case: Case, arrays: list[AnyArray], dtype: np.dtype) -> list[Value]:
    """Binds a product in half precision, or in float32.

    Half-precision operands give half precision. With a float32 result, the backward
    products would mix float32 with half precision, and XLA's CPU compiler (jaxlib
    0.10.2) lacks some of these.
    """
    params = dict(case.equation.params)
    if params.get("preferred_element_type") is not None:
        params["preferred_element_type"] = dtype
    equation = case.equation.replace(params=params)
    if case.settings.device.platform == "cuda":
        arrays = _with_ordered_gradients(case, arrays)
    factor = case.ahead.factors.get(equation.outvars[0])
    if factor is not None and dtype == jnp.bfloat16:  # not in a region of float16
        equation = with_factor(equation, factor)
        (result,) = bind_equation(equation, *arrays)
        return [Value(result, Facts(is_scaled=True))]
    if case.settings.device.wants_cpu_form and not asks_for_half_sums(case):
        equation = in_cpu_form(equation, arrays)
    is_sparse = properties(equation.primitive.name).is_sparse and dtype != FULL
    bind = sum_in_float32 if is_sparse else bind_equation
    results = bind(equation, *arrays)
    if any(taps := [v.tap for v in case.operands]):
        results = [_tapped(taps, equation, arrays, *results)]
    return list(map(computed, results))


def _tapped(
    taps: list[Tap | None], equation: JaxprEqn, arrays: list[AnyArray], result: AnyArray
) -> AnyArray:
    """Notes a product of a loop's weight; its gradient is computed behind the loop."""
    ((place, tap),) = ((i, one) for i, one in enumerate(taps) if one)
    tap.row, tap.product = arrays[1 - place], (equation, place)
    return tapped(result, tap.zeros)


# So many times larger than the data, a result waits for the gradient of the weight.
_MUCH_LARGER = 4


def _with_ordered_gradients(case: Case, arrays: list[AnyArray]) -> list[AnyArray]:
    """Returns the operands of a product of data and a weight: see `layouts`."""
    are_weights = [value.facts.is_declared for value in case.operands]
    if case.name == "conv_general_dilated" and are_weights[1]:
        return [arrays[0], with_flat_gradient(arrays[1])]
    # A loop adds each gradient as it is computed. And behind a loop over layers XLA
    # would copy the gradient of its carry in each turn.
    has_copy = any(value.copy is not None for value in case.operands)
    is_in_turns = case.place.is_in_loop or has_copy or case.ahead.has_loop
    if case.name != "dot_general" or are_weights.count(True) != 1 or is_in_turns:
        return arrays
    data = count(arrays[are_weights.index(False)].shape)
    is_large = count(aval_of(case.equation.outvars[0]).shape) >= _MUCH_LARGER * data
    return list(with_gradients_at_once(*arrays)) if is_large else arrays
