"""One level of a program: all that runs once, in one list.

Programs that an equation only calls (under jit, in a checkpoint, in a rule of the
user's) are opened into the level that they stand in. Loops, branches and `shard_map`
stay single operations: what is in them is a level of its own.

Values are numbers. Each operand of an operation is the number of a value, so where a
value comes from and goes to is read off, not searched for.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from .._jax_compat import bind_equation, equation_context, open_jaxpr
from .._program import (
    Location,
    SubJaxpr,
    aval_of,
    program_of,
    properties,
    sub_jaxprs,
)
from .._typing import AnyArray, Atom, Aval

# Programs that are not opened although they run once: each device has its own part.
_CLOSED = ("shard_map",)


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation of a level.

    Attributes:
        equation: Its equation.
        place: What is around it.
        operands: The numbers of its operands.
        results: The numbers of its results.
        is_barrier: It stands for the beginning of a checkpoint, behind which nothing is
            merged with what was computed before.
    """

    equation: JaxprEqn
    place: Location
    operands: tuple[int, ...]
    results: tuple[int, ...]
    is_barrier: bool = False

    @property
    def primitive(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name


def is_apart(step: Step) -> bool:
    """Whether each result is an operand that the compiler cannot see through."""
    return step.is_barrier or step.primitive == "optimization_barrier"


def operands_of(step: Step, result: int) -> tuple[int, ...]:
    """The operands that a result depends on."""
    if is_apart(step):
        return (step.operands[step.results.index(result)],)
    return step.operands


def is_same_numbers(step: Step) -> bool:
    """Whether each result holds the numbers of one operand, and nothing else."""
    known = properties(step.primitive)
    is_one = len(step.operands) == 1 and len(step.results) == 1
    return is_apart(step) or (known.moves and not known.reads_part and is_one)


class Level:
    """A program whose calls are opened.

    Attributes:
        steps: Its operations, in their order.
        inputs: The numbers of its inputs.
        outputs: The numbers of its outputs.
        constants: What the program holds itself, by number.
        makers: For each value that an operation makes, its place in `steps`.
        users: For each value the places of the operations that use it.
        forward: The values that the loss depends on. The function computes these
            without a derivative, too; all others are computed for the gradient alone.
    """

    def __init__(
        self,
        program: Jaxpr | ClosedJaxpr,
        consts: Sequence[AnyArray],
        place: Location,
        of_loss: Iterable[int],
        carried: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Opens a program.

        Args:
            program: The program.
            consts: The arrays that it holds.
            place: What is around it.
            of_loss: The outputs that the loss depends on.
            carried: Which output comes back as which input, in a loop.
        """
        self.steps: list[Step] = []
        self.constants: dict[int, AnyArray] = {}
        self._avals: list[Aval] = []
        jaxpr = open_jaxpr(program)
        self.inputs = [self._new(aval_of(v)) for v in jaxpr.invars]
        self.outputs = self._open(jaxpr, consts, self.inputs, place)
        self.steps = _extended(self.steps, set(self.outputs))
        self.makers = {
            value: number
            for number, step in enumerate(self.steps)
            for value in step.results
        }
        self.users: dict[int, list[int]] = {}
        for number, step in enumerate(self.steps):
            for value in dict.fromkeys(step.operands):
                self.users.setdefault(value, []).append(number)
        self.forward = self._reaching(of_loss, carried)

    def aval(self, value: int) -> Aval:
        """The type of a value."""
        return self._avals[value]

    def maker(self, value: int) -> Step | None:
        """The operation that made a value; None for inputs and constants."""
        number = self.makers.get(value)
        return None if number is None else self.steps[number]

    def source(
        self, value: int, passes: Callable[[Step], bool] = is_same_numbers
    ) -> int:
        """The first value before operations that hand on what they are given.

        Args:
            value: A value.
            passes: Which operations do; by default those that give the same numbers.
        """
        while (step := self.maker(value)) is not None and passes(step):
            value = operands_of(step, value)[0]
        return value

    def entered(self, step: Step, sub: SubJaxpr) -> "Level":
        """The level of a program that an operation of this one holds."""
        needed = [i is None or step.results[i] in self.forward for i in sub.results]
        if step.primitive == "while":  # its test may read all that it carries
            needed = [any(needed)] * len(needed)
        of_loss = [i for i, is_needed in enumerate(needed) if is_needed]
        place = step.place.enter(step.equation, sub)
        return Level(sub.jaxpr, sub.consts, place, of_loss, sub.carried)

    def _reaching(
        self, outputs: Iterable[int], carried: Sequence[tuple[int, int]]
    ) -> set[int]:
        """The values that these outputs depend on."""
        new = live = {self.outputs[i] for i in outputs}
        while new:
            _extended(self.steps, live)
            backs = (self.outputs[o] for o, i in carried if self.inputs[i] in live)
            new = set(backs) - live
            live |= new
        return live

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
        place: Location,
    ) -> list[int]:
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, array in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = self._constant(array)

        def read(atom: Atom) -> int:
            is_literal = isinstance(atom, Literal)
            return self._constant(atom.val) if is_literal else values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            if is_opened(equation):
                (sub,) = sub_jaxprs(equation)
                inner = place.enter(equation, sub)
                if np.any(equation.params.get("prevent_cse", False)):
                    operands = self._barrier(equation, inner, operands)
                inside = program_of(equation)
                held = getattr(inside, "consts", ())
                results = self._open(sub.jaxpr, held, operands, inner)
            else:
                results = [self._new(aval_of(v)) for v in equation.outvars]
                step = Step(equation, place, tuple(operands), tuple(results))
                self.steps.append(step)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _barrier(
        self, equation: JaxprEqn, place: Location, operands: list[int]
    ) -> list[int]:
        results = [self._new(self._avals[value]) for value in operands]
        step = Step(equation, place, tuple(operands), tuple(results), is_barrier=True)
        self.steps.append(step)
        return results


def is_opened(equation: JaxprEqn) -> bool:
    """Whether the one program of an equation is a part of the level around it."""
    name = equation.primitive.name
    known = properties(name)
    return bool(known.program) and known.runs_once and name not in _CLOSED


def _extended(steps: Sequence[Step], live: set[int]) -> list[Step]:
    """Adds to values all that they depend on; the operations that make them."""
    found = []
    for step in reversed(steps):
        if not live.isdisjoint(step.results):
            found.append(step)
            for result in live.intersection(step.results):
                live.update(operands_of(step, result))
    return found[::-1]


def run_level(
    level: Level,
    inputs: Sequence[AnyArray],
    change: Callable[[int, AnyArray], AnyArray],
) -> None:
    """Runs a level.

    Args:
        level: The level.
        inputs: Its inputs.
        change: `change(number, array)` sees each value, of inputs and constants, then
            of operations in their order, and gives what stands in its place.
    """
    values: dict[int, AnyArray] = {}
    given = zip(level.inputs, inputs, strict=True)
    for number, array in (*given, *level.constants.items()):
        values[number] = change(number, array)
    for step in level.steps:
        for number, array in _results(step, values):
            values[number] = change(number, array)


def _results(step: Step, values: dict[int, AnyArray]) -> list[tuple[int, AnyArray]]:
    """The results of an operation with their numbers."""
    if is_apart(step):
        # What nobody uses of it is not there.
        pairs = zip(step.results, step.operands, strict=True)
        there = [(result, values[one]) for result, one in pairs if one in values]
        held = jax.lax.optimization_barrier([array for _, array in there])
        return [(result, x) for (result, _), x in zip(there, held, strict=True)]
    operands = [values[value] for value in step.operands]
    with equation_context(step.equation):
        results = bind_equation(step.equation, *operands)
    return list(zip(step.results, results, strict=True))
