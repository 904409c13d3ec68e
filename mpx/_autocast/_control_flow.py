"""Programs within programs: jit, branches, remat, shard_map.

Each is rewritten and bound to the same primitive again, with its name, shardings,
donation and policy. A program that is used repeatedly (one layer, called twelve times)
is rewritten once for each combination of operand types. The results of branches must
agree: all in half precision, or all in float32.

`_loops` rewrites loops, `_custom_rules` functions with custom derivative rules.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding

from .._base.jax_compat import (
    bind_equation,
    composite_parameter,
    named_as,
    shard_map_axes,
)
from .._base.typing import AnyArray, Program
from .._program import (
    checkpoint_params,
    constants_as_inputs,
    distinct_equations,
    program_of,
    properties,
)
from .._quantize import Stored
from .._recipe_state import Slots, StateOperands, StepValues
from .._wire import refuse_sums_of_others
from ._context import (
    FULL,
    Facts,
    Place,
    Run,
    Saving,
    Usage,
    Value,
    computed,
    is_castable,
)
from ._decide import Case
from ._demand import Demand, Wanted, demands_of
from ._emit import Rewrite, evaluate, evaluate_within
from ._reach import together_from
from ._travel import entries_of, from_entry


def make_values(
    arrays: Sequence[AnyArray],
    facts: Sequence[Facts],
    slots: Sequence[Slots | None] = (),
    stored: Sequence[Stored | None] = (),
) -> list[Value]:
    """Makes the values of a program's operands, inside of it."""
    nothing = (None,) * len(facts)
    rows = zip(arrays, facts, slots or nothing, stored or nothing, strict=True)
    return [Value(x, f, slots=slots, stored=bits) for x, f, slots, bits in rows]


class Types(NamedTuple):
    """The facts and types of operands, without their arrays.

    Attributes:
        facts: The facts of each operand.
        avals: The type of each operand.
    """

    facts: tuple[Facts, ...]
    avals: tuple[ShapedArray, ...]


def types_of(operands: Sequence[Value]) -> Types:
    """Returns the facts and types of operands."""
    avals = (jax.typeof(v.array) for v in operands)
    return Types(tuple(v.facts for v in operands), tuple(avals))


def rewrite_program(
    run: Run,
    place: Place,
    jaxpr: Jaxpr | ClosedJaxpr,
    types: Types,
    demands: Wanted,
    state: StateOperands,
    dtypes: tuple[np.dtype | None, ...] | None = None,
) -> tuple[ClosedJaxpr, tuple[Facts, ...]]:
    """Rewrites a program for operands of given facts and types.

    Equal keys give equal programs, in this call and in later ones. The key contains all
    that `evaluate` reads, except what is in the key of JAX's own caches (`Ambient`):
    there JAX returns another `jaxpr`. Arrays, such as the step's number and scales, are
    operands: a tracer of this call would outlive it. The usage is stored with the
    program, since a program from the store is not evaluated.

    Args:
        run: The run, which stores rewritten programs.
        place: The place of the program.
        jaxpr: The program, open or closed.
        types: The facts and types of its operands.
        demands: The demands on its results.
        state: Its further inputs.
        dtypes: The dtypes that its results must have; None for a result of any dtype.

    Returns:
        The new program, and the facts of its results.
    """
    facts, avals = types
    besides = [jax.typeof(x) for x in state.arrays]
    known = run.programs.setdefault(jaxpr, {})
    key = (place, *types, demands, dtypes, state.form)
    made = known.get(key)
    if made is not None:
        closed, new, used = made
        run.note(used)
        return closed, new
    found: list[tuple[Facts, ...]] = []

    def program(*arrays: AnyArray) -> list[AnyArray]:
        slots, stored, step = state.unpacked(arrays[len(avals) :])
        inside = make_values(arrays[: len(avals)], facts, slots, stored)
        with run.at_step(step):
            results = evaluate(run, place, jaxpr, inside, demands)
        if dtypes is not None:
            results = [as_dtype(v, d) for v, d in zip(results, dtypes, strict=True)]
        found[:] = [tuple(v.facts for v in results)]
        return [v.array for v in results]

    before, run.used = run.used, Usage()
    closed = named_as(jax.make_jaxpr(program)(*avals, *besides), jaxpr)
    known[key] = closed, found[0], run.used
    run.note(before)
    return closed, found[0]


