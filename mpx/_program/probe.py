"""Runs a program with a probe, which records facts about the values inside.

A *probe* receives every operation with its operands and results as they are computed,
and may return *records*: arrays that are returned beside the results of the program. It
may also replace the computation of an operation. Records leave nested programs as
results do:

- of calls (`jit`, custom rules) unchanged; likewise of a checkpoint, which stays one;
- of a scan stacked along a new first axis, one entry per iteration;
- of a conditional as zeros for the branches that are not taken;
- of a `while` loop joined over iterations, beginning with zeros; or dropped; or stacked
  as of a scan, if the probe gives a maximum number of iterations;
- of `shard_map` stacked along a new first axis, one entry per device.

A *tag* is a fact about a value that is known without running anything; it travels with
the value. In a loop it is the tag at the start of an iteration, without facts from the
iteration before.

The program can be run but not differentiated: derivative rules are dropped.
"""

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from .._base.jax_compat import (
    as_varying,
    bind_equation,
    equation_context,
    open_jaxpr,
    scan_counts,
    scan_options,
    shard_map_axes,
)
from .._base.typing import AnyArray, Atom, Aval, Program
from .equations import (
    SubJaxpr,
    aval_of,
    checkpoint_params,
    constants_as_inputs,
    forms_of,
    program_of,
    sub_jaxprs,
    where_leading,
)
from .flow import Location
from .primitives import properties

# --- The interface of a probe ---------------------------------------------------------

Records: TypeAlias = dict[Hashable, PyTree]
"""Trees of arrays by a key that the probe chooses."""


@dataclasses.dataclass(frozen=True)
class Tagged:
    """An array in a program, and the probe's tag of it."""

    array: AnyArray
    tag: Any


class Probe(abc.ABC):
    """Observes the values of a program. One probe serves one trace."""

    @abc.abstractmethod
    def constant(self, array: object) -> object:
        """Returns the tag of a literal or of a constant array of the program."""

    @abc.abstractmethod
    def transfer(
        self, equation: JaxprEqn, place: Location, operands: Sequence[Tagged]
    ) -> Sequence[object]:
        """Returns the tags of the results of an operation."""

    @abc.abstractmethod
    def observe(
        self,
        equation: JaxprEqn,
        place: Location,
        operands: Sequence[Tagged],
        results: Sequence[Tagged],
    ) -> Records:
        """Returns the records of an operation."""

    def compute(self, equation: JaxprEqn, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """Computes the results of an operation, by default by its primitive."""
        return bind_equation(equation, *arrays)

    def forms(self, equation: JaxprEqn) -> ClosedJaxpr:
        """Returns the program of an `on_target`, by default made anew."""
        return forms_of(equation)

    def turns(self, equation: JaxprEqn) -> int | None:
        """Returns the most iterations of a `while` loop, to stack; None to join."""
        return None

    def meet(self, values: Sequence[Tagged]) -> None:
        """Receives the inputs and constants of a program, and results of equations."""
        del values

    def keep(self, records: Records, found: Records) -> None:
        """Adds the records of an equation to those before it."""
        records |= found

    def inside(self, *, is_apart: bool = False) -> contextlib.AbstractContextManager:
        """Returns a context for a nested program, whose arrays must not leave it.

        Args:
            is_apart: Whether arrays from outside must not be used in it, either.
        """
        del is_apart
        return contextlib.nullcontext()

    def carried(self, equation: JaxprEqn, place: Location, tag: Any) -> object:
        """Returns the tag inside a loop of a carry with this initial tag."""
        return tag

    def cut(self, tag: Any) -> object:
        """Returns the tag of one iteration's slice of a scanned array."""
        return tag

    def stacked(self, tag: Any) -> object:
        """Returns the tag of the stacked results of a scan."""
        return tag

    def stack(self, key: Hashable, axis: str) -> None:
        """Notes that a record gets a new first axis: `turn` or `device`."""
        del key, axis

    def join(self, before: PyTree, now: PyTree) -> PyTree:
        """Joins the records of two iterations of a `while` loop; None drops them."""
        return None

    def chosen(self, tags: Sequence[Any]) -> object:
        """Returns the tag of a conditional's result, given those of its branches."""
        return tags[0]

    @contextlib.contextmanager
    def branches(self) -> Iterator[Callable[[], None]]:
        """Returns a context for the branches of a conditional.

        Yields:
            A function to call before each branch.
        """
        yield lambda: None


# --- Running a program with a probe ---------------------------------------------------

# The results of an equation, and its records.
_Results: TypeAlias = tuple[list[Tagged], Records]


def probed(
    closed: ClosedJaxpr,
    probe: Probe,
    arrays: Sequence[AnyArray],
    tags: Sequence[object],
) -> tuple[list[AnyArray], Records]:
    """Runs a program with a probe, given its inputs and the tag of each.

    Returns the results of the program, and the records.
    """
    inputs = _tagged(arrays, tags)
    results, records = _run(closed, closed.consts, inputs, probe, Location())
    return [value.array for value in results], records


def _run(
    program: Program,
    consts: Sequence[AnyArray],
    inputs: Sequence[Tagged],
    probe: Probe,
    place: Location,
) -> _Results:
    jaxpr = open_jaxpr(program)
    held = [Tagged(x, probe.constant(x)) for x in consts]
    values = dict(zip(jaxpr.constvars, held, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))
    probe.meet([*held, *inputs])
    records: Records = {}

    def read(atom: Atom) -> Tagged:
        if isinstance(atom, Literal):
            return Tagged(atom.val, probe.constant(atom.val))
        return values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        with equation_context(equation):
            if is_seen_into(equation):
                run = _INSIDE.get(equation.primitive.name, _called)
                subs = sub_jaxprs(equation)
                results, found = run(_Held(equation, subs, operands, probe, place))
            else:
                results, found = _operation(equation, operands, probe, place)
        probe.keep(records, found)
        probe.meet(results)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars], records


