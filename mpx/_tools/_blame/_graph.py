"""The values of a program and of all programs in it, and where each comes from.

Values are numbers. Programs that an equation only calls (under jit, in a checkpoint, in
a rule of the user's) are opened into the *scope* that they stand in. A loop, a branch
and `shard_map` have scopes of their own, whose inputs and outputs are joined to the
operands and results of their equation. So where a value comes from is read off, from
any depth.

A value in a loop is another one in each turn. An *instance* is a value with an index:
the turn in each loop around it, the outermost first. Turns of a scan have the place of
what they take of arrays. Devices are not told apart, since they hand values around.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ..._base.typing import AnyArray, Atom, Aval
from ..._program import (
    Location,
    SubJaxpr,
    aval_of,
    is_seen_into,
    properties,
    reachable,
    sub_jaxprs,
)

Index = tuple[int, ...]
Instance = tuple[int, Index]


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A program within the whole one whose operations run together.

    Attributes:
        outer: The scope that its equation stands in; None in the whole program.
        equation: The equation that holds it.
        place: What is around that.
        sub: The program.
        number: Its place in the order of the program, as that of a step.
        length: How many turns there are; None if it is no loop, or not known.
        branch: Which branch it is, from 0.
        operands: The numbers of the equation's operands.
        results: The numbers of its results.
        inputs: The numbers of its inputs.
        outputs: The numbers of its outputs.
    """

    outer: "Scope | None"
    equation: JaxprEqn
    place: Location
    sub: SubJaxpr
    number: int
    length: int | None
    branch: int
    operands: Sequence[int]
    results: Sequence[int]
    inputs: Sequence[int]
    outputs: list[int]

    @property
    def primitive(self) -> str:
        """What holds it: `scan`, `while`, `cond`, `shard_map`."""
        return self.equation.primitive.name

    @property
    def around(self) -> "list[Scope]":
        """It and all that are around it, the outermost first."""
        return [*(self.outer.around if self.outer is not None else []), self]

    @property
    def places(self) -> Sequence[int]:
        """The places of a loop's turns, in the order in which they are taken."""
        places = range(self.length or 0)
        is_reversed = self.primitive == "scan" and self.equation.params["reverse"]
        return places[::-1] if is_reversed else places

    @property
    def carried(self) -> dict[int, int]:
        """For the inputs that come from the turn before, the output that they were."""
        return {i: o for o, i in self.sub.carried}

    def outside(self, position: int, index: Index) -> Iterator[Instance]:
        """What arrives at an input."""
        turn = self.places.index(index[-1]) if self.length is not None else 0
        operand = self.sub.operands[position]
        if turn and position in self.carried:
            before = self.places[turn - 1]
            yield self.outputs[self.carried[position]], (*index[:-1], before)
        elif operand is not None:  # else nobody knows
            outer = index if self.length is None else index[:-1]
            yield self.operands[operand], outer

    def inside(self, position: int, index: Index) -> Iterator[Instance]:
        """What may be the result that an output becomes."""
        places: Iterable[Index] = ((place,) for place in self.places)
        if self.primitive == "scan" and position in self.carried.values():
            places = [(place,) for place in self.places[-1:]]
        elif self.length is None:
            places = [()]
        yield from ((self.outputs[position], (*index, *place)) for place in places)


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An operation.

    Attributes:
        equation: Its equation.
        place: What is around it.
        scope: The program that it stands in; None for the whole one.
        number: Its place in the order of the program.
        operands: The numbers of its operands.
        results: The numbers of its results.
    """

    equation: JaxprEqn
    place: Location
    scope: Scope | None
    number: int
    operands: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def primitive(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def around(self) -> list[Scope]:
        """The scopes that it stands in, the outermost first."""
        return [] if self.scope is None else self.scope.around

    def operands_of(self, result: int) -> tuple[int, ...]:
        """The operands that a result depends on."""
        if self.primitive == "optimization_barrier":
            return (self.operands[self.results.index(result)],)
        return self.operands

    def order(self, index: Index) -> tuple[int, ...]:
        """By which operations in turns are in the order in which they run."""
        rest, key = iter(index), []
        for scope in self.around:
            turn = [] if scope.length is None else [scope.places.index(next(rest))]
            key += [scope.number, *turn]
        return (*key, self.number)


def is_same_numbers(step: Node) -> bool:
    """Whether each result holds the numbers of one operand, and nothing else."""
    known = properties(step.primitive)
    is_one = len(step.operands) == 1 and len(step.results) == 1
    is_barrier = step.primitive == "optimization_barrier"
    return is_barrier or (known.moves and not known.reads_part and is_one)


class Graph:
    """A program with all programs in it.

    It is opened in the order in which a probe sees it (`mpx._program.probed`), so that
    the probe finds steps and constants by counting.

    Attributes:
        steps: Its operations.
        constants: What the programs hold themselves, by number.
        inputs: The numbers of the whole program's inputs.
        outputs: The numbers of its outputs.
        whiles: The scopes of `while` loops.
        makers: For each value that an operation makes the operation.
        users: For each value the operations that use it.
        held: The values that are operands of what holds scopes.
        enters: For the inputs of scopes the scope, and which input it is.
        leaves: For the results of what holds scopes the scopes, and which output it is.
        forward: The values that the loss, the first output, depends on. The function
            computes these without a derivative, too; others are for the gradient alone.
    """

    def __init__(
        self, closed: ClosedJaxpr, turns: Sequence[int | None] | None = None
    ) -> None:
        """Opens a program; `turns` as far as they are known."""
        self.steps: list[Node] = []
        self.constants: dict[int, AnyArray] = {}
        self.whiles: list[Scope] = []
        self.makers: dict[int, Node] = {}
        self.users: dict[int, list[Node]] = {}
        self.held: set[int] = set()
        self.enters: dict[int, tuple[Scope, int]] = {}
        self.leaves: dict[int, list[tuple[Scope, int]]] = {}
        self._avals: list[Aval] = []
        self._known = turns
        self.inputs = [self._new(aval) for aval in closed.in_avals]
        whole = (self.inputs, None, Location())
        self.outputs = self._open(closed.jaxpr, closed.consts, *whole)
        self.forward = self.reaching(self.outputs[:1])

    @property
    def turns(self) -> list[int | None]:
        """How many turns each `while` loop takes at most; None while not known."""
        return [scope.length for scope in self.whiles]

    def aval(self, value: int) -> Aval:
        """The type of a value."""
        return self._avals[value]

    def outermost(self) -> list[int]:
        """The values that are made in the whole program, and not in a scope in it."""
        steps = [step for step in self.steps if step.scope is None]
        made = [value for step in steps for value in step.results]
        held = (v for v, ((s, _), *_) in self.leaves.items() if s.outer is None)
        return [*made, *held]

    def source(
        self, value: int, passes: Callable[[Node], bool] = is_same_numbers
    ) -> int:
        """The first value before operations that hand on what they are given.

        Args:
            value: A value.
            passes: Which operations do; by default those that give the same numbers.
        """
        while (step := self.makers.get(value)) is not None and passes(step):
            value = step.operands_of(value)[0]
        return value

    def origins(self, value: int, index: Index) -> Iterator[Instance]:
        """What an instance is made of: operands, or what it is on the other side."""
        step = self.makers.get(value)
        if step is not None:
            yield from ((operand, index) for operand in step.operands_of(value))
        if value in self.enters:
            scope, position = self.enters[value]
            yield from scope.outside(position, index)
        for scope, position in self.leaves.get(value, ()):
            yield from scope.inside(position, index)
            if scope.primitive == "cond":
                yield scope.operands[0], index

    def scope_that_gives(self, value: int) -> Scope | None:
        """The program that gives a value that no operation in it made; None if none."""
        scopes = (scope for left in self.leaves.values() for scope, _ in left)
        return next((scope for scope in scopes if value in scope.outputs), None)

    def reaching(self, values: Iterable[int]) -> set[int]:
        """All values that some values depend on, in whatever turn."""
        return reachable(values, self._needs)

    def _needs(self, value: int) -> Iterator[int]:
        """What a value depends on directly, in whatever turn."""
        if value in self.makers:
            yield from self.makers[value].operands_of(value)
        if value in self.enters:
            scope, position = self.enters[value]
            operand = scope.sub.operands[position]
            if operand is not None:
                yield scope.operands[operand]
            if position in scope.carried:
                yield scope.outputs[scope.carried[position]]
        for scope, position in self.leaves.get(value, ()):
            yield scope.outputs[position]
            if scope.primitive == "cond":
                yield scope.operands[0]
            if scope.primitive == "while":  # its test may read all that it carries
                yield from (*scope.outputs, *scope.operands)

    def _new(self, aval: Aval) -> int:
        self._avals.append(aval)
        return len(self._avals) - 1

    def _constant(self, array: AnyArray) -> int:
        number = self._new(jax.typeof(array))
        self.constants[number] = array
        return number

    def _open(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[AnyArray],
        inputs: Sequence[int],
        scope: Scope | None,
        place: Location,
    ) -> list[int]:
        values = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Atom) -> int:
            is_literal = isinstance(atom, Literal)
            return self._constant(atom.val) if is_literal else values[atom]

        for equation in jaxpr.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            name = equation.primitive.name
            if not is_seen_into(equation):
                results = tuple(self._new(aval_of(v)) for v in equation.outvars)
                number = len(self.steps)
                self._add(Node(equation, place, scope, number, operands, results))
            elif name in ("scan", "while", "cond", "shard_map"):
                results = self._hold(equation, operands, scope, place)
            else:
                (sub,) = sub_jaxprs(equation)
                inner = place.enter(equation, sub)
                results = self._open(sub.jaxpr, sub.consts, operands, scope, inner)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _add(self, step: Node) -> None:
        self.steps.append(step)
        self.makers.update(dict.fromkeys(step.results, step))
        for value in dict.fromkeys(step.operands):
            self.users.setdefault(value, []).append(step)

    def _hold(
        self,
        equation: JaxprEqn,
        operands: Sequence[int],
        outer: Scope | None,
        place: Location,
    ) -> list[int]:
        """Opens the programs of an equation as scopes, and joins them to it."""
        results = [self._new(aval_of(v)) for v in equation.outvars]
        self.held.update(operands)
        is_while = equation.primitive.name == "while"
        subs = sub_jaxprs(equation)[: 1 if is_while else None]  # not the test
        for branch, sub in enumerate(subs):
            inputs = [self._new(aval_of(v)) for v in sub.jaxpr.invars]
            known = (len(self.steps), self._length(equation, sub), branch)
            ends = (operands, results, inputs, [])
            scope = Scope(outer, equation, place, sub, *known, *ends)
            self.whiles += [scope] if is_while else []
            inner = place.enter(equation, sub)
            scope.outputs[:] = self._open(sub.jaxpr, sub.consts, inputs, scope, inner)
            for position, value in enumerate(inputs):
                self.enters[value] = scope, position
            for position, result in enumerate(sub.results):
                if result is not None:
                    left = self.leaves.setdefault(results[result], [])
                    left.append((scope, position))
        return results

    def _length(self, equation: JaxprEqn, sub: SubJaxpr) -> int | None:
        name = equation.primitive.name
        if name == "while" and self._known is not None:
            return self._known[len(self.whiles)]
        return sub.trips if name == "scan" else None
