"""Loops that end by a comparison of what half precision products gave.

A solver that stops where an error is below a tolerance stops never, or too early, where
the error is computed with products in half precision in each iteration: they are off by
2^-8 of themselves in bfloat16, and 2^-11 in float16, whatever the tolerance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from .._program import Flow, aval_of, distinct_equations, properties, walk_inside
from .._typing import Aval, Program
from ._precision import precision_of_product
from ._report import HALF


class _Fact(NamedTuple):
    """What is known of a value in a loop.

    Attributes:
        is_rounded: A number that depends on a product in half precision in the loop.
        tests: The comparisons of such numbers that it depends on, by identity.
    """

    is_rounded: bool = False
    tests: frozenset[int] = frozenset()


_NOTHING = _Fact()


def deciding_comparisons(jaxpr: Program) -> frozenset[int]:
    """The comparisons by which loops end, of numbers that products in them round.

    Args:
        jaxpr: A program.

    Returns:
        The identities of their equations.
    """
    found: frozenset[int] = frozenset()
    for equation in distinct_equations(jaxpr):
        if equation.primitive.name != "while":
            continue
        flow = _Rounding(equation)
        walk_inside(equation, [_NOTHING] * len(equation.invars), flow)
        found |= flow.deciding
    return found


class _Rounding(Flow[_Fact]):
    """Follows numbers from products in one loop to its condition."""

    def __init__(self, loop: object) -> None:
        self.deciding: frozenset[int] = frozenset()
        self._loop = loop

    def constant(self, value: object) -> _Fact:
        """A constant depends on nothing."""
        return _NOTHING

    def join(self, a: _Fact, b: _Fact) -> _Fact:
        """What one of them depends on."""
        return _Fact(a.is_rounded or b.is_rounded, a.tests | b.tests)

    def transfer(self, equation: JaxprEqn, facts: Sequence[_Fact]) -> Sequence[_Fact]:
        """Numbers stay rounded; truth values and integers carry the comparisons."""
        is_rounded = any(fact.is_rounded for fact in facts)
        is_rounded |= precision_of_product(equation) in HALF
        tests = frozenset[int]().union(*(fact.tests for fact in facts))
        if is_rounded and properties(equation.primitive.name).orders:
            tests |= {id(equation)}
        number, other = _Fact(is_rounded), _Fact(False, tests)
        return [number if _is_float(aval_of(v)) else other for v in equation.outvars]

    def leave(
        self,
        equation: JaxprEqn,
        role: str,
        operands: Sequence[_Fact],
        results: Sequence[_Fact],
    ) -> None:
        """What the condition of the loop depends on decides when it ends."""
        if equation is self._loop and role == "condition":
            self.deciding |= results[0].tests


def _is_float(aval: Aval) -> bool:
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)