def _operation(
    equation: JaxprEqn, operands: list[Tagged], probe: Probe, place: Location
) -> _Results:
    arrays = probe.compute(equation, [v.array for v in operands])
    results = _tagged(arrays, probe.transfer(equation, place, operands))
    return results, probe.observe(equation, place, operands, results)


def is_seen_into(equation: JaxprEqn) -> bool:
    """Returns whether a probe enters the programs that an equation holds.

    An equation with programs but no rule here is treated as one operation.
    """
    known = properties(equation.primitive.name)
    is_call = bool(known.program) and known.runs_once
    is_known = is_call or equation.primitive.name in _INSIDE
    return is_known and bool(sub_jaxprs(equation))


@dataclasses.dataclass(frozen=True)
class _Held:
    """An equation that holds programs, with its location and operands."""

    equation: JaxprEqn
    subs: Sequence[SubJaxpr]
    operands: list[Tagged]
    probe: Probe
    place: Location

    def within(self, sub: SubJaxpr) -> Location:
        """Returns the location of one of its programs."""
        return self.place.enter(self.equation, sub)

    def traced(self, sub: SubJaxpr, inputs: Sequence[tuple[Aval, object]]) -> "_Traced":
        """Traces one of its programs, given the type and tag of each input."""
        return _Traced(sub, inputs, self.probe, self.within(sub))


def _called(held: _Held) -> _Results:
    """Inlines a call; the shardings of a jit stay as constraints."""
    (sub,) = held.subs
    params, program = held.equation.params, program_of(held.equation)
    given = _constrained(held.operands, params.get("in_shardings"))
    results, records = _run(program, sub.consts, given, held.probe, held.within(sub))
    return _constrained(results, params.get("out_shardings")), records


def _constrained(
    values: Sequence[Tagged], shardings: Sequence[object] | None
) -> list[Tagged]:
    if shardings is None:
        return list(values)
    return [
        Tagged(jax.lax.with_sharding_constraint(v.array, s), v.tag)
        if isinstance(s, jax.sharding.Sharding)
        else v
        for v, s in zip(values, shardings, strict=True)
    ]


