"""Programs within programs: jit, loops, branches, remat, shard_map.

Each is rewritten and bound to the same primitive again, with its name, shardings,
donation and policy. A program that stands in many places (one layer, called twelve
times) is rewritten once for each way in which its operands come.

- A loop's carry keeps its declared dtype: a carry in half precision is the user's
  choice, never inferred, since the parameters of a scanned training loop look just
  like a residual stream.
- The results of branches must agree: all in half, or all in float32.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from .._jax_compat import (
    bind_equation,
    composite_parameter,
    manual_axes,
    open_jaxpr,
    scan_counts,
    scan_options,
)
from .._program import (
    aval_of,
    constants_as_inputs,
    distinct_equations,
    program_of,
    properties,
    sub_jaxprs,
)
from .._typing import AnyArray, Aval, Program
from ._context import FULL, Facts, Place, Provenance, Run, Value, computed, is_castable
from ._demand import Demand, Wanted, carried_demands, demands_of
from ._emit import Rewrite, evaluate
from ._entry import dtypes_at_entry, joined, narrowed
from ._loops import narrowed_results, narrowed_stacks, streams_of
from ._notes import CARRY, noted_cast
from ._products import reach_of_program
from ._state import Slots, StateOperands, repeated
from ._wire import refuse_sums_of_others


def enter(
    arrays: Sequence[Any], facts: Sequence[Facts], slots: Sequence[Slots | None] = ()
) -> list[Value]:
    """The operands of a program, as values inside of it.

    A number is put in the place of its variable. Not where a program runs once per
    device: there it may have been told that it differs from device to device.
    """
    may_replace = not manual_axes()
    return [
        Value(np.asarray(f.literal, x.dtype), f, is_constant=True)
        if may_replace and f.literal is not None and x.shape == ()
        else Value(x, f, slots=s)
        for x, f, s in zip(arrays, facts, slots or (None,) * len(facts), strict=True)
    ]


# What is known of values without their arrays.
Types = tuple[tuple[Facts, ...], tuple[ShapedArray, ...]]


def types_of(operands: Sequence[Value]) -> Types:
    """What is known of operands without their arrays."""
    avals = tuple(jax.typeof(v.array) for v in operands)
    return tuple(v.facts for v in operands), avals


def rewritten(
    run: Run,
    place: Place,
    jaxpr: Jaxpr | ClosedJaxpr,
    types: Types,
    demands: Wanted,
    state: StateOperands,
    dtypes: tuple[np.dtype | None, ...] | None = None,
) -> tuple[ClosedJaxpr, tuple[Facts, ...]]:
    """Rewrites a program for operands as they come.

    Args:
        run: The run, which keeps rewritten programs.
        place: Where the program stands.
        jaxpr: The program, open or closed.
        types: What is known of its inputs.
        demands: What is wanted of its results.
        state: What it gets besides.
        dtypes: The dtypes that its results must have; None for a result that may have
            any.

    Returns:
        The new program, and what is known of its results.
    """
    facts, avals = types
    besides = [jax.typeof(x) for x in state.arrays]
    known = run.programs.setdefault(jaxpr, {})
    key = (place, facts, avals, demands, dtypes, state.form)
    made = known.get(key)
    if made is not None:
        closed, new, used = made
        run.used |= used
        return closed, new
    found: list[tuple[Facts, ...]] = []

    def program(*arrays: AnyArray) -> list[Any]:
        slots, step = state.unpacked(arrays[len(facts) :])
        inside = enter(arrays[: len(facts)], facts, slots)
        with run.at_step(step):
            results = evaluate(run, place, jaxpr, inside, demands)
        if dtypes is not None:
            results = [as_dtype(v, d) for v, d in zip(results, dtypes, strict=True)]
        found[:] = [tuple(v.facts for v in results)]
        return [v.array for v in results]

    before, run.used = run.used, set()
    closed = jax.make_jaxpr(program)(*avals, *besides)
    known[key] = closed, found[0], frozenset(run.used)
    run.used |= before
    return closed, found[0]


def _state_for(
    run: Run, place: Place, operands: Sequence[Value], *programs: Jaxpr | ClosedJaxpr
) -> StateOperands:
    """What programs get besides these operands: those that quantize, the step, too."""
    asks = run.step is not None and not place.has_own_rule
    step = run.step if asks and any(map(_holds_products, programs)) else None
    return StateOperands([v.slots for v in operands], step=step)


def _holds_products(program: Program) -> bool:
    return any(
        properties(equation.primitive.name).is_quantizable
        for equation in distinct_equations(program)
    )


def as_dtype(value: Value, dtype: np.dtype | None) -> Value:
    """A value cast to a dtype; as it is for None."""
    if dtype is None or value.dtype == dtype:
        return value
    return computed(value.cast(dtype)[0])


def rebound(
    equation: JaxprEqn,
    params: dict[str, Any],
    facts: Sequence[Facts],
    operands: Sequence[Any],
) -> list[Value]:
    """Binds an equation that holds a program with another one in its place."""
    changed = equation.replace(params={**equation.params, **params})
    results = bind_equation(changed, *operands)
    return [Value(x, f) for x, f in zip(results, facts, strict=True)]


def widened(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """The operands of a program, in float32 where it wants nothing else.

    One cast then serves all of its uses, and what else needs it outside; and its
    gradients are summed in float32 before they are cast back.
    """
    are_declared = tuple(v.facts.provenance is Provenance.DECLARED for v in operands)
    jaxpr = program_of(equation)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, demands)
    return [
        Value(
            v.cast(FULL)[0], v.facts._replace(provenance=Provenance.FULL), slots=v.slots
        )
        if demand is Demand.FULL
        and v.facts.provenance is Provenance.HALF
        and aval_of(atom).dtype == FULL
        else v
        for v, atom, demand in zip(operands, equation.invars, ahead.inputs, strict=True)
    ]


def rewrite_jit(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A jit, with its name, shardings, layouts and donation."""
    operands = widened(run, place, equation, operands, demands)
    jaxpr = equation.params["jaxpr"]
    state = _state_for(run, place, operands, jaxpr)
    if any(state.form) or any(v.journey is not None for v in operands):
        return _rewrite_inline(run, place, equation, operands, demands)
    closed, facts = rewritten(run, place, jaxpr, types_of(operands), demands, state)
    arrays = [v.array for v in operands]
    return rebound(equation, {"jaxpr": closed}, facts, arrays)