def _rewritten(
    case: Case,
    jaxpr: Jaxpr | ClosedJaxpr,
    state: StateOperands,
    dtypes: tuple[np.dtype | None, ...] | None = None,
) -> tuple[ClosedJaxpr, tuple[Facts, ...]]:
    """Rewrites a program of an equation for the equation's operands and a state."""
    types = types_of(case.operands)
    return rewrite_program(
        case.run, case.place, jaxpr, types, case.demands, state, dtypes
    )


def _state_for(
    case: Case, *programs: Jaxpr | ClosedJaxpr, reads_stored: bool = True
) -> StateOperands:
    """Returns further inputs of programs, with step values only if they need them."""
    is_ours, operands = not case.place.has_own_rule, case.operands
    asks = is_ours and case.run.step is not None
    number = case.run.step if asks and any(map(_holds_products, programs)) else None
    scale = case.run.scale
    if scale is not None and not any(map(_holds_rules, programs)):
        scale = None
    has_rows = is_ours and any(v.slots and v.slots.rows for v in operands)
    step = StepValues(number, scale, case.run.scales if has_rows else None)
    stored = [v.stored for v in operands] if is_ours and reads_stored else ()
    return StateOperands([v.slots for v in operands], stored=stored, step=step)


def _holds_products(program: Program) -> bool:
    return any(
        properties(equation.primitive.name).is_quantizable
        for equation in distinct_equations(program)
    )


def _holds_rules(program: Program) -> bool:
    found = distinct_equations(program)
    return any(equation.primitive.name == "custom_vjp_call" for equation in found)


def as_dtype(value: Value, dtype: np.dtype | None) -> Value:
    """Returns a value cast to a dtype; unchanged for None."""
    if dtype is None or value.dtype == dtype:
        return value
    return computed(value.cast(dtype))


def bind_with_program(
    equation: JaxprEqn,
    params: dict[str, Any],
    facts: Sequence[Facts],
    operands: Sequence[AnyArray],
) -> list[Value]:
    """Binds an equation with another program, and other parameters."""
    changed = equation.replace(params={**equation.params, **params})
    results = bind_equation(changed, *operands)
    return [Value(x, f) for x, f in zip(results, facts, strict=True)]


def rewrite_jit(case: Case) -> list[Value]:
    """Rewrites a jit, with its name, shardings, layouts and donation."""
    jaxpr = case.equation.params["jaxpr"]
    state = _state_for(case, jaxpr)
    if any(state.form) or any(v.gathering is not None for v in case.operands):
        return _rewrite_inline(case)
    closed, facts = _rewritten(case, jaxpr, state)
    arrays = [v.as_operand for v in case.operands]
    return bind_with_program(case.equation, {"jaxpr": closed}, facts, arrays)


def _rewrite_inline(case: Case) -> list[Value]:
    """Emits a jit in place, as its shardings and donation do not fit more operands."""
    params = case.equation.params
    operands = list(map(_constrained, case.operands, params["in_shardings"]))
    results = evaluate_within(case._replace(operands=operands), params["jaxpr"])
    return list(map(_constrained, results, params["out_shardings"]))


def _constrained(value: Value, sharding: object) -> Value:
    if not isinstance(sharding, Sharding):
        return value
    if isinstance(sharding, NamedSharding) and sharding.mesh.explicit_axes:
        # As a jit does it there: the type contains the mesh, which need not be set.
        array = jax.jit(lambda x: x, out_shardings=sharding)(value.array)
    else:
        array = jax.lax.with_sharding_constraint(value.array, sharding)
    return Value(array, value.facts, slots=value.slots, stored=value.stored)


def rewrite_composite(case: Case) -> list[Value]:
    """Rewrites the decomposition of a composite."""
    jaxpr = program_of(case.equation)
    state = _state_for(case, jaxpr)
    if any(state.form):
        return rewrite_call(case)
    closed, facts = _rewritten(case, jaxpr, state)
    parameter = composite_parameter(case.equation.params)
    arrays = [v.array for v in case.operands]
    return bind_with_program(case.equation, {parameter: closed}, facts, arrays)