class _Traced:
    """A nested program that was traced by itself, with its records as results."""

    def __init__(
        self,
        sub: SubJaxpr,
        inputs: Sequence[tuple[Aval, object]],
        probe: Probe,
        place: Location,
    ) -> None:
        """Traces it.

        Args:
            sub: The program.
            inputs: The type and tag of each input.
            probe: The probe.
            place: The location of its equations.
        """
        avals, tags = zip(*inputs, strict=True) if inputs else ((), ())
        self.tags: list[object] = []
        self.keys: list[Hashable] = []

        def program(*arrays: AnyArray) -> tuple[list[AnyArray], list[PyTree]]:
            with probe.inside():
                given = _tagged(arrays, tags)
                results, records = _run(sub.jaxpr, sub.consts, given, probe, place)
            # Set while `make_jaxpr` traces, below.
            self.tags = [v.tag for v in results]
            self.keys = list(records)
            return [v.array for v in results], list(records.values())

        self.closed, shape = jax.make_jaxpr(program, return_shape=True)(*avals)
        self.records: Records = dict(zip(self.keys, shape[1], strict=True))

    def __call__(self, arrays: Sequence[AnyArray]) -> tuple[list[AnyArray], Records]:
        """Runs it."""
        return self.divided(jaxpr_as_fun(self.closed)(*arrays))

    def divided(self, results: Sequence[AnyArray]) -> tuple[list[AnyArray], Records]:
        """Splits the results of the traced program into results and records."""
        count = len(self.tags)
        structure = jax.tree.structure(list(self.records.values()))
        found = jax.tree.unflatten(structure, results[count:])
        return list(results[:count]), dict(zip(self.keys, found, strict=True))


def _typed(values: Sequence[Tagged]) -> list[tuple[Aval, object]]:
    return [(jax.typeof(v.array), v.tag) for v in values]


def _in_checkpoint(held: _Held) -> _Results:
    """Keeps a checkpoint, so that XLA merges nothing in it with code before it."""
    made = held.traced(held.subs[0], _typed(held.operands))
    jaxpr, constants = constants_as_inputs(made.closed)
    params = checkpoint_params(held.equation.params, jaxpr, len(constants))
    changed = held.equation.replace(params=params)
    arrays = bind_equation(changed, *constants, *(v.array for v in held.operands))
    results, records = made.divided(arrays)
    return _tagged(results, made.tags), records


def _tagged(arrays: Sequence[AnyArray], tags: Sequence[object]) -> list[Tagged]:
    return [Tagged(x, tag) for x, tag in zip(arrays, tags, strict=True)]


def _in_scan(held: _Held) -> _Results:
    """Runs a scan; its records are stacked."""
    (sub,) = held.subs
    equation, operands, probe = held.equation, held.operands, held.probe
    n_consts, n_carry = scan_counts(equation.params)
    end = n_consts + n_carry
    avals = [aval_of(v) for v in sub.jaxpr.invars]
    tags = [v.tag for v in operands[:n_consts]]
    carry = operands[n_consts:end]
    tags += [probe.carried(equation, held.place, v.tag) for v in carry]
    tags += [probe.cut(v.tag) for v in operands[end:]]
    made = held.traced(sub, list(zip(avals, tags, strict=True)))
    fixed = [v.array for v in operands[:n_consts]]

    def body(
        carry: Sequence[AnyArray], xs: Sequence[AnyArray]
    ) -> tuple[list[AnyArray], PyTree]:
        results, records = made([*fixed, *carry, *xs])
        return results[:n_carry], (results[n_carry:], list(records.values()))

    begin = _begun(operands[n_consts:end], avals[n_consts:end])
    xs = [v.array for v in operands[end:]]
    carry, (ys, found) = jax.lax.scan(body, begin, xs, **scan_options(equation.params))
    for key in made.keys:
        probe.stack(key, "turn")
    tags = [*made.tags[:n_carry], *map(probe.stacked, made.tags[n_carry:])]
    records = dict(zip(made.keys, found, strict=True))
    return _tagged([*carry, *ys], tags), records