def _rewrite_inline(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A jit that has more operands than its shardings and donations are for."""
    params = equation.params
    constrained = [
        _constrained(v, s)
        for v, s in zip(operands, params["in_shardings"], strict=True)
    ]
    results = evaluate(run, place, params["jaxpr"], constrained, demands)
    return [
        _constrained(v, s)
        for v, s in zip(results, params["out_shardings"], strict=True)
    ]


def _constrained(value: Value, sharding: object) -> Value:
    if not isinstance(sharding, jax.sharding.Sharding):
        return value
    array = jax.lax.with_sharding_constraint(value.array, sharding)
    return Value(array, value.facts, slots=value.slots)


def rewrite_composite(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A composite, whose decomposition is rewritten."""
    jaxpr = program_of(equation)
    state = _state_for(run, place, operands, jaxpr)
    if any(state.form):
        return rewrite_call(run, place, equation, operands, demands)
    closed, facts = rewritten(run, place, jaxpr, types_of(operands), demands, state)
    parameter = composite_parameter(equation.params)
    arrays = [v.array for v in operands]
    return rebound(equation, {parameter: closed}, facts, arrays)


def rewrite_call(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A call that says nothing but "here is a program": emitted in place."""
    jaxpr = program_of(equation)
    return evaluate(run, place, jaxpr, operands, demands)


def rewrite_remat(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A checkpointed program, with its policy; also one that was differentiated."""
    jaxpr = equation.params["jaxpr"]
    state = _state_for(run, place, operands, jaxpr)
    place = dataclasses.replace(place, is_recomputed=True)
    closed, facts = rewritten(run, place, jaxpr, types_of(operands), demands, state)
    jaxpr, constants = constants_as_inputs(closed)
    arrays = [*constants, *(v.array for v in operands), *state.arrays]
    return rebound(equation, {"jaxpr": open_jaxpr(jaxpr)}, facts, arrays)


def rewrite_shard_map(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A program that runs once per device."""
    params = equation.params
    facts = tuple(v.facts for v in operands)
    state = _state_for(run, place, operands, params["jaxpr"])
    if not params["check_vma"]:
        refuse_sums_of_others(place.settings.wire)
        place = dataclasses.replace(place, sums_over_devices=True)
    are_declared = tuple(f.provenance is Provenance.DECLARED for f in facts)
    ahead = demands_of(run, place.settings, params["jaxpr"], are_declared, demands)
    dtypes = dtypes_at_entry(place, equation, operands, ahead.inputs)
    given = [
        [v.array] if dtype is None else narrowed(place, v.array, dtype)
        for v, dtype in zip(operands, dtypes, strict=True)
    ]
    found: list[tuple[Facts, ...]] = []

    def program(given: list[list[AnyArray]], arrays: list[AnyArray]) -> tuple[Any, ...]:
        slots, step = state.unpacked(arrays)
        entered = [joined(*one) if len(one) > 1 else one[0] for one in given]
        inside = enter(entered, facts, slots)
        with run.at_step(step):
            results = evaluate(run, place, params["jaxpr"], inside, demands)
        found[:] = [tuple(v.facts for v in results)]
        return tuple(v.array for v in results)

    mapped = jax.shard_map(
        program,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), P()),
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )
    results = mapped(given, list(state.arrays))
    return [Value(x, f) for x, f in zip(results, found[0], strict=True)]


def _strong(value: Value, aval: Aval) -> AnyArray:
    """An array in the dtype that a loop declares for what it carries."""
    with noted_cast(CARRY):
        array = value.cast(aval.dtype)[0] if is_castable(aval) else value.array
    if getattr(jax.typeof(array), "weak_type", False):
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def _carried(arrays: Sequence[Any]) -> list[Value]:
    """What a loop carries counts as computed, in the precision that it declares."""
    return [computed(x) for x in arrays]


def rewrite_scan(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A scan; what it stacks may be half precision, what it carries keeps its dtype."""
    params = equation.params
    n_consts, n_carry = scan_counts(params)
    closed = params["jaxpr"]
    jaxpr = open_jaxpr(closed)
    end = n_consts + n_carry
    fixed, carried = operands[:n_consts], operands[n_consts:end]
    carry_avals = [aval_of(v) for v in jaxpr.invars[n_consts:end]]
    wanted = (*carried_demands(jaxpr.invars[n_consts:end]), *demands[n_carry:])
    place = _loop_place(place, equation)
    inside = [*fixed, *map(_as_carried, carried), *operands[end:]]
    stacked = narrowed_stacks(run, place, jaxpr, inside, wanted, end)
    facts = tuple(v.facts for v in stacked)
    # A weight that all turns share has a copy of its slots for each.
    shared = StateOperands([v.slots for v in fixed])
    cut = StateOperands([v.slots for v in stacked], params["length"])
    copies = [repeated(x, params["length"]) for x in shared.arrays]
    given: list[Any] = []
    found: list[tuple[Facts, ...]] = []

    def body(carry: PyTree, xs: PyTree) -> tuple[list[Any], list[Any]]:
        xs, for_fixed, for_stacked = xs
        slots, _ = shared.unpacked(for_fixed)
        consts = enter([v.array for v in fixed], [v.facts for v in fixed], slots)
        rows = enter(xs, facts, cut.unpacked(for_stacked)[0])
        operands = [*consts, *_carried(carry), *rows]
        results = evaluate(run, place, closed, operands, wanted)
        given[:] = [v.dtype for v in results[:n_carry]]
        ys = narrowed_results(place, results[n_carry:], demands[n_carry:])
        found[:] = [tuple(_stacked_facts(v.facts) for v in ys)]
        return _begun(results[:n_carry], carry_avals), [v.array for v in ys]

    xs = ([v.array for v in stacked], copies, cut.arrays)
    streams = streams_of(run, place.settings, jaxpr, n_consts, n_carry)
    if streams and params["length"]:
        # What the body gives in half precision, only a trace of it can tell.
        row = jax.tree.map(lambda x: x[0], xs)
        jax.eval_shape(body, _begun(carried, carry_avals), row)
        for i in streams:
            if given[i] == place.settings.dtype:
                carry_avals[i] = carry_avals[i].update(dtype=given[i])
    init = _begun(carried, carry_avals)
    carry, ys = jax.lax.scan(body, init, xs, **scan_options(params))
    return _carried(carry) + [Value(y, f) for y, f in zip(ys, found[0], strict=True)]


def _begun(values: Sequence[Value], avals: Sequence[Aval]) -> list[AnyArray]:
    """The arrays that a turn begins with."""
    return [_strong(v, a) for v, a in zip(values, avals, strict=True)]


def _as_carried(value: Value) -> Value:
    """A value as the body of a loop knows it that carries it: it was computed."""
    return Value(value.array, value.facts._replace(provenance=Provenance.FULL))


def _loop_place(place: Place, equation: JaxprEqn) -> Place:
    """The place inside of a loop, whose results go into its next turn, too."""
    reach = place.reach and reach_of_program(sub_jaxprs(equation)[0], place.reach)
    return dataclasses.replace(place, reach=reach, is_in_loop=True)


def _stacked_facts(facts: Facts) -> Facts:
    return facts._replace(is_broadcast=False, literal=None)


def rewrite_while(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """A loop of unknown length."""
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    avals = [aval_of(v) for v in open_jaxpr(body).invars[n_body:]]
    wanted = carried_demands(open_jaxpr(body).invars[n_body:])
    for_test, for_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
    place = dataclasses.replace(_loop_place(place, equation), is_in_while=True)
    test_place = dataclasses.replace(place, reach=())
    init = [
        _strong(v, a) for v, a in zip(operands[n_cond + n_body :], avals, strict=True)
    ]

    def inside(fixed: list[Value], carry: PyTree) -> list[Value]:
        # Without slots: nothing comes back from its turns that could fill them.
        values = enter([v.array for v in fixed], [v.facts for v in fixed])
        return [*values, *_carried(carry)]

    def are_going_on(carry: PyTree) -> AnyArray:
        values = inside(for_test, carry)
        return evaluate(run, test_place, test, values, (Demand.ANY,))[0].array

    def is_going_on(carry: PyTree) -> AnyArray:
        going = are_going_on(carry)
        return jnp.any(going) if going.ndim else going

    def step(carry: PyTree) -> list[Any]:
        values = inside(for_body, carry)
        results = evaluate(run, place, body, values, wanted)
        new = [_strong(v, a) for v, a in zip(results, avals, strict=True)]
        if not aval_of(open_jaxpr(test).outvars[0]).shape:
            return new
        # `vmap` of a loop whose examples end at different times: JAX's while primitive
        # takes a test for each example, which `jax.lax.while_loop` does not, and keeps
        # those that have ended as they are when it is lowered (jax 0.10 to 0.12).
        going = are_going_on(carry)
        return [_where(going, a, b) for a, b in zip(new, carry, strict=True)]

    return _carried(jax.lax.while_loop(is_going_on, step, init))


def _where(condition: Any, new: Any, old: Any) -> AnyArray:
    """`new` where a condition of the leading axes holds."""
    axes = range(condition.ndim)
    return jax.lax.select(
        jax.lax.broadcast_in_dim(condition, new.shape, axes), new, old
    )


def rewrite_cond(
    run: Run, place: Place, equation: JaxprEqn, operands: list[Value], demands: Wanted
) -> list[Value]:
    """Branches, whose results agree on their dtypes."""
    branches = equation.params["branches"]
    index, *rest = operands
    state = _state_for(run, place, rest, *branches)
    types = types_of(rest)
    made = [rewritten(run, place, b, types, demands, state) for b in branches]
    dtypes = tuple(
        _agreed(aval_of(variable), [closed.out_avals[i].dtype for closed, _ in made])
        for i, variable in enumerate(equation.outvars)
    )
    if any(d is not None for d in dtypes):
        made = [
            rewritten(run, place, b, types, demands, state, dtypes) for b in branches
        ]
    programs, facts = zip(*made, strict=True)
    common = [
        _common(same, aval.dtype)
        for same, aval in zip(
            zip(*facts, strict=True), programs[0].out_avals, strict=True
        )
    ]
    arrays = [*(v.array for v in operands), *state.arrays]
    return rebound(equation, {"branches": programs}, common, arrays)


def _agreed(aval: Aval, dtypes: list[np.dtype]) -> np.dtype | None:
    """What the results of all branches are cast to; None if they agree."""
    if not is_castable(aval) or len(set(dtypes)) == 1:
        return None
    return FULL


def _common(facts: tuple[Facts, ...], dtype: object) -> Facts:
    """What is known of a result whichever branch it comes from."""
    if len(set(facts)) == 1:
        return facts[0]
    provenances = {f.provenance for f in facts}
    if len(provenances) == 1:
        return Facts(facts[0].provenance)
    return Facts(Provenance.FULL if dtype == FULL else Provenance.HALF)


REWRITES: dict[str, Rewrite] = {
    "jit": rewrite_jit,
    "pjit": rewrite_jit,
    "composite": rewrite_composite,
    "closed_call": rewrite_call,
    "eval_jaxpr": rewrite_call,  # the same since jax 0.12
    "core_call": rewrite_call,
    "call": rewrite_call,
    "remat": rewrite_remat,
    "remat2": rewrite_remat,
    "checkpoint": rewrite_remat,
    "shard_map": rewrite_shard_map,
    "scan": rewrite_scan,
    "while": rewrite_while,
    "cond": rewrite_cond,
}
