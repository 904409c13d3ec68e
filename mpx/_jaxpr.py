"""Reading jaxprs: what more than one transform needs to know of equations.

* A *program* is a jaxpr; an equation may hold programs of its own (`sub_jaxprs`): the
  body of a scan, the branches of a cond, a function under jit. Where each operand of
  the equation arrives in them, and how often they run, is said once, here.
* `walk` goes through all of them, depth first, with a *flow*: facts about values that
  travel from the inputs along the equations, through loops until they stay the same.

What is no program: the scalar combiners of reduce and scatter, and the kernels of
Pallas, whose instructions work on references. An equation that holds one is a leaf.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.extend import core

from ._jax_compat import open_jaxpr, scan_counts, shard_map_axes
from ._source import Frame, ScopeEntry, scopes, source_frames

MOVES = frozenset(
    {
        "broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "gather",
        "reshape", "rev", "slice", "squeeze", "transpose",
    }
)  # fmt: skip
"""Operations whose result holds values of their first operand and nothing else."""

OTHERS = "for other platforms"
"""The role of a branch for all platforms that have none of their own."""

# Programs that run once where their equation does, operand by operand.
_CALLS = frozenset(
    {
        "call", "checkpoint", "closed_call", "composite", "compute_on", "core_call",
        "custom_jvp_call", "custom_partitioning", "custom_vjp_call",
        "custom_vmap_call", "eval_jaxpr", "fused_call", "jaxpr_call", "jit", "pjit",
        "remat", "remat2", "remat_opt",
        "shard_map", "xla_metadata_call", "xla_pmap",
    }
)  # fmt: skip

MANY = 4096
"""What a dimension counts that only a call knows, such as that of an exported batch."""

_COMBINERS = re.compile("reduce|reduce_window|scatter.*|select_and_.*|pallas_call")


def lengths(shape: Iterable[Any]) -> tuple[int, ...]:
    """A shape in numbers.

    A dimension without one (`jax.export.symbolic_shape`) is taken to be large: JAX
    refuses to compare it.
    """
    known = (int, np.integer)
    return tuple(int(n) if isinstance(n, known) else MANY for n in shape)


def count(shape: Iterable[Any]) -> int:
    """How many numbers an array has, to compare it with others."""
    return math.prod(lengths(shape))


@dataclasses.dataclass(frozen=True)
class SubJaxpr:
    """A program that an equation holds, and how it is joined to the equation."""

    jaxpr: Any
    consts: tuple[Any, ...]
    role: str
    """What it is to the equation, where that has several: `body`, `branch 1 of 3`."""
    trips: int | None
    """How often it runs where the equation runs once; None if only a run can tell."""
    operands: tuple[int | None, ...]
    """For each input, the operand of the equation that arrives there."""
    results: tuple[int | None, ...]
    """For each output, the result of the equation that it becomes."""
    carried: tuple[tuple[int, int], ...] = ()
    """Which output comes back as which input in the next iteration."""
    devices: int = 1
    """On how many devices it runs, each with a part of the data."""


def sub_jaxprs(equation: Any) -> tuple[SubJaxpr, ...]:
    """The programs that an equation holds; none for an operation."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return (_scan_body(equation),)
    if name == "while":
        return _while_programs(equation)
    if name == "cond":
        return _branches(equation)
    if name == "custom_linear_solve":
        return (_solve(equation),)
    if _COMBINERS.fullmatch(name):
        return ()
    # A transform of a call may keep the program that it came from in other parameters.
    found = [x for x in params.values() if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]
    known = name in _CALLS
    devices = _devices(params) if name in ("shard_map", "xla_pmap") else 1
    role = "" if len(found) == 1 else "program"
    return tuple(
        dataclasses.replace(
            _joined(equation, x, role), trips=1 if known else None, devices=devices
        )
        for x in found
    )


def _sub(jaxpr: Any, **joints: Any) -> SubJaxpr:
    consts = tuple(getattr(jaxpr, "consts", ()))
    return SubJaxpr(open_jaxpr(jaxpr), consts, **joints)


def _joined(equation: Any, jaxpr: Any, role: str) -> SubJaxpr:
    """A program whose inputs and outputs are those of its equation, as far as known."""
    inner = open_jaxpr(jaxpr)
    n_in, n_out = len(inner.invars), len(inner.outvars)
    same_in = n_in == len(equation.invars)
    same_out = n_out == len(equation.outvars)
    return _sub(
        jaxpr,
        role=role,
        trips=1,
        operands=tuple(range(n_in)) if same_in else (None,) * n_in,
        results=tuple(range(n_out)) if same_out else (None,) * n_out,
    )


def _scan_body(equation: Any) -> SubJaxpr:
    params = equation.params
    n_consts, n_carry = scan_counts(params)
    body = _joined(equation, params["jaxpr"], "body")
    return dataclasses.replace(
        body,
        trips=params["length"],
        carried=tuple((i, n_consts + i) for i in range(n_carry)),
    )


