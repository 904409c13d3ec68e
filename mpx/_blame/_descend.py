"""From an operation that holds programs to the operation within that is the cause.

A program inside is run with the very operands that it had: of a loop in the turn in
which it went bad, of a conditional in the branch that was taken.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import PyTree

from .._jax_compat import open_jaxpr, scan_counts
from .._program import SubJaxpr, sub_jaxprs, where_leading
from .._typing import AnyArray, BoolLike, Program
from ._badness import badness_of, cured, is_number
from ._graph import is_composite
from ._level import Level, Step
from ._machine import EachDevice, Machine, varying
from ._search import Cause, Concern, Search

# The turn of what never goes bad: later than all, so that a minimum finds the first.
_NEVER = np.iinfo(np.int32).max
# How many turns of a loop are looked into where what is bad in one turns out harmless.
_TURNS = 4


@dataclasses.dataclass(frozen=True)
class Within:
    """An operation that is gone into, on the way to the cause.

    Attributes:
        level: The level that it stands in.
        step: The operation.
        sub: Which of its programs.
        text: What is gone into: `turn 3 of 12`, `branch 2 of 2`.
    """

    level: Level
    step: Step
    sub: SubJaxpr
    text: str


@dataclasses.dataclass(frozen=True)
class Found:
    """A cause, and the way to it, the outermost operation first."""

    cause: Cause
    way: tuple[Within, ...]


def descended(
    machine: Machine,
    level: Level,
    inputs: Sequence[AnyArray],
    concern: Concern,
    above: float | None,
) -> list[Found]:
    """The causes of what is bad in the outputs of a level, as deep as one can look."""
    causes = Search(machine, level, inputs, above).causes(concern)
    found: list[Found] = []
    for cause in causes:
        found += _inside(machine, cause, above) or [Found(cause, ())]
    return found


def _inside(machine: Machine, cause: Cause, above: float | None) -> list[Found]:
    step = cause.step
    if step is None or not is_composite(step) or not cause.results:
        return []
    name = step.primitive
    if name in ("scan", "while"):
        return _in_loop(machine, cause, above)
    if name == "cond":
        return _in_branch(machine, cause, above)
    return _on_devices(machine, cause, above)


def _on_devices(machine: Machine, cause: Cause, above: float | None) -> list[Found]:
    """Goes into the program of each device."""
    assert cause.step is not None
    if isinstance(machine, EachDevice):
        return []  # one within another: as one operation
    equation = cause.step.equation
    devices = EachDevice(equation, machine.options)
    inputs = devices.entered(cause.operands)
    (sub,) = sub_jaxprs(equation)
    return _further(devices, cause, sub, "", inputs, cause.results, above)


def _further(
    machine: Machine,
    cause: Cause,
    sub: SubJaxpr,
    text: str,
    inputs: Sequence[AnyArray],
    concern: Concern,
    above: float | None,
) -> list[Found]:
    assert cause.step is not None
    inner = cause.level.entered(cause.step, sub)
    within = Within(cause.level, cause.step, sub, text)
    found = descended(machine, inner, inputs, concern, above)
    return [Found(one.cause, (within, *one.way)) for one in found]


def _in_branch(machine: Machine, cause: Cause, above: float | None) -> list[Found]:
    assert cause.step is not None
    subs = sub_jaxprs(cause.step.equation)
    device = cause.devices[0] if cause.devices else 0

    def program(_: object, index: AnyArray) -> tuple[AnyArray, list[AnyArray]]:
        return jnp.asarray(index, jnp.int32), []

    types = [cause.level.aval(cause.step.operands[0])]
    run = machine.compiled(program, types)
    chosen, _ = run(np.zeros(0, bool), cause.operands[:1])
    number = int(np.clip(chosen[device], 0, len(subs) - 1))
    text = f"branch {number + 1} of {len(subs)}"
    inputs = cause.operands[1:]
    return _further(machine, cause, subs[number], text, inputs, cause.results, above)


class _Loop:
    """A scan or a while as one form: a state that goes from turn to turn.

    A turn's program is given constants, the state, and what the turn takes from arrays
    that are cut; its outputs are the next state, and what the turn adds to arrays.
    """

    def __init__(self, level: Level, step: Step, operands: Sequence[AnyArray]) -> None:
        self.params = params = step.equation.params
        self.is_scan = step.primitive == "scan"
        self.sub = sub_jaxprs(step.equation)[0]
        if self.is_scan:
            n_consts, self.n_carry = scan_counts(params)
            self.n_test = 0
            self.length: int | None = params["length"]
            self.consts = operands[:n_consts]
        else:
            self.n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
            n_consts = self.n_test + n_body
            self.length = None
            self.consts = operands[self.n_test : n_consts]
            self.n_carry = len(operands) - n_consts
        self.test = operands[: self.n_test]
        self.start = operands[n_consts : n_consts + self.n_carry]
        self.cut = operands[n_consts + self.n_carry :]
        kinds = [level.aval(value) for value in step.operands]
        end = n_consts + self.n_carry
        self.types = [*kinds[n_consts:end], *kinds[:n_consts], *kinds[end:]]

    @property
    def arrays(self) -> list[AnyArray]:
        """What a run is given beside the state."""
        return [*self.test, *self.consts, *self.cut]

    def parts(self, arrays: Sequence[AnyArray]) -> tuple[Sequence[AnyArray], ...]:
        """The three parts of `arrays`."""
        a, b = len(self.test), len(self.test) + len(self.consts)
        return arrays[:a], arrays[a:b], arrays[b:]

    def goes_on(
        self, turn: Any, state: Sequence[AnyArray], test: Sequence[AnyArray]
    ) -> BoolLike:
        """Whether there is another turn."""
        if self.is_scan:
            return turn < self.length
        (going,) = _run(self.params["cond_jaxpr"], [*test, *state])
        return jnp.any(going) if going.ndim else going

    def slices(self, turn: AnyArray, cut: Sequence[AnyArray]) -> list[AnyArray]:
        """What a turn takes from arrays."""
        at = self.place(turn)
        return [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in cut]

    def place(self, turn: Any) -> Any:
        """Which place in arrays a turn stands for: a backward pass goes back."""
        if self.length is None or not self.params["reverse"]:
            return turn
        return self.length - 1 - turn

    def turn(
        self,
        state: Sequence[AnyArray],
        arrays: Sequence[Sequence[AnyArray]],
        at: AnyArray,
    ) -> list[AnyArray]:
        """The outputs of a turn."""
        test, consts, cut = arrays
        name = "jaxpr" if self.is_scan else "body_jaxpr"
        inputs = [*consts, *state, *self.slices(at, cut)]
        outputs = _run(self.params[name], inputs)
        if self.is_scan:
            return outputs
        (going,) = _run(self.params["cond_jaxpr"], [*test, *state])
        if not going.ndim:
            return outputs
        pairs = zip(outputs, state, strict=True)
        return [where_leading(going, new, old) for new, old in pairs]


def _run(program: Program, inputs: Sequence[AnyArray]) -> list[AnyArray]:
    closed = ClosedJaxpr(open_jaxpr(program), list(getattr(program, "consts", ())))
    return jaxpr_as_fun(closed)(*inputs)


def _in_loop(machine: Machine, cause: Cause, above: float | None) -> list[Found]:
    """Goes into the first turn in which something went bad that reaches the end."""
    assert cause.step is not None
    loop = _Loop(cause.level, cause.step, cause.operands)
    run = _Turns(machine, loop, above)
    # What is bad in the state may come to the end in another part of it.
    n_state, n_outputs = loop.n_carry, len(loop.sub.results)
    followed = [i for i in range(n_outputs) if i < n_state or i in cause.results]
    at, first_found = _At(0, loop.start, False), []
    for _ in range(_TURNS):
        first = run.first_bad(at, followed)
        turn = min(first.values(), default=_NEVER)
        if turn == _NEVER:
            break
        here = run.moved(at, turn)
        inputs = [*loop.consts, *here.state, *run.slices(here)]
        place = int(loop.place(turn))
        text = f"turn {place}" + (f" of {loop.length}" if loop.is_scan else "")
        concern = frozenset(i for i, one in first.items() if one == turn)
        found = _further(machine, cause, loop.sub, text, inputs, concern, above)
        first_found = first_found or found
        after = run.moved(here, turn + 1)
        healthy = dataclasses.replace(after, is_cured=True)
        is_array = any(i >= n_state for i in concern)
        if found and (is_array or run.is_decided(after, healthy, followed)):
            return found
        at = healthy
    return first_found


@dataclasses.dataclass(frozen=True)
class _At:
    """A state of a loop before a turn, with what is bad in it cured perhaps."""

    turn: int
    state: Sequence[AnyArray]
    is_cured: bool


class _Turns:
    """Runs some turns of a loop."""

    def __init__(self, machine: Machine, loop: _Loop, above: float | None) -> None:
        self.loop = loop
        n_state = loop.n_carry

        def program(control: Sequence[AnyArray], *given: AnyArray) -> PyTree:
            start, stop, is_cured = control
            test, _, cut = arrays = loop.parts(given[n_state:])
            state = [_cured(x, is_cured) for x in given[:n_state]]

            def goes_on(carried: PyTree) -> BoolLike:
                turn, state, _ = carried
                return (turn < stop) & loop.goes_on(turn, state, test)

            def body(carried: PyTree) -> PyTree:
                turn, state, first = carried
                outputs = loop.turn(state, arrays, turn)
                bits = varying(jnp.stack([badness_of(x, above) for x in outputs]))
                is_first = (bits != 0) & (first == _NEVER)
                first = jax.lax.select(is_first, jnp.full_like(first, turn), first)
                return turn + np.int32(1), list(outputs[:n_state]), first

            never = varying(jnp.full((len(loop.sub.results),), _NEVER, jnp.int32))
            begin = (jnp.asarray(start, jnp.int32), state, never)
            _, state, first = jax.lax.while_loop(goes_on, body, begin)
            left = [badness_of(x, above) for x in state] or [jnp.zeros((), jnp.int32)]
            kept = [*state, *loop.slices(start, cut)]
            return (first, jnp.stack(left)), kept

        self._run = machine.compiled(program, loop.types)

    def _from(self, at: _At, stop: int) -> tuple[PyTree, list[AnyArray]]:
        control = (np.int32(at.turn), np.int32(stop), np.bool_(at.is_cured))
        return self._run(control, [*at.state, *self.loop.arrays])

    def first_bad(self, at: _At, followed: Sequence[int]) -> dict[int, int]:
        """For each output that goes bad the turn in which it does so first."""
        (first, _), _ = self._from(at, _NEVER)
        turns = {i: int(first[:, i].min()) for i in followed}
        return {i: turn for i, turn in turns.items() if turn != _NEVER}

    def moved(self, at: _At, turn: int) -> _At:
        """The state before a later turn."""
        _, kept = self._from(at, turn)
        return _At(turn, kept[: self.loop.n_carry], False)

    def slices(self, at: _At) -> list[AnyArray]:
        """What the next turn takes from arrays."""
        _, kept = self._from(at, at.turn)
        return kept[self.loop.n_carry :]

    def is_decided(self, bad: _At, healthy: _At, followed: Sequence[int]) -> bool:
        """Whether what is bad in a state is the cause, or lasts till the next one.

        As far as a run shows that goes on from the same state without it.
        """
        again = min(self.first_bad(healthy, followed).values(), default=_NEVER)
        if again == _NEVER:
            return True
        (_, left), _ = self._from(bad, again)
        return bool(left.any())


def _cured(x: AnyArray, switch: AnyArray) -> AnyArray:
    return cured(x, switch, 1.0) if is_number(jax.typeof(x)) else x
