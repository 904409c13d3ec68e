"""Loops: scan and while.

A loop's carry keeps its declared dtype: half precision in it is the user's choice,
never inferred, since the parameters of a scanned training loop look just like a
residual stream. But under such a `residual_stream`, a body that adds to its carry and
returns a half-precision sum carries half precision.

A scan stores its stacked inputs and results whole, and its derivative a gradient of
each. One cast before the loop, instead of one in every iteration, halves both:

- An input that all uses inside cast is stacked in half precision, with the same values
  in every iteration. So is a weight with one use, whose gradient in each iteration is
  that of one product. With several uses it is cast at each, and their gradients are
  summed in float32.
- A result that all uses outside cast is stacked in their dtype.

On GPUs what all turns read has a copy in half precision, made in front of the loop; and
a recurrent weight has its gradient behind it (`_Behind`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import PyTree

from .._base.jax_compat import (
    bind_equation,
    is_differentiated,
    is_on_a_mesh,
    manual_axes,
    open_jaxpr,
    scan_counts,
    scan_options,
    scope_names,
)
from .._base.typing import AnyArray, Atom, Aval
from .._program import (
    aval_of,
    constants_as_inputs,
    count,
    distinct_equations,
    is_read_once,
    makers_of,
    properties,
    sub_jaxprs,
    where_leading,
)
from .._quantize import HalfCopy
from .._recipe_state import StateOperands, repeated
from .._settings import Settings
from ._context import (
    FULL,
    Facts,
    Place,
    Run,
    Tap,
    Value,
    computed,
    is_castable,
    stream,
)
from ._control_flow import make_values
from ._decide import CARRY, USED, Case, noted_cast
from ._demand import UNREAD, Demand, Demands, Wanted, demands_for, demands_of
from ._emit import Rewrite, evaluate
from ._reach import reach_of_program
from ._stacks import has_wide_loops, may_be_cast_early, widened

# The stacks of gradients may be this many times as large as what the loop stacks.
_MORE = 4
# A product of all turns would be rounded once to half precision: in an LSTM of 256
# turns an error of 0.0028 where sums in float32 have 0.0023. In so many parts, 0.0023.
_MOST_PARTS = 12


def rewrite_scan(case: Case) -> list[Value]:
    """Rewrites a scan: stacks may be in half precision, its carry keeps its dtype."""
    run, demands, params = case.run, case.demands, case.equation.params
    n_consts, n_carry = scan_counts(params)
    closed = params["jaxpr"]
    jaxpr = open_jaxpr(closed)
    end = n_consts + n_carry
    fixed = list(map(_as_constant, case.operands[:n_consts], jaxpr.invars))
    carried = case.operands[n_consts:end]
    carry_avals = [aval_of(v) for v in jaxpr.invars[n_consts:end]]
    place = _loop_place(case)
    wanted = (*demands_for(carry_avals, place.settings.dtype), *demands[n_carry:])
    inside = [*fixed, *map(_as_carried, carried), *case.operands[end:]]
    are_declared = tuple(v.facts.is_declared for v in inside)
    ahead = demands_of(run, place.settings, jaxpr, are_declared, wanted)
    fixed = list(map(functools.partial(_with_copy, run, place), fixed, ahead.inputs))
    stacked = _narrowed_stacks(run, place, ahead, inside, end)
    facts = tuple(v.facts for v in stacked)
    # A weight that all iterations share has a copy of its slots for each.
    shared = StateOperands([v.slots for v in fixed])
    sliced = StateOperands(
        [v.slots for v in stacked], params["length"], stored=[v.stored for v in stacked]
    )
    copies = [repeated(x, params["length"]) for x in shared.arrays]
    behind = _Behind(run, place, ahead, params["length"], fixed)
    weights = [fixed[i].array for i in behind.products]
    given: list[np.dtype] = []
    found: list[tuple[Facts, ...]] = []

    def body(weights: list[AnyArray], carry: PyTree, xs: PyTree) -> PyTree:
        (xs, for_fixed, for_stacked), zeros = xs
        arrays, slots = [v.as_operand for v in fixed], shared.unpacked(for_fixed)[0]
        known = [v.facts for v in fixed]
        consts = make_values(arrays, known, slots, [v.stored for v in fixed])
        taps = behind.tapped(consts, weights, zeros)
        rows = make_values(xs, facts, *sliced.unpacked(for_stacked)[:2])
        operands = [*consts, *_carried(place, carry), *rows]
        results = evaluate(run, place, closed, operands, wanted)
        # JAX may trace a body more than once; the findings of the last trace are used.
        given[:] = [v.dtype for v in results[:n_carry]]
        rows_avals = [aval_of(v) for v in jaxpr.outvars[n_carry:]]
        ys = _narrowed_results(place, results[n_carry:], demands[n_carry:], rows_avals)
        found[:] = [tuple(v.facts for v in ys)]
        out = [v.array for v in ys], [tap.row for tap in taps]
        return _begun(results[:n_carry], carry_avals), out

    xs = ([v.array for v in stacked], copies, sliced.arrays)
    streams = _streams_of(run, place.settings, jaxpr, n_consts, n_carry)
    # A loop without iterations has no row to trace it with.
    if streams and params["length"]:
        # Only a trace of the body shows which results are in half precision.
        row = jax.tree.map(lambda x: x[0], (xs, behind.zeros()))
        jax.eval_shape(body, weights, _begun(carried, carry_avals), row)
        for i in streams:
            if given[i] == place.settings.dtype:
                carry_avals[i] = carry_avals[i].update(dtype=given[i])
    init = _begun(carried, carry_avals)
    carry, ys = behind.scan(body, weights, init, xs, **scan_options(params))
    return _carried(place, carry) + [
        Value(y, f) for y, f in zip(ys, found[0], strict=True)
    ]


def rewrite_while(case: Case) -> list[Value]:
    """Rewrites a loop of unknown length."""
    run, operands, params = case.run, case.operands, case.equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    avals = [aval_of(v) for v in open_jaxpr(body).invars[n_body:]]
    for_test, for_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
    place = dataclasses.replace(_loop_place(case), is_in_while=True)
    wanted = demands_for(avals, place.settings.dtype)
    # A test does not go into a loss.
    test_place = dataclasses.replace(place, reach=())
    init = [
        _strong(v, a) for v, a in zip(operands[n_cond + n_body :], avals, strict=True)
    ]

    def inside(fixed: list[Value], carry: PyTree) -> list[Value]:
        # Without slots: its iterations return nothing that could fill them.
        arrays, facts = [v.array for v in fixed], [v.facts for v in fixed]
        values = make_values(arrays, facts, stored=[v.stored for v in fixed])
        return [*values, *_carried(place, carry)]

    def are_going_on(carry: PyTree) -> AnyArray:
        values = inside(for_test, carry)
        return evaluate(run, test_place, test, values, (UNREAD,))[0].array

    def is_going_on(carry: PyTree) -> AnyArray:
        going = are_going_on(carry)
        return jnp.any(going) if going.ndim else going

    def step(carry: PyTree) -> list[AnyArray]:
        results = evaluate(run, place, body, inside(for_body, carry), wanted)
        new = [_strong(v, a) for v, a in zip(results, avals, strict=True)]
        if not aval_of(open_jaxpr(test).outvars[0]).shape:
            return new
        going = are_going_on(carry)
        return [where_leading(going, a, b) for a, b in zip(new, carry, strict=True)]

    return _carried(place, jax.lax.while_loop(is_going_on, step, init))


def _strong(value: Value, aval: Aval) -> AnyArray:
    """Returns an array in the dtype that a loop declares for its carry."""
    with noted_cast(CARRY):
        array = value.cast(aval.dtype) if is_castable(aval) else value.array
    if getattr(jax.typeof(array), "weak_type", False):
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def _carried(place: Place, arrays: Sequence[AnyArray]) -> list[Value]:
    """Returns a loop's carry as computed values in their declared dtypes.

    Half precision is a residual stream if such a stream may be half.
    """
    values = map(computed, arrays)
    if place.has_wide_loop:
        return widened(values)
    if not place.settings.has_half_stream:
        return list(values)
    return [stream(v.array) if v.is_computed_in_half else v for v in values]


def _begun(values: Sequence[Value], avals: Sequence[Aval]) -> list[AnyArray]:
    """Returns the arrays that an iteration begins with."""
    return [_strong(v, a) for v, a in zip(values, avals, strict=True)]


def _as_carried(value: Value) -> Value:
    """Returns a value as it is in the body of a loop that carries it: computed."""
    return Value(value.array, value.facts._replace(is_declared=False))


def _as_constant(value: Value, variable: Var) -> Value:
    """Returns a value that all iterations read; its gradients are float32 sums."""
    if not value.is_computed_in_half or aval_of(variable).dtype != FULL:
        return value
    return value.as_float32()


def _with_copy(run: Run, place: Place, value: Value, demand: Demand) -> Value:
    """Returns a value that all iterations read, with a copy in half precision.

    XLA for GPUs does not move its cast out of what `jax.checkpoint` computes again in
    each iteration. Gradients go to the float32 array, as those of a cast there.
    """
    is_known = value.is_constant or value.stored is not None or value.dtype != FULL
    is_alone = place.settings.device.repeats_casts and not run.uses.wire
    if is_known or not is_alone or Demand.HALF not in demand:
        return value
    with noted_cast(USED):
        fixed = jax.lax.stop_gradient(value.array)
        copy = jax.lax.convert_element_type(fixed, place.settings.dtype)
    return dataclasses.replace(value, _array=value.array, stored=HalfCopy(copy))


# --- Gradients of a recurrent weight, of all turns in one product ---------------------
#
# $$y_t = x_t W \qquad \bar W = \sum_t x_t^T \bar y_t = X^T \bar Y$$
#
# In the loop each turn reads and writes the sum in float32. Behind it the stacks of
# $x_t$, which are kept anyway, and of $\bar y_t$ are multiplied at once.


class _Behind:
    """The weights of a loop whose gradients are computed behind it.

    Attributes:
        products: The product of each weight, by its number among the constants. Only it
            reads the weight, and the loop stacks about as much as its results anyway.
    """

    def __init__(
        self, run: Run, place: Place, ahead: Demands, length: int, fixed: list[Value]
    ) -> None:
        """Finds the weights among the constants of a loop of some length."""
        self.products: dict[int, JaxprEqn] = {}
        self._length, self._dtype = length, place.settings.dtype
        self._taps: list[Tap] = []
        jaxpr, shared = ahead.jaxpr, ahead.jaxpr.invars[: len(fixed)]
        # Of so many turns a gradient may exceed float16. And JAX would sum that of the
        # zeros over devices, on which they are equal.
        is_plain = self._dtype == jnp.bfloat16 and not (manual_axes() or is_on_a_mesh())
        if not is_plain or run.uses.recipes or _parts(length) < 3 or jaxpr.effects:
            return
        rows = (*jaxpr.invars[len(fixed) :], *jaxpr.outvars)
        room = _MORE * sum(count(aval_of(v).shape) for v in rows)
        for i, (value, variable) in enumerate(zip(fixed, shared, strict=True)):
            is_half = ahead.demand(variable) == Demand.HALF and value.copy is not None
            if not (is_half and value.facts.is_weight and ahead.is_read_once(variable)):
                continue
            most = min(room, count(value.shape))
            for equation in jaxpr.eqns:
                is_alone = all(a in shared for a in equation.invars)
                if variable not in equation.invars or is_alone:
                    continue
                is_small = count(aval_of(equation.outvars[0]).shape) <= most
                if equation.primitive.name == "dot_general" and is_small:
                    self.products[i] = equation

    def zeros(self) -> list[AnyArray]:
        """Returns a stack for the gradient of each product's result; none is read."""
        shapes = [aval_of(e.outvars[0]).shape for e in self.products.values()]
        return [jnp.zeros((self._length, *s), self._dtype) for s in shapes]

    def tapped(self, consts: list[Value], weights: Any, zeros: Any) -> list[Tap]:
        """Puts taps on the weights among a body's constants, and returns them."""
        self._taps = list(map(Tap, zeros))
        for i, array, tap in zip(self.products, weights, self._taps, strict=True):
            consts[i] = dataclasses.replace(consts[i], _array=array, tap=tap)
        return self._taps

    def scan(self, body: Any, weights: Any, *given: Any, **options: Any) -> PyTree:
        """Runs a loop; the derivative by its weights is a product of all turns.

        Its rule linearizes the loop by all but the weights, whose tangents come in by
        the zeros: so it has forward and reverse mode, and further derivatives.

        Args:
            body: The body, a function of the weights, too.
            weights: The weights.
            *given: The initial carry and the stacks.
            **options: Options of the scan.
        """

        def loop(weights: PyTree, zeros: PyTree, init: PyTree, xs: PyTree) -> PyTree:
            turn = functools.partial(body, weights)
            carry, (ys, rows) = jax.lax.scan(turn, init, (xs, zeros), **options)
            return (carry, ys), rows

        if not self.products:
            return loop(weights, [], *given)[0]
        made = jax.make_jaxpr(loop, return_shape=True)(weights, self.zeros(), *given)
        closed, constants = constants_as_inputs(made[0])
        products = [tap.product for tap in self._taps]
        if None in products:  # a product was replaced
            return loop(weights, self.zeros(), *given)[0]

        def program(weights: PyTree, others: PyTree, zeros: PyTree) -> PyTree:
            held, rest = others[: len(constants)], others[len(constants) :]
            results = jaxpr_as_fun(closed)(*held, *weights, *zeros, *rest)
            return jax.tree.unflatten(jax.tree.structure(made[1]), results)

        @jax.custom_jvp
        def run(weights: PyTree, others: PyTree) -> PyTree:
            return program(weights, others, self.zeros())[0]

        def rule(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
            (weights, others), (by_weights, by_others) = primals, tangents
            are_fixed = [isinstance(x, SymbolicZero) for x in by_others]
            fixed, moving = eqx.partition(others, are_fixed)
            zeros = self.zeros()
            results, push, rows = jax.linearize(
                lambda zeros, x: program(weights, eqx.combine(fixed, x), zeros),
                zeros,
                moving,
                has_aux=True,
            )
            taps = list(map(_of_all_turns, products, rows, by_weights))
            return results, push(taps, eqx.filter(by_others, are_fixed, inverse=True))

        run.defjvp(rule, symbolic_zeros=True)
        return run(weights, [*constants, *jax.tree.leaves(given)])


def _parts(length: int) -> int:
    """Returns the number of equal parts in which turns are multiplied at once."""
    most = min(length, _MOST_PARTS)
    return max((n for n in range(1, most + 1) if length % n == 0), default=0)


def _of_all_turns(
    product: tuple[JaxprEqn, int], rows: AnyArray, weight: Any
) -> AnyArray:
    """Returns a product of the rows of all turns with a weight's tangent."""

    def of_a_turn(row: AnyArray, weight: AnyArray) -> AnyArray:
        pair = (row, weight) if product[1] else (weight, row)
        return bind_equation(product[0], *pair)[0]

    if isinstance(weight, SymbolicZero):
        weight = jnp.zeros(weight.shape, FULL)
    parts = _parts(len(rows))
    wide = jnp.broadcast_to(weight, (parts, *weight.shape))
    half = jax.lax.convert_element_type(wide, rows.dtype)
    rows = rows.reshape(parts, -1, *rows.shape[1:])
    found = jax.vmap(jax.vmap(of_a_turn, (0, None)))(rows, half)
    return found.reshape(-1, *found.shape[2:])


def _loop_place(case: Case) -> Place:
    """Returns the place in a loop, whose results also go into its next iteration."""
    reach = case.place.reach
    reach = reach and reach_of_program(sub_jaxprs(case.equation)[0], reach)
    place = dataclasses.replace(case.place, reach=reach, is_in_loop=True)
    if case.name == "scan" and has_wide_loops(place.settings):
        return dataclasses.replace(place, has_wide_loop=True)
    return place


# --- Half precision in a scan's stacks and carry --------------------------------------


def _narrowed_stacks(
    run: Run, place: Place, ahead: Demands, operands: Sequence[Value], first: int
) -> list[Value]:
    """Returns a scan's stacked operands, cast where every iteration casts its part.

    Args:
        run: The run.
        place: The place of the body.
        ahead: The demands of the body.
        operands: The body's operands: constants, carry, stacks.
        first: The number of operands before the stacks.
    """
    if place.has_wide_loop:
        return widened(operands[first:])
    jaxpr = ahead.jaxpr
    return [
        _narrowed(value, place.settings.dtype)
        if demand == Demand.HALF
        and _may_be_narrowed(run, place, jaxpr, variable, value)
        else value
        for value, variable, demand in zip(
            operands[first:], jaxpr.invars[first:], ahead.inputs[first:], strict=True
        )
    ]


def _narrowed_results(
    place: Place, values: Sequence[Value], demands: Wanted, avals: Sequence[Aval]
) -> list[Value]:
    """Returns results to be stacked, cast if all uses of the stack cast it.

    A stack that the program declares in half precision is cast to that.
    """
    if place.has_wide_loop:
        return list(values)

    def narrowed(value: Value, demand: Demand, aval: Aval) -> Value:
        if value.dtype != FULL or value.facts.is_declared or not is_castable(aval):
            return value
        if aval.dtype != FULL:
            return _narrowed(value, aval.dtype)
        is_half = demand == Demand.HALF
        return _narrowed(value, place.settings.dtype) if is_half else value

    return list(map(narrowed, values, demands, avals))


def _narrowed(value: Value, dtype: np.dtype) -> Value:
    facts = value.facts._replace(is_declared=False)
    stored = value.stored if value.copy is None else None
    return Value(value.cast(dtype), facts, slots=value.slots, stored=stored)


def _may_be_narrowed(
    run: Run, place: Place, jaxpr: Jaxpr, variable: Var, value: Value
) -> bool:
    if value.dtype != FULL or not is_castable(aval_of(variable)):
        return False
    if not value.facts.is_declared:
        return True
    if not may_be_cast_early(run, place):
        return False
    return _uses(jaxpr, variable) == 1 or is_read_once(jaxpr, variable)


def _uses(jaxpr: Jaxpr, variable: Var) -> int:
    """Counts the operations that use a value; one in a loop counts as two."""
    found = sum(v is variable for v in jaxpr.outvars)
    for equation in jaxpr.eqns:
        places = [i for i, atom in enumerate(equation.invars) if atom is variable]
        if not places:
            continue
        subs = sub_jaxprs(equation)
        if properties(equation.primitive.name).moves:
            found += sum(_uses(jaxpr, v) for v in equation.outvars)
        elif not subs:
            found += len(places)
        for sub in subs:
            weight = 1 if sub.trips == 1 else 2
            inner = zip(sub.operands, sub.jaxpr.invars, strict=True)
            found += sum(weight * _uses(sub.jaxpr, v) for i, v in inner if i in places)
    return found


def _streams_of(
    run: Run, settings: Settings, jaxpr: Jaxpr, first: int, count: int
) -> list[int]:
    """Finds the residual streams that a body carries, as the blocks of a model do.

    Args:
        run: The run.
        settings: The settings around the body.
        jaxpr: The body.
        first: The number of constants before the carry.
        count: The length of the carry.

    Returns:
        The indices in the carry of residual streams that may be in half precision.
        Parameters of a training loop look alike, except that derivatives go with them.
    """
    if not settings.has_half_stream or not settings.is_enabled:
        return []
    if any(map(is_differentiated, distinct_equations(jaxpr))):
        return []
    carried = list(enumerate(jaxpr.invars[first : first + count]))
    return [
        i
        for i, variable in carried
        if is_castable(aval_of(variable))
        and aval_of(variable).dtype == FULL
        and (variable, True) in _streams_into(run, settings, jaxpr, jaxpr.outvars[i])
    ]


def _streams_into(
    run: Run, settings: Settings, jaxpr: Jaxpr, atom: Atom
) -> set[tuple[Var, bool]]:
    """Returns a value's inputs apart from addends, and whether there were any."""
    are_declared = (False,) * len(jaxpr.invars)
    wanted = (Demand.HALF,) * len(jaxpr.outvars)
    ahead = demands_of(run, settings, jaxpr, are_declared, wanted)
    makers = makers_of(jaxpr)

    def inputs(atom: Atom, has_sum: bool) -> set[tuple[Var, bool]]:
        if isinstance(atom, Literal):
            return set()
        maker = makers.equations.get(atom)
        if maker is None:
            return {(atom, has_sum)}
        if atom in ahead.residuals:
            return {one for a in maker.invars for one in inputs(a, True)}
        if properties(maker.primitive.name).moves:
            return inputs(maker.invars[0], has_sum)
        here, found = settings.at(scope_names(maker)), set[tuple[Var, bool]]()
        for sub in sub_jaxprs(maker):
            number = maker.outvars.index(atom)
            if sub.trips != 1 or number not in sub.results:
                continue
            result = sub.jaxpr.outvars[sub.results.index(number)]
            operands = dict(zip(sub.jaxpr.invars, sub.operands, strict=True))
            for v, has_inner in _streams_into(run, here, sub.jaxpr, result):
                if (i := operands.get(v)) is not None:
                    found |= inputs(maker.invars[i], has_sum or has_inner)
        return found

    return inputs(atom, False)


REWRITES: dict[str, Rewrite] = {"scan": rewrite_scan, "while": rewrite_while}
