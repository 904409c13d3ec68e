"""Where values go: into the results of the function, or into another product first."""

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
# What is differentiated without looking inside, and what JAX refuses to differentiate.
_WITH_A_RULE = ("custom_jvp_call", "custom_vjp_call", "custom_linear_solve")
_WITHOUT_A_RULE = ("pure_callback", "io_callback", "ffi_call")
_FORWARD_ONLY = ("while", "nondifferentiable_backward")  # the second is Equinox's


def reach_of_results(avals: Sequence[Aval]) -> tuple[Reach, ...]:
    """Where the results of a whole function go: a floating scalar is a loss."""
    are_losses = [
        count(a.shape) == 1 and jnp.issubdtype(a.dtype, np.floating) for a in avals
    ]
    other = Reach.RESULT if any(are_losses) else Reach.RESULT | Reach.GRADIENT
    return tuple(Reach.LOSS | Reach.GRADIENT if x else other for x in are_losses)


class _ReachFlow(BackwardFlow[Reach]):
    """Where values go, from where the results of their users go."""

    nothing = UNUSED

    def __init__(self) -> None:
        # A loop is asked until it says the same twice, and each loop within it again:
        # without what was found before, 2^n times for n loops in each other.
        self._found: dict[tuple[Jaxpr, tuple[Reach, ...]], Sequence[Reach]] = {}

    def inside(self, sub: SubJaxpr, results: Sequence[Reach]) -> Sequence[Reach]:
        """The facts of the inputs of a program within, each found once."""
        key = sub.jaxpr, tuple(results)
        if key not in self._found:
            self._found[key] = super().inside(sub, results)
        return self._found[key]

    def operands(self, equation: JaxprEqn, results: Sequence[Reach]) -> Sequence[Reach]:
        """A product, whatever program it holds, is an end of its own."""
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
        """Where any result of the operation goes."""
        whole = _joined(equation, results)
        if equation.primitive.name == "stop_gradient":
            whole &= ~DERIVATIVE
        if equation.primitive.name in _WITHOUT_A_RULE:
            whole |= Reach.DEAD_END
        return [whole] * len(equation.invars)


def _joined(equation: JaxprEqn, results: Sequence[Reach]) -> Reach:
    """Where any result of an operation goes; of integers none has a derivative."""
    whole = UNUSED
    for end, variable in zip(results, equation.outvars, strict=True):
        dtype = getattr(aval_of(variable), "dtype", np.bool_)
        has_derivative = jnp.issubdtype(dtype, np.inexact)
        whole |= end if has_derivative else end & ~DERIVATIVE
    return whole


def reach_in(jaxpr: Jaxpr, results: Sequence[Reach]) -> Mapping[Var, Reach]:
    """Where the values of a program go, given where its results go."""
    return backward(jaxpr, results, _ReachFlow())


def reach_of_program(program: SubJaxpr, outputs: Sequence[Reach]) -> tuple[Reach, ...]:
    """Where the results of a program go, given those of its equation."""
    return tuple(results_within(program, outputs, _ReachFlow()))


# ----------------------------------------------------------------------------
# What a value is computed from.


class Origin(enum.Flag):
    """What a value is computed from: of several operands all of it; constants add none.

    A value of weights and constants alone is a weight itself. Where a matmul, a lookup,
    a loop or noise is among what it is made of, it is one for data only, and data for a
    weight: `w + a @ b` is a weight of `x`, `queries @ w` is data of the next layer.
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
    """The origin of what is computed from several."""
    found = functools.reduce(operator.or_, origins, CONSTANT)
    if Origin.DATA in found:
        return Origin.DATA
    return found & ~Origin.PATTERN if Origin.WEIGHT in found else found
