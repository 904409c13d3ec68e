"""The values of a program and of all programs in it, and the origins of each.

A value is a number. Programs that an equation only calls (under jit, in a checkpoint,
in a user's rule) are opened into the *scope* around them. A loop, a branch and
`shard_map` have scopes of their own, whose inputs and outputs are joined to the
operands and results of their equation. So origins are found at any depth.

A value in a loop differs by iteration. An *instance* is a value with an index: the
place in each loop around it, the outermost first. The place of a scan's iteration is
its row of the stacked arrays. Devices share instances, since they communicate.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ..._base.typing import AnyArray, Atom, Aval
from ..._program import (
    Location,
    PrimitiveClass,
    SubJaxpr,
    aval_of,
    forms_of,
    is_seen_into,
    properties,
    reachable,
    sub_jaxprs,
)

Index = tuple[int, ...]
Instance = tuple[int, Index]


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A program in the whole one whose operations run together.

    Attributes:
        outer: The scope around its equation; None in the whole program.
        equation: The equation that contains it.
        place: The location of the equation.
        sub: The program.
        number: Its position in the program, in the numbering of operations.
        length: The number of iterations; None if unknown, or if it is not a loop.
        branch: The position of the branch, from 0.
        operands: The equation's operands.
        results: The equation's results.
        inputs: The inputs of the scope.
        outputs: The outputs of the scope.
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
        """The primitive of its equation: `scan`, `while`, `cond`, `shard_map`."""
        return self.equation.primitive.name

    @property
    def around(self) -> "list[Scope]":
        """This scope and all around it, the outermost first."""
        return [*(self.outer.around if self.outer is not None else []), self]

    @property
    def places(self) -> Sequence[int]:
        """The places of a loop's iterations, in execution order."""
        places = range(self.length or 0)
        is_reversed = self.primitive == "scan" and self.equation.params["reverse"]
        return places[::-1] if is_reversed else places

    @property
    def carried(self) -> dict[int, int]:
        """Maps each carried input to the output of the iteration before."""
        return {i: o for o, i in self.sub.carried}

    def outside(self, position: int, index: Index) -> Iterator[Instance]:
        """Yields the instance that an input gets; nothing if it is unknown."""
        turn = self.places.index(index[-1]) if self.length is not None else 0
        operand = self.sub.operands[position]
        if turn and position in self.carried:
            before = self.places[turn - 1]
            yield self.outputs[self.carried[position]], (*index[:-1], before)
        elif operand is not None:  # else it is unknown
            outer = index if self.length is None else index[:-1]
            yield self.operands[operand], outer

    def inside(self, position: int, index: Index) -> Iterator[Instance]:
        """Yields the instances of an output that may be the equation's result."""
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
        place: Its location.
        scope: The scope around it; None in the whole program.
        number: Its position in the program.
        operands: Its operands.
        results: Its results.
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
        """The scopes around it, the outermost first."""
        return [] if self.scope is None else self.scope.around

    def operands_of(self, result: int) -> tuple[int, ...]:
        """Returns the operands that a result depends on."""
        if self.primitive == "optimization_barrier":
            return (self.operands[self.results.index(result)],)
        return self.operands

    def order(self, index: Index) -> tuple[int, ...]:
        """Returns a sort key: execution order, loop iterations included."""
        rest, key = iter(index), []
        for scope in self.around:
            turn = [] if scope.length is None else [scope.places.index(next(rest))]
            key += [scope.number, *turn]
        return (*key, self.number)


def is_same_numbers(step: Node) -> bool:
    """Returns whether each result has exactly the values of one operand."""
    known = properties(step.primitive)
    is_one = len(step.operands) == 1 and len(step.results) == 1
    is_barrier = step.primitive == "optimization_barrier"
    return is_barrier or (known.moves and not known.reads_part and is_one)


def is_copied(step: Node) -> bool:
    """Returns whether it is a copy or a cast: a recomputation begins with a cast."""
    is_cast = properties(step.primitive).kind is PrimitiveClass.CONVERT
    return is_cast or is_same_numbers(step)


class Graph:
    """A program with all programs in it.

    It is opened in the order of a probe (`mpx._program.probed`), so that the probe
    finds operations and constants by counting.

    Attributes:
        steps: Its operations.
        constants: The constants of the programs.
        inputs: The inputs of the whole program.
        outputs: The outputs of the whole program.
        whiles: The scopes of `while` loops.
        makers: The operation that makes each value.
        users: The operations that use each value.
        forms: The programs of `on_target` equations, by their ids.
        held: The operands of equations with scopes.
        enters: For each input of a scope, the scope and the input's position.
        leaves: For each result of an equation with scopes, the scopes and the
            positions of their outputs.
        forward: The values that the loss, the first output, depends on. The function
            computes these without a derivative, too; others are for the gradient only.
    """

    def __init__(
        self, closed: ClosedJaxpr, turns: Sequence[int | None] | None = None
    ) -> None:
        """Opens a program, with the iterations of `while` loops as far as known."""
        self.steps: list[Node] = []
        self.constants: dict[int, AnyArray] = {}
        self.whiles: list[Scope] = []
        self.makers: dict[int, Node] = {}
        self.users: dict[int, list[Node]] = {}
        self.forms: dict[int, ClosedJaxpr] = {}
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
        """The most iterations of each `while` loop; None while not known."""
        return [scope.length for scope in self.whiles]

    def aval(self, value: int) -> Aval:
        """Returns the type of a value."""
        return self._avals[value]

    def outermost(self) -> list[int]:
        """Returns the values that are made outside of all scopes."""
        steps = [step for step in self.steps if step.scope is None]
        made = [value for step in steps for value in step.results]
        held = (v for v, ((s, _), *_) in self.leaves.items() if s.outer is None)
        return [*made, *held]

    def source(
        self, value: int, passes: Callable[[Node], bool] = is_same_numbers
    ) -> int:
        """Returns the first value before operations that pass values on.

        Args:
            value: A value.
            passes: Selects these operations; by default those that change no value.
        """
        while (step := self.makers.get(value)) is not None and passes(step):
            value = step.operands_of(value)[0]
        return value

    def origins(self, value: int, index: Index) -> Iterator[Instance]:
        """Yields the origins of an instance: operands, or its other side of a scope."""
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
        """Returns the first scope that has `value` as an output; None if none has."""
        scopes = (scope for left in self.leaves.values() for scope, _ in left)
        return next((scope for scope in scopes if value in scope.outputs), None)

    def reaching(self, values: Iterable[int]) -> set[int]:
        """Returns all values that some values depend on, in any iteration."""
        return reachable(values, self._needs)

    def _needs(self, value: int) -> Iterator[int]:
        """Yields the values that a value directly depends on, in any iteration."""
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
            if scope.primitive == "while":  # its condition may read every carry
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
            elif name == "on_target":
                forms = self.forms.setdefault(id(equation), forms_of(equation))
                inner = place.enter(equation, sub_jaxprs(equation)[0])
                given = forms.jaxpr, forms.consts, operands
                results = self._open(*given, scope, inner)
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
        """Opens the programs of an equation as scopes; returns its results."""
        results = [self._new(aval_of(v)) for v in equation.outvars]
        self.held.update(operands)
        is_while = equation.primitive.name == "while"
        subs = sub_jaxprs(equation)[: 1 if is_while else None]  # not the condition
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