def _begun(values: Sequence[Tagged], avals: Sequence[Aval]) -> list[AnyArray]:
    """Returns the initial carry, with the weak types that the loop declares."""
    return [
        x
        if getattr(jax.typeof(x), "weak_type", False) == getattr(a, "weak_type", False)
        else jax.lax.convert_element_type(x, a.dtype)
        for x, a in ((v.array, a) for v, a in zip(values, avals, strict=True))
    ]


def _in_while(held: _Held) -> _Results:
    """Runs a `while` loop; its records are joined, or stacked up to a maximum."""
    body_sub, test_sub = held.subs
    params, probe = held.equation.params, held.probe
    turns = probe.turns(held.equation)
    n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
    for_test = [v.array for v in held.operands[:n_test]]
    inside = held.operands[n_test:]
    avals = [aval_of(v) for v in body_sub.jaxpr.invars]
    tags = [v.tag for v in inside[:n_body]]
    carry = inside[n_body:]
    tags += [probe.carried(held.equation, held.place, v.tag) for v in carry]
    made = held.traced(body_sub, list(zip(avals, tags, strict=True)))
    fixed = [v.array for v in inside[:n_body]]
    test = ClosedJaxpr(test_sub.jaxpr, list(test_sub.consts))

    def are_going_on(carry: Sequence[AnyArray]) -> AnyArray:
        return jaxpr_as_fun(test)(*for_test, *carry)[0]

    def is_going_on(carry: Sequence[AnyArray]) -> AnyArray:
        going = are_going_on(carry)
        return jnp.any(going) if going.ndim else going

    def turn(carry: Sequence[AnyArray]) -> tuple[list[AnyArray], Records]:
        results, now = made([*fixed, *carry])
        if aval_of(test_sub.jaxpr.outvars[0]).shape:
            going, pairs = are_going_on(carry), zip(results, carry, strict=True)
            results = [where_leading(going, new, old) for new, old in pairs]
        return results, now

    begin = _begun(inside[n_body:], avals[n_body:])
    if turns is None:
        carry, records = _with_joined_turns(
            probe, made.records, begin, is_going_on, turn
        )
    else:
        carry, records = _with_stacked_turns(probe, turns, begin, is_going_on, turn)
    return _tagged(carry, made.tags), records


_Turn = Callable[[Sequence[AnyArray]], tuple[list[AnyArray], Records]]
_Test = Callable[[Sequence[AnyArray]], AnyArray]


def _with_joined_turns(
    probe: Probe, shapes: Records, begin: list[AnyArray], test: _Test, turn: _Turn
) -> tuple[list[AnyArray], Records]:
    zeros = {key: jax.tree.map(_zeros, x) for key, x in shapes.items()}
    # Ask the probe once, with zeros, whether it joins iterations at all.
    kept = {key: x for key, x in zeros.items() if probe.join(x, x) is not None}

    def body(state: PyTree) -> tuple[list[AnyArray], list[PyTree]]:
        carry, before = state
        results, now = turn(carry)
        keys = zip(kept, before, strict=True)
        return results, [probe.join(old, now[key]) for key, old in keys]

    state = (begin, list(kept.values()))
    carry, found = jax.lax.while_loop(lambda state: test(state[0]), body, state)
    return carry, dict(zip(kept, found, strict=True))


def _with_stacked_turns(
    probe: Probe, turns: int, begin: list[AnyArray], test: _Test, turn: _Turn
) -> tuple[list[AnyArray], Records]:
    keys: list[Hashable] = []

    def body(carry: list[AnyArray], _: None) -> tuple[list[AnyArray], list[PyTree]]:
        going = test(carry)
        results, now = turn(carry)
        keys[:] = now
        pairs = zip(results, carry, strict=True)
        carry = [jax.lax.select(going, new, old) for new, old in pairs]
        none = jax.tree.map(_zeros, list(now.values()))
        return carry, jax.tree.map(
            lambda x, zero: jax.lax.select(going, x, zero), list(now.values()), none
        )

    carry, found = jax.lax.scan(body, begin, None, turns)
    for key in keys:
        probe.stack(key, "turn")
    return carry, dict(zip(keys, found, strict=True))


