"""Dataflow analyses: where a value goes (`Reach`) and comes from (`Origin`).

Both decide what recipes quantize: `Reach` finds the output layer and products that are
never differentiated, `Origin` distinguishes weights from data.
"""

import enum
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from .._base.typing import Aval
from .._program import (
    BackwardFlow,
    PrimitiveClass,
    SubJaxpr,
    aval_of,
    backward,
    count,
    properties,
    results_within,
)


class Reach(enum.Flag):
    """Where a value goes."""

    LOSS = enum.auto()
    """Into a scalar that the function returns."""
    PRODUCT = enum.auto()
    """Into another product."""
    RESULT = enum.auto()
    """Into another result of the function."""
    GRADIENT = enum.auto()
    """Into what the function may be differentiated by."""
    DEAD_END = enum.auto()
    """Into what JAX cannot differentiate: a `while` with such results, a callback."""


UNUSED = Reach(0)

DERIVATIVE = Reach.GRADIENT | Reach.DEAD_END
# Primitives with custom derivatives, and primitives that JAX refuses to differentiate.
_WITH_A_RULE = ("custom_jvp_call", "custom_vjp_call", "custom_linear_solve")
_WITHOUT_A_RULE = ("pure_callback", "io_callback", "ffi_call")
_FORWARD_ONLY = ("while", "nondifferentiable_backward")  # the second is Equinox's


def reach_of_results(avals: Sequence[Aval]) -> tuple[Reach, ...]:
    """Returns where the results of a function go: a floating-point scalar is a loss."""
    are_losses = [
        count(a.shape) == 1 and jnp.issubdtype(a.dtype, np.floating) for a in avals
    ]
    other = Reach.RESULT if any(are_losses) else Reach.RESULT | Reach.GRADIENT
    return tuple(Reach.LOSS | Reach.GRADIENT if x else other for x in are_losses)


class _ReachFlow(BackwardFlow[Reach]):
    """Finds where values go, from where the results of their users go."""

    nothing = UNUSED

    def __init__(self) -> None:
        # A loop is analysed until nothing changes, and each loop within it again:
        # without this cache, 2^n times for n nested loops.
        self._found: dict[tuple[Jaxpr, tuple[Reach, ...]], Sequence[Reach]] = {}

    def inside(self, sub: SubJaxpr, results: Sequence[Reach]) -> Sequence[Reach]:
        """Returns where the inputs of an inner program go; found once per program."""
        key = sub.jaxpr, tuple(results)
        if key not in self._found:
            self._found[key] = super().inside(sub, results)
        return self._found[key]

    def operands(self, equation: JaxprEqn, results: Sequence[Reach]) -> Sequence[Reach]:
        """Returns where operands go; a product counts even if it contains a program."""
        name = equation.primitive.name
        whole = _joined(equation, results)
        if properties(name).kind is PrimitiveClass.HALF:
            return [Reach.PRODUCT | whole & DERIVATIVE] * len(equation.invars)
        found = super().operands(equation, results)
        if name in _FORWARD_ONLY:
            return [
                end | Reach.DEAD_END if Reach.GRADIENT in end else end for end in found
            ]
        if name in _WITH_A_RULE:
            return [end & ~Reach.DEAD_END | whole & Reach.DEAD_END for end in found]
        return found

    def transfer(self, equation: JaxprEqn, results: Sequence[Reach]) -> Sequence[Reach]:
        """Returns the union of where the operation's results go."""
        whole = _joined(equation, results)
        if equation.primitive.name == "stop_gradient":
            whole &= ~DERIVATIVE
        if equation.primitive.name in _WITHOUT_A_RULE:
            whole |= Reach.DEAD_END
        return [whole] * len(equation.invars)


def _joined(equation: JaxprEqn, results: Sequence[Reach]) -> Reach:
    """Returns the union of where results go; integer results have no derivative."""
    whole = UNUSED
    for end, variable in zip(results, equation.outvars, strict=True):
        dtype = getattr(aval_of(variable), "dtype", np.bool_)
        has_derivative = jnp.issubdtype(dtype, np.inexact)
        whole |= end if has_derivative else end & ~DERIVATIVE
    return whole


def reach_in(jaxpr: Jaxpr, results: Sequence[Reach]) -> Mapping[Var, Reach]:
    """Finds where the values of a program go, given where its results go."""
    return backward(jaxpr, results, _ReachFlow())


def reach_of_program(program: SubJaxpr, outputs: Sequence[Reach]) -> tuple[Reach, ...]:
    """Returns where a program's results go, given where those of its equation go."""
    return tuple(results_within(program, outputs, _ReachFlow()))


# --- Origin ---------------------------------------------------------------------------


class Origin(enum.Flag):
    """The source of a value: the union of its operands; constants add nothing.

    A value computed from weights and constants only is a weight itself. If a matmul, a
    lookup, a loop or noise was involved, it counts as a weight next to data, and as
    data next to a weight: `w + a @ b` is a weight of `x`, `queries @ w` is data of the
    next layer.
    """

    WEIGHT = enum.auto()
    MADE = enum.auto()
    """Made of weights by a matmul, a lookup or a loop."""
    PATTERN = enum.auto()
    """Of counts, integers, truth values or joined constants: data by itself."""
    NOISE = enum.auto()
    """Random bits, of whatever key: data by itself."""
    DATA = enum.auto()


CONSTANT = Origin(0)


def together_from(origins: Iterable[Origin]) -> Origin:
    """Returns the origin of a value that is computed from several."""
    found = functools.reduce(operator.or_, origins, CONSTANT)
    if Origin.DATA in found:
        return Origin.DATA
    return found & ~Origin.PATTERN if Origin.WEIGHT in found else found
