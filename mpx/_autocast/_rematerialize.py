"""Emits islands so that their backward pass starts from their inputs."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.typing import ArrayLike

from .._base.dtypes import HALF
from .._base.jax_compat import execution_context, execution_key, scope_names
from .._base.typing import AnyArray
from .._program import (
    Island,
    aval_of,
    computed_again,
    distinct_equations,
    is_worth_while,
    may_keep,
    measured_bytes,
)
from ._context import FULL, Facts, Place, Run, Usage, Value
from ._decide import USED, IslandNote, noted_cast, noted_island
from ._demand import Demand, Demands
from ._travel import slots_for

Values = dict[Var, Value]
Dtypes = Sequence[np.dtype]


class Site(NamedTuple):
    """The program in which islands are emitted.

    Attributes:
        run: The run, which caches islands.
        place: The place of the program.
        ahead: The demands of the program.
        values: Values by variable, to which results are added.
        emit: Emits one equation, given values, and adds its results.
    """

    run: Run
    place: Place
    ahead: Demands
    values: Values
    emit: Callable[[Place, JaxprEqn, Values], None]


def emit_island(site: Site, island: Island) -> None:
    """Emits an island, to be recomputed in the backward pass if that saves memory.

    A cast to float32 before it is a part of it, and results that are only cast are cast
    inside, so no float32 crosses the border needlessly. Equal islands, those of equal
    layers, are emitted once.
    """
    made, values, known = None, site.values, site.run.islands
    if any(map(may_keep, island.equations)):
        shared = tuple(i for i, v in enumerate(island.inputs) if values[v].is_shared)
        key = _signature(site, island), shared
        if key not in known:
            # An island ends where mesh or device change, so all its equations have the
            # context of the first.
            with execution_context(island.equations[0]):
                known[key] = _recomputed(site, island, shared)
        made = known[key]
    if made is not None:
        return made.emit(site, island)
    for equation in island.equations:
        if not all(v in values for v in equation.outvars):  # a copy: available already
            site.emit(site.place, equation, values)


def _arrays(island: Island, values: Values) -> dict[Var, AnyArray]:
    """Returns the inputs of an island that are not constants."""
    found = ((v, values[v]) for v in island.inputs)
    return {v: value.array for v, value in found if not value.is_constant}


def read_by_one(parts: Sequence[JaxprEqn | Island], ahead: Demands) -> Set[Var]:
    """Returns the variables that only one island reads; it sums their gradients."""
    found: set[Var] = set()
    for part in parts:
        if isinstance(part, Island):
            atoms = (a for e in part.equations for a in e.invars)
            read = collections.Counter(a for a in atoms if not isinstance(a, Literal))
            found |= {v for v in part.inputs if read[v] == ahead.readers.get(v)}
    return found


def for_readers(
    variable: Var, value: Value, ahead: Demands, alone: Set[Var] = frozenset()
) -> Value:
    """Prepares a value for its readers; see `Value.shared`.

    A half-precision residual stream has its gradients in half precision.

    Args:
        variable: Its variable.
        value: The value.
        ahead: The demands of the program.
        alone: The variables that only one island reads.
    """
    if not value.is_computed_in_half or value.facts.is_stream or variable in alone:
        return value
    return value.shared() if ahead.is_shared(variable) else value


@jax.custom_jvp
def of_float32(half: AnyArray, wide: AnyArray) -> AnyArray:
    """Widens a half-precision array, and passes the gradient to `wide` in float32."""
    return jax.lax.convert_element_type(half, wide.dtype)


@of_float32.defjvp
def _(
    primals: tuple[AnyArray, AnyArray], tangents: tuple[AnyArray, AnyArray]
) -> tuple[AnyArray, AnyArray]:
    return of_float32(*primals), tangents[1]


@jax.custom_jvp
def _only_gradient(x: AnyArray) -> AnyArray:
    """Returns zeros, which are not saved, with the gradient of an array."""
    return jnp.zeros_like(x)


@_only_gradient.defjvp
def _(primals: tuple[AnyArray], tangents: tuple[AnyArray]) -> tuple[AnyArray, AnyArray]:
    return _only_gradient(*primals), tangents[0]


@dataclasses.dataclass(frozen=True)
class _Recomputed:
    """An island as a function that is recomputed in the backward pass.

    Attributes:
        function: The function of the island's inputs, followed by its shared inputs in
            float32, which receive their gradients.
        facts: The facts of its results.
        are_cast: For each result whether it is returned in half precision, too.
        shared: The indices of shared inputs.
        used: Its usage. An equal island, which is not emitted itself, uses the same.
        note: Its note for reports, if notes are taken.
    """

    function: Callable[..., Sequence[AnyArray]]
    facts: tuple[Facts, ...]
    are_cast: tuple[bool, ...]
    shared: tuple[int, ...]
    used: Usage
    note: IslandNote | None

    def emit(self, site: Site, island: Island) -> None:
        """Emits an island equal to the original one, and adds its results.

        It may be in another program, whose demands determine the readers.
        """
        run, values, ahead = site.run, site.values, site.ahead
        run.note(self.used)
        noting = noted_island(self.note) if self.note else contextlib.nullcontext()
        with noting, execution_context(island.equations[0]):
            # Equal islands have their inputs in the same order, that of first use.
            shared = (values[island.inputs[i]].cast(FULL) for i in self.shared)
            arrays = *_arrays(island, values).values(), *map(_only_gradient, shared)
            results = self.function(*arrays)
        casts = iter(results[len(self.facts) :])
        for variable, array, facts, is_cast in zip(
            island.outputs, results, self.facts, self.are_cast, strict=False
        ):
            inputs = map(values.__getitem__, island.inputs)
            slots = slots_for(facts, list(inputs)) if run.uses.slots else None
            value = Value(array, facts, slots=slots)
            if is_cast:
                value.offer(next(casts))
            values[variable] = for_readers(variable, value, ahead)


def _recomputed(
    site: Site, island: Island, places: tuple[int, ...]
) -> _Recomputed | None:
    """Makes the function that recomputes an island; None if it does not pay."""
    run, place, ahead, values, emit = site
    arrays = _arrays(island, values)
    facts = {v: values[v].facts for v in arrays}
    numbers = {v: values[v] for v in island.inputs if values[v].is_constant}
    half = place.settings.dtype
    are_free = tuple(f.is_weight for f in facts.values())
    are_sums = (
        facts[v].is_stored_in_half and x.dtype == FULL for v, x in arrays.items()
    )
    rounded = None if place.has_wide_loop else half
    stored = tuple(rounded if is_sum else None for is_sum in are_sums)
    written = ahead.jaxpr.replace(
        invars=list(arrays), outvars=list(island.outputs), eqns=list(island.equations)
    )
    needed = [d or x.dtype for d, x in zip(stored, arrays.values(), strict=True)]
    if not numbers and not _may_pay(written, are_free, needed):
        return None
    # So there are no islands inside it.
    inner = dataclasses.replace(place, is_recomputed=True)
    shared, found = [island.inputs[i] for i in places], []

    def program(*arrays: AnyArray) -> tuple[list[AnyArray], list[AnyArray]]:
        inside = dict(numbers)
        for (variable, known), x in zip(facts.items(), arrays, strict=False):
            inside[variable] = Value(x, known)
        for variable, wide in zip(shared, arrays[len(facts) :], strict=True):
            known = facts[variable]._replace(is_stored_in_half=True)
            inside[variable] = Value(of_float32(inside[variable].array, wide), known)
        inside = {v: for_readers(v, value, ahead) for v, value in inside.items()}
        for equation in island.equations:
            emit(inner, equation, inside)
        results = [inside[v] for v in island.outputs]
        are_cast = tuple(
            value.dtype == FULL
            and not value.facts.is_declared
            and Demand.HALF in ahead.demand(v)
            for v, value in zip(island.outputs, results, strict=True)
        )
        # Set while `make_jaxpr` traces, below.
        found[:] = [tuple(value.facts for value in results), are_cast]
        with noted_cast(USED) if run.uses.notes else contextlib.nullcontext():
            casts = [v.cast(half) for v, c in zip(results, are_cast, strict=True) if c]
        return [value.array for value in results], casts

    before, run.used = run.used, Usage()
    wide = [jax.typeof(values[v].cast(FULL)) for v in shared]
    closed = jax.make_jaxpr(program)(*map(jax.typeof, arrays.values()), *wide)
    used, run.used = run.used, before
    known, are_cast = found
    are_free += tuple(True for _ in shared)
    if not is_worth_while(closed.jaxpr, are_free, stored):
        return None
    again_from = functools.partial(computed_again, is_in_loop=place.is_in_loop)
    function = again_from(closed, stored=stored, unread=len(shared))
    note = _note_of(closed, function, are_free) if run.uses.notes else None
    return _Recomputed(function, known, are_cast, places, used, note)


def _may_pay(written: Jaxpr, are_free: tuple[bool, ...], needed: Dtypes) -> bool:
    """Returns whether recomputing an island may pay, from the program as written.

    Most do not, and this check costs a quarter of emitting one: the float32 program as
    written saves at least as much as the emitted one.
    """
    atoms = (a for e in distinct_equations(written) for a in (*e.invars, *e.outvars))
    has_half = any(aval_of(a).dtype in HALF for a in atoms)
    return has_half or is_worth_while(written, are_free, needed)


def _note_of(
    closed: ClosedJaxpr,
    function: Callable[..., Sequence[AnyArray]],
    are_free: tuple[bool, ...],
) -> IslandNote:
    """Notes the bytes that are saved for an island, as written and recomputed."""
    plain, types = jaxpr_as_fun(closed), closed.in_avals
    before, after = (measured_bytes(f, types, are_free) for f in (plain, function))
    return IslandNote(before, after)


def _signature(site: Site, island: Island) -> Hashable:
    """Returns a key that is equal for islands that are emitted alike."""
    run, place, ahead, values, _ = site
    if run.uses.notes or place.settings.is_strict:  # each one is inspected
        return object()
    numbers = {v: i for i, v in enumerate(island.inputs)}
    equations = []
    for equation in island.equations:
        operands = tuple(
            (_exact(a.val), aval_of(a)) if isinstance(a, Literal) else numbers[a]
            for a in equation.invars
        )
        results = tuple((aval_of(v), ahead.demand(v)) for v in equation.outvars)
        params = tuple((k, _hashable(v)) for k, v in equation.params.items())
        scopes = scope_names(equation)
        equations.append((equation.primitive, params, operands, results, scopes))
        for v in equation.outvars:
            numbers[v] = len(numbers)
    inputs = tuple(
        (value.facts, _exact(value.array))
        if (value := values[v]).is_constant
        else (value.facts, value.dtype, jax.typeof(x))
        for v, x in {**dict.fromkeys(island.inputs), **_arrays(island, values)}.items()
    )
    outputs = tuple(numbers[v] for v in island.outputs)
    return place, execution_key(island.equations[0]), tuple(equations), inputs, outputs


def _exact(number: ArrayLike) -> Hashable:
    """Returns a key for the exact number: -0.0 is not 0.0, and NaN equals itself."""
    array = np.asarray(number)
    return array.dtype, array.shape, array.tobytes()


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        # The program that contains it lives as long as the run that holds the key.
        return id(value)
    return value