def _zeros(x: AnyArray) -> AnyArray:
    return jnp.zeros(x.shape, x.dtype)


def _in_branches(held: _Held) -> _Results:
    """Runs a conditional: each branch returns all records, zeros for the others'."""
    equation, inputs = held.equation, _typed(held.operands[1:])
    made: list[_Traced] = []
    with held.probe.branches() as begin:
        for sub in held.subs:
            begin()
            made.append(held.traced(sub, inputs))
    records = {key: x for one in made for key, x in one.records.items()}
    # Every branch receives the outer arrays that the probe uses in any of them.
    constants = [x for one in made for x in one.closed.consts]
    types = [*map(jax.typeof, constants), *(aval for aval, _ in inputs)]
    first = itertools.accumulate((len(one.closed.consts) for one in made), initial=0)

    def filled(one: _Traced, start: int) -> ClosedJaxpr:
        def program(*arrays: AnyArray) -> tuple[list[AnyArray], list[PyTree]]:
            consts = arrays[start : start + len(one.closed.consts)]
            closed = ClosedJaxpr(one.closed.jaxpr, list(consts))
            given = arrays[len(constants) :]
            results, own = one.divided(jaxpr_as_fun(closed)(*given))
            return results, [
                own[k] if k in own else jax.tree.map(_zeros, x)
                for k, x in records.items()
            ]

        return jax.make_jaxpr(program)(*types)

    branches = tuple(map(filled, made, first))
    changed = equation.replace(params={**equation.params, "branches": branches})
    index, *arrays = (v.array for v in held.operands)
    arrays = bind_equation(changed, index, *constants, *arrays)
    count = len(equation.outvars)
    structure = jax.tree.structure(list(records.values()))
    found = jax.tree.unflatten(structure, arrays[count:])
    tags = map(held.probe.chosen, zip(*(one.tags for one in made), strict=True))
    return _tagged(arrays[:count], [*tags]), dict(zip(records, found, strict=True))


def _on_devices(held: _Held) -> _Results:
    """Runs a `shard_map`: the records of the devices are stacked."""
    (sub,) = held.subs
    params, probe, inner = held.equation.params, held.probe, held.within(sub)
    axes, tags = tuple(shard_map_axes(params)), [v.tag for v in held.operands]
    found: dict[str, Any] = {}

    def program(*arrays: AnyArray) -> tuple[list[AnyArray], list[PyTree]]:
        given = _tagged(arrays, tags)
        with probe.inside(is_apart=True):
            results, records = _run(sub.jaxpr, sub.consts, given, probe, inner)
        found["tags"] = [v.tag for v in results]
        found["keys"] = list(records)
        own = jax.tree.map(
            lambda x: as_varying(jnp.expand_dims(x, 0), frozenset(axes)),
            list(records.values()),
        )
        return [v.array for v in results], own

    mapped = jax.shard_map(
        program,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), P(axes)),
        check_vma=params["check_vma"],
        axis_names=set(axes),
    )
    results, records = mapped(*(v.array for v in held.operands))
    for key in found["keys"]:
        probe.stack(key, "device")
    records = dict(zip(found["keys"], records, strict=True))
    return _tagged(results, found["tags"]), records


def _in_forms(held: _Held) -> _Results:
    """Runs an `on_target` as a conditional, with a branch for its target."""
    closed = held.probe.forms(held.equation)
    place = held.within(held.subs[0])
    return _run(closed, closed.consts, held.operands, held.probe, place)


_INSIDE: Mapping[str, Callable[[_Held], _Results]] = {
    "checkpoint": _in_checkpoint,
    "remat": _in_checkpoint,
    "remat2": _in_checkpoint,
    "scan": _in_scan,
    "while": _in_while,
    "cond": _in_branches,
    "on_target": _in_forms,
    "shard_map": _on_devices,
}
