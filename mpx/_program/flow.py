"""Propagates facts through a program: forward from its inputs, or backward to them.

A *fact* is a property of a value. It is propagated along the equations, through the
programs that an equation holds, and through loops until it no longer changes. An
analysis of values is a `Flow` or a `BackwardFlow`. Analyses that count or search
instead of joining facts (`_autocast/_loops.py`, `_tools/_inspect/_costs.py`,
`_tools/_blame/`) walk the programs of an equation themselves, by `sub_jaxprs`.
"""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._base.jax_compat import open_jaxpr, place_of
from .._base.typing import Atom
from .equations import SubJaxpr, sub_jaxprs
from .source import Frame, ScopeEntry, frames_within, scopes

F = TypeVar("F")


class Flow(abc.ABC, Generic[F]):
    """Facts of values. Repeated use of `join` must reach a fixed point."""

    @abc.abstractmethod
    def constant(self, value: object) -> F:
        """Returns the fact of a literal, or of a constant array of the program."""

    @abc.abstractmethod
    def transfer(self, equation: JaxprEqn, facts: Sequence[F]) -> Sequence[F]:
        """Maps the facts of an operation's operands to those of its results."""

    @abc.abstractmethod
    def join(self, a: F, b: F) -> F:
        """Returns the fact of a value that is one of two, by branch or iteration."""

    def leave(
        self, equation: JaxprEqn, role: str, operands: Sequence[F], results: Sequence[F]
    ) -> None:
        """Receives the facts of an equation's operands and a program's results."""


@dataclasses.dataclass(frozen=True)
class Location:
    """The location of an equation in a program with nested programs."""

    scopes: tuple[ScopeEntry, ...] = ()
    frames: tuple[Frame, ...] = ()
    executions: int = 1
    """How often it runs, each `while` around it counted as one iteration."""
    unknown_loops: int = 0
    """How many loops around it have no trip count before they run."""
    inside: tuple[str, ...] = ()
    """The equations around it, the outermost first: `jit step`, `scan body`."""
    function: tuple[str, int] = ("", 0)
    """File and line of the function that the program around it was traced from."""

    def enter(self, equation: JaxprEqn, sub: SubJaxpr) -> "Location":
        """Returns the location of the equations of a program in an equation here."""
        own = str(equation.params.get("name", ""))
        name = " ".join(filter(None, (equation.primitive.name, own, sub.role)))
        return Location(
            (*self.scopes, *scopes(equation)),
            self.frames_of(equation),
            self.executions * (1 if sub.trips is None else sub.trips) * sub.devices,
            self.unknown_loops + (sub.trips is None),
            (*self.inside, name),
            place_of(sub.jaxpr),
        )

    def frames_of(self, equation: JaxprEqn) -> tuple[Frame, ...]:
        """Returns the calls that led to an equation here, the outermost first."""
        own = frames_within(equation, self.function)
        # The frames of a nested program begin where its tracing began.
        known = own[: len(self.frames)] == self.frames
        return own if known else (*self.frames, *own)


@dataclasses.dataclass(frozen=True)
class Visit(Generic[F]):
    """One operation of a program, with its location and facts."""

    equation: JaxprEqn
    place: Location
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


def walk(jaxpr: ClosedJaxpr, inputs: Sequence[F], flow: Flow[F]) -> Iterator[Visit[F]]:
    """Visits every operation, including those of nested programs, in order.

    Args:
        jaxpr: A closed jaxpr.
        inputs: The facts of its inputs.
        flow: How facts are propagated.

    Yields:
        The operations, without the equations that hold programs.
    """
    visits, _ = _walk(open_jaxpr(jaxpr), jaxpr.consts, inputs, flow, Location())
    yield from visits


def propagate(
    jaxpr: Jaxpr, consts: Sequence[object], inputs: Sequence[F], flow: Flow[F]
) -> list[F]:
    """Maps the facts of a program's inputs to those of its results."""
    _, results = _walk(jaxpr, consts, inputs, flow, None)
    return results


def walk_inside(equation: JaxprEqn, operands: Sequence[F], flow: Flow[F]) -> None:
    """Propagates facts of operands through the programs that one equation holds."""
    _walk_inside(equation, sub_jaxprs(equation), operands, flow, None)


def _walk(
    jaxpr: Jaxpr,
    consts: Sequence[object],
    inputs: Sequence[F],
    flow: Flow[F],
    place: Location | None,
) -> tuple[list[Visit[F]], list[F]]:
    """Returns the visits (none without a location) and the facts of the results."""
    # Of a program that a Pallas kernel runs with scratch arrays they are not known.
    known = itertools.zip_longest(jaxpr.constvars, consts)
    facts: dict[Var, F] = {variable: flow.constant(value) for variable, value in known}
    facts.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Atom) -> F:
        return flow.constant(atom.val) if isinstance(atom, Literal) else facts[atom]

    visits: list[Visit[F]] = []
    for equation in jaxpr.eqns:
        operands = tuple(read(atom) for atom in equation.invars)
        subs = sub_jaxprs(equation)
        if subs:
            found, results = _walk_inside(equation, subs, operands, flow, place)
            visits += found
        else:
            results = flow.transfer(equation, operands)
            if place is not None:
                visits.append(Visit(equation, place, operands, tuple(results)))
        facts.update(zip(equation.outvars, results, strict=True))
    return visits, [read(atom) for atom in jaxpr.outvars]