def rewrite_call(case: Case) -> list[Value]:
    """Emits a call that only wraps a program in place."""
    return evaluate_within(case, program_of(case.equation))


def rewrite_remat(case: Case) -> list[Value]:
    """Rewrites a checkpointed program, with its policy; also a differentiated one."""
    params = case.equation.params
    jaxpr, policy = params["jaxpr"], params["policy"]
    state, place = _state_for(case, jaxpr), case.place
    if (case.run.uses.recipes or place.has_wide_loop) and policy is not None:
        policy = Saving(policy, len(place.saving), place.has_wide_loop)
        place = dataclasses.replace(place, saving=(*place.saving, policy))
    place = dataclasses.replace(place, is_recomputed=True)
    closed, facts = _rewritten(case._replace(place=place), jaxpr, state)
    jaxpr, constants = constants_as_inputs(closed)
    arrays = [*constants, *(v.as_operand for v in case.operands), *state.arrays]
    params = checkpoint_params(params, jaxpr, len(constants), len(state.arrays))
    return bind_with_program(case.equation, {**params, "policy": policy}, facts, arrays)


def rewrite_shard_map(case: Case) -> list[Value]:
    """Rewrites a program that runs once per device."""
    run, place, params = case.run, case.place, case.equation.params
    facts, jaxpr = tuple(v.facts for v in case.operands), params["jaxpr"]
    # Each device would need its piece of a weight's stored form.
    state = _state_for(case, jaxpr, reads_stored=False)
    are_declared = tuple(f.is_declared for f in facts)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, case.demands)
    entries = entries_of(case, ahead.inputs)
    if not params["check_vma"]:
        refuse_sums_of_others(place.settings.wire)
        place = dataclasses.replace(place, sums_over_devices=True)
    found: list[tuple[Facts, ...]] = []

    def program(
        entries: list[list[AnyArray]], arrays: list[AnyArray]
    ) -> tuple[AnyArray, ...]:
        slots, _, step = state.unpacked(arrays)
        inside = make_values(list(map(from_entry, entries)), facts, slots)
        with run.at_step(step):
            results = evaluate(run, place, jaxpr, inside, case.demands)
        found[:] = [tuple(v.facts for v in results)]
        return tuple(v.array for v in results)

    results = jax.shard_map(
        program,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), P()),
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=set(shard_map_axes(params)),
    )(entries, list(state.arrays))
    return [Value(x, f) for x, f in zip(results, found[0], strict=True)]


def rewrite_cond(case: Case) -> list[Value]:
    """Rewrites branches; their results get common dtypes."""
    branches, index = case.equation.params["branches"], case.operands[0].array
    inner = case._replace(operands=case.operands[1:])
    state = _state_for(inner, *branches)
    given = [v.as_operand for v in inner.operands]
    made = [_rewritten(inner, branch, state) for branch in branches]
    dtypes = tuple(
        _agreed(case.place, demand, [closed.out_avals[i] for closed, _ in made])
        for i, demand in enumerate(case.demands)
    )
    if any(d is not None for d in dtypes):
        made = [_rewritten(inner, branch, state, dtypes) for branch in branches]
    programs, facts = zip(*made, strict=True)
    common = [_common(same) for same in zip(*facts, strict=True)]
    arrays = [index, *given, *state.arrays]
    return bind_with_program(case.equation, {"branches": programs}, common, arrays)


def _agreed(place: Place, demand: Demand, avals: list[ShapedArray]) -> np.dtype | None:
    """Returns the dtype that all branches' results are cast to; None if they agree."""
    if not is_castable(avals[0]) or len({aval.dtype for aval in avals}) == 1:
        return None
    return place.settings.dtype if demand == Demand.HALF else FULL


def _common(facts: tuple[Facts, ...]) -> Facts:
    """Returns the facts of a result that apply whichever branch it comes from."""
    if len(set(facts)) == 1:
        return facts[0]
    origin = together_from(f.origin for f in facts)
    return Facts(all(f.is_declared for f in facts), origin=origin)


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
    "cond": rewrite_cond,
}