def _while_programs(equation: Any) -> tuple[SubJaxpr, ...]:
    params = equation.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    n_carry = len(equation.outvars)
    carry = range(n_cond + n_body, n_cond + n_body + n_carry)
    body = _sub(
        params["body_jaxpr"],
        role="body",
        trips=None,
        operands=(*range(n_cond, n_cond + n_body), *carry),
        results=tuple(range(n_carry)),
        carried=tuple((i, n_body + i) for i in range(n_carry)),
    )
    condition = _sub(
        params["cond_jaxpr"],
        role="condition",
        trips=None,
        operands=(*range(n_cond), *carry),
        results=(None,),
    )
    return body, condition


def _branches(equation: Any) -> tuple[SubJaxpr, ...]:
    branches = equation.params["branches"]
    roles = [f"branch {i} of {len(branches)}" for i in range(1, len(branches) + 1)]
    # What `jax.lax.platform_dependent` makes; None is for all that are not named.
    platforms = equation.params.get("branches_platforms")
    if platforms is not None:
        roles = [OTHERS if p is None else f"for {' or '.join(p)}" for p in platforms]
    return tuple(
        _sub(
            branch,
            role=role,
            trips=1,
            operands=tuple(range(1, len(equation.invars))),
            results=tuple(range(len(equation.outvars))),
        )
        for role, branch in zip(roles, branches, strict=True)
    )


def _solve(equation: Any) -> SubJaxpr:
    """Of the four programs of a linear solve, only the solver itself is run."""
    lengths, jaxprs = (equation.params[key] for key in ("const_lengths", "jaxprs"))
    first = lengths.matvec + lengths.vecmat
    right_sides = range(sum(lengths), len(equation.invars))
    return _sub(
        jaxprs.solve,
        role="solve",
        trips=1,
        operands=(*range(first, first + lengths.solve), *right_sides),
        results=tuple(range(len(equation.outvars))),
    )


def constants_as_inputs(closed: Any) -> tuple[Any, Sequence[Any]]:
    """A program that holds no arrays, and those that it is given first instead.

    What a function closes over may be an array that JAX traces; a program that holds
    one lasts no longer than the trace.
    """
    if not closed.consts:
        return closed, ()
    count = len(closed.consts)

    def program(*arrays: Any) -> list[Any]:
        held = core.ClosedJaxpr(open_jaxpr(closed), list(arrays[:count]))
        return core.jaxpr_as_fun(held)(*arrays[count:])

    types = map(jax.typeof, closed.consts)
    return jax.make_jaxpr(program)(*types, *closed.in_avals), closed.consts


def zero_results(jaxpr: Any) -> tuple[bool, ...]:
    """For each result of a program whether it is zero, whatever the program is given.

    So come the derivatives that JAX knows to be zero when it has to make arrays of
    them. One that is found to be nothing by computing is not known.
    """
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, core.Literal):
            return bool(atom.val == 0)
        maker = makers.get(atom)
        return (
            maker is not None
            and maker.primitive.name in _SPREADS
            and is_zero(maker.invars[0])
        )

    return tuple(map(is_zero, jaxpr.outvars))


_SPREADS = frozenset(("broadcast_in_dim", "convert_element_type", "pvary"))


def _devices(params: dict[str, Any]) -> int:
    """Over how many devices a program is split by hand."""
    if "axis_size" in params:
        return params["axis_size"]
    sizes = dict(params["mesh"].shape)
    return math.prod(sizes[axis] for axis in shard_map_axes(params))


# --- Walking ------------------------------------------------------------------------

F = TypeVar("F")


class Flow(abc.ABC, Generic[F]):
    """Facts that travel with values. `join` must reach an end when applied again."""

    @abc.abstractmethod
    def constant(self, value: Any) -> F:
        """The fact of a literal, or of an array that the program holds."""

    @abc.abstractmethod
    def transfer(self, equation: Any, facts: Sequence[F]) -> Sequence[F]:
        """The facts of the results of an operation, from those of its operands."""

    @abc.abstractmethod
    def join(self, a: F, b: F) -> F:
        """The fact of a value that is one of two: of branches, or of iterations."""

    def leave(self, equation: Any, role: str, results: Sequence[F]) -> None:
        """Sees the facts of what a program inside of an equation gave."""


class NoFlow(Flow[None]):
    """The flow without facts."""

    def constant(self, value: Any) -> None:
        """Nothing."""

    def transfer(self, equation: Any, facts: Sequence[None]) -> Sequence[None]:
        """Nothing, for each result."""
        return [None] * len(equation.outvars)

    def join(self, a: None, b: None) -> None:
        """Nothing."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a program with programs inside an equation stands."""

    scopes: tuple[ScopeEntry, ...] = ()
    frames: tuple[Frame, ...] = ()
    executions: int = 1
    """How often it runs, each `while` around it counted as one iteration."""
    unknown_loops: int = 0
    """How many loops around it have no trip count before they run."""
    inside: tuple[str, ...] = ()
    """The equations around it, the outermost first: `jit step`, `scan body`."""

    def enter(self, equation: Any, sub: SubJaxpr) -> "Place":
        """The place of the equations of a program inside of an equation here."""
        name = " ".join(
            text
            for text in (
                equation.primitive.name,
                str(equation.params.get("name", "")),
                sub.role,
            )
            if text
        )
        return Place(
            (*self.scopes, *scopes(equation)),
            self.frames_of(equation),
            self.executions * (1 if sub.trips is None else sub.trips) * sub.devices,
            self.unknown_loops + (sub.trips is None),
            (*self.inside, name),
        )

    def frames_of(self, equation: Any) -> tuple[Frame, ...]:
        """The calls that led to an equation here, the outermost first."""
        own = source_frames(equation)
        # Those of a program inside of an equation begin where its tracing began.
        known = own[: len(self.frames)] == self.frames
        return own if known else (*self.frames, *own)