def _walk_inside(
    equation: JaxprEqn,
    subs: Sequence[SubJaxpr],
    operands: Sequence[F],
    flow: Flow[F],
    place: Location | None,
) -> tuple[list[Visit[F]], Sequence[F]]:
    visits: list[Visit[F]] = []
    results: dict[int, F] = {}
    operands = list(operands)
    for sub in subs:
        inner = None if place is None else place.enter(equation, sub)
        inputs = [_input_fact(flow, operands, i) for i in sub.operands]
        found, outputs = _walk(sub.jaxpr, sub.consts, inputs, flow, inner)
        # Terminates because `join` only adds, and a fact without additions stays equal.
        # The visits of earlier rounds are dropped: facts of the first iteration may not
        # hold in later ones.
        while (merged := _next_iteration(flow, sub, inputs, outputs)) != inputs:
            inputs = merged
            found, outputs = _walk(sub.jaxpr, sub.consts, inputs, flow, inner)
        visits += found
        flow.leave(equation, sub.role, operands, outputs)
        # A loop may run no iteration, and its condition reads the carry of later ones.
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
        # No program determines these results: treat the equation as one operation.
        whole = flow.transfer(equation, operands)
        # Facts from a nested program take precedence.
        results = dict(enumerate(whole)) | results
    return visits, [results[i] for i in range(len(equation.outvars))]


def _next_iteration(
    flow: Flow[F], sub: SubJaxpr, inputs: list[F], outputs: list[F]
) -> list[F]:
    """Returns the facts of the inputs after an iteration with these outputs."""
    merged = list(inputs)
    for output, where in sub.carried:
        merged[where] = flow.join(inputs[where], outputs[output])
    return merged


def _input_fact(flow: Flow[F], operands: Sequence[F], index: int | None) -> F:
    if index is not None:
        return operands[index]
    # The operand is unknown, so only the join of all facts applies.
    fact = operands[0] if operands else flow.constant(None)
    for other in operands[1:]:
        fact = flow.join(fact, other)
    return fact


# --- Backward -------------------------------------------------------------------------


class BackwardFlow(abc.ABC, Generic[F]):
    """Facts of values that come from their users, such as where a value is needed.

    They are flags or sets: the fact of a value with two users is their union.
    """

    nothing: F
    """The fact of an unused value."""

    def join(self, a: F, b: F) -> F:
        """Returns the fact of a value with two users."""
        either: Any = a
        return either | b

    @abc.abstractmethod
    def transfer(self, equation: JaxprEqn, results: Sequence[F]) -> Sequence[F]:
        """Maps the facts of an operation's results to those of its operands."""

    def inside(self, sub: SubJaxpr, results: Sequence[F]) -> Sequence[F]:
        """Maps the facts of a nested program's results to those of its inputs."""
        facts = backward(sub.jaxpr, results, self)
        return [facts.get(v, self.nothing) for v in sub.jaxpr.invars]

    def operands(self, equation: JaxprEqn, results: Sequence[F]) -> Sequence[F]:
        """Returns the facts of the operands of any equation."""
        subs = sub_jaxprs(equation)
        if not subs:
            return self.transfer(equation, results)
        found = [self.nothing] * len(equation.invars)
        for sub in subs:
            inputs = self.inside(sub, results_within(sub, results, self))
            for place, fact in zip(sub.operands, inputs, strict=True):
                if place is not None:
                    found[place] = self.join(found[place], fact)
        return found


def backward(jaxpr: Jaxpr, results: Sequence[F], flow: BackwardFlow[F]) -> dict[Var, F]:
    """Propagates facts from the results of a program to its inputs.

    Returns the fact of each variable that is used.
    """
    facts: dict[Var, F] = {}

    def add(atom: Atom, fact: F) -> None:
        if not isinstance(atom, Literal):
            known = facts.get(atom)
            facts[atom] = fact if known is None else flow.join(known, fact)

    for atom, fact in zip(jaxpr.outvars, results, strict=True):
        add(atom, fact)
    # All users of a result come after its equation, so its fact is complete here, and
    # each equation is visited once.
    for equation in reversed(jaxpr.eqns):
        outputs = [facts.get(v, flow.nothing) for v in equation.outvars]
        found = flow.operands(equation, outputs)
        for atom, fact in zip(equation.invars, found, strict=True):
            add(atom, fact)
    return facts


def results_within(
    sub: SubJaxpr, results: Sequence[F], flow: BackwardFlow[F]
) -> list[F]:
    """Returns the facts of a nested program's results, given those of its equation.

    The carry of a loop is used after the last iteration and by the next iteration.
    """
    facts = [flow.nothing if i is None else results[i] for i in sub.results]
    while True:
        # Terminates because `join` only adds: each round begins with the last one's
        # facts.
        inputs = flow.inside(sub, facts) if sub.carried else ()
        before = list(facts)
        for output, where in sub.carried:
            facts[output] = flow.join(facts[output], inputs[where])
        if facts == before:
            return facts