@dataclasses.dataclass(frozen=True)
class Visit(Generic[F]):
    """One operation of a program, with all that holds it."""

    equation: Any
    place: Place
    operands: tuple[F, ...]
    """The facts of its operands."""
    results: tuple[F, ...]
    """The facts of its results."""

    @property
    def scopes(self) -> tuple[ScopeEntry, ...]:
        """The whole name stack, from the outermost program on."""
        return (*self.place.scopes, *scopes(self.equation))

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The lines of the user's code that led to it, the outermost first."""
        return self.place.frames_of(self.equation)


def walk(jaxpr: Any, inputs: Sequence[F], flow: Flow[F]) -> Iterator[Visit[F]]:
    """Visits every operation, in programs inside of programs too, in their order.

    Args:
        jaxpr: A closed jaxpr.
        inputs: The facts of its inputs.
        flow: How facts travel.

    Yields:
        The operations; an equation that holds programs is not one itself.
    """
    visits, _ = _walk(open_jaxpr(jaxpr), jaxpr.consts, inputs, flow, Place())
    yield from visits


def walk_inside(equation: Any, operands: Sequence[F], flow: Flow[F]) -> None:
    """Lets facts travel through the programs that one equation holds.

    Args:
        equation: The equation.
        operands: The facts of its operands.
        flow: How facts travel.
    """
    _walk_inside(equation, sub_jaxprs(equation), operands, flow, Place())


def _walk(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[F], flow: Flow[F], place: Place
) -> tuple[list[Visit[F]], list[F]]:
    facts: dict[Any, F] = {
        variable: flow.constant(value)
        for variable, value in zip(jaxpr.constvars, consts, strict=True)
    }
    facts.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> F:
        return (
            flow.constant(atom.val) if isinstance(atom, core.Literal) else facts[atom]
        )

    visits: list[Visit[F]] = []
    for equation in jaxpr.eqns:
        operands = tuple(read(atom) for atom in equation.invars)
        subs = sub_jaxprs(equation)
        if subs:
            found, results = _walk_inside(equation, subs, operands, flow, place)
            visits += found
        else:
            results = flow.transfer(equation, operands)
            visits.append(Visit(equation, place, operands, tuple(results)))
        facts.update(zip(equation.outvars, results, strict=True))
    return visits, [read(atom) for atom in jaxpr.outvars]


def _walk_inside(
    equation: Any,
    subs: Sequence[SubJaxpr],
    operands: Sequence[F],
    flow: Flow[F],
    place: Place,
) -> tuple[list[Visit[F]], Sequence[F]]:
    visits: list[Visit[F]] = []
    results: dict[int, F] = {}
    operands = list(operands)
    for sub in subs:
        inner = place.enter(equation, sub)
        inputs = [_input_fact(flow, operands, i) for i in sub.operands]
        found, outputs = _walk(sub.jaxpr, sub.consts, inputs, flow, inner)
        while (joined := _next_iteration(flow, sub, inputs, outputs)) != inputs:
            inputs = joined
            found, outputs = _walk(sub.jaxpr, sub.consts, inputs, flow, inner)
        visits += found
        flow.leave(equation, sub.role, outputs)
        # A loop may run no iteration, and its condition sees the carry of later ones.
        for output, where in sub.carried:
            outputs[output] = inputs[where]
            operand = sub.operands[where]
            if operand is not None:
                operands[operand] = inputs[where]
        for number, output in zip(sub.results, outputs, strict=True):
            if number is not None:
                before = results.get(number, output)
                results[number] = flow.join(before, output)
    if len(results) < len(equation.outvars):
        # Nothing inside says what these are: an operation like any other.
        whole = flow.transfer(equation, operands)
        results = dict(enumerate(whole)) | results
    return visits, [results[i] for i in range(len(equation.outvars))]


def _next_iteration(
    flow: Flow[F], sub: SubJaxpr, inputs: list[F], outputs: list[F]
) -> list[F]:
    """The facts of the inputs when an iteration with these outputs was before."""
    joined = list(inputs)
    for output, where in sub.carried:
        joined[where] = flow.join(inputs[where], outputs[output])
    return joined


def _input_fact(flow: Flow[F], operands: Sequence[F], index: int | None) -> F:
    if index is not None:
        return operands[index]
    fact = operands[0] if operands else flow.constant(None)
    for other in operands[1:]:
        fact = flow.join(fact, other)
    return fact
