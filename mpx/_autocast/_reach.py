"""Where values go: into the loss, or into another product first.

The last products before a loss, the *final projection*, stay in half precision unless a
rule says otherwise: the loss sees their rounding as it is. They are found by looking
from the end: a product that goes into a scalar which the function returns, and into no
other product. In a function that returns no scalar, such as one layer, there is none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._jax_compat import scope_names
from .._program import (
    BackwardFlow,
    PrimitiveClass,
    SubJaxpr,
    backward,
    count,
    distinct_equations,
    properties,
    results_within,
)
from ._region import options_of
from ._settings import UNUSED, Reach


def reach_of_results(avals: Sequence[Any]) -> tuple[Reach, ...]:
    """Where the results of a whole function go: a floating scalar is a loss."""
    return tuple(
        Reach.LOSS
        if count(aval.shape) == 1 and jnp.issubdtype(aval.dtype, np.floating)
        else Reach.RESULT
        for aval in avals
    )


class _ReachFlow(BackwardFlow[Reach]):
    """Where values go, from where the results of their users go."""

    @property
    def nothing(self) -> Reach:
        """Nobody uses it."""
        return UNUSED

    def join(self, a: Reach, b: Reach) -> Reach:
        """Where two users take it."""
        return a | b

    def operands(self, equation: JaxprEqn, results: Sequence[Reach]) -> Sequence[Reach]:
        """A product, whatever program it holds, is an end of its own."""
        if properties(equation.primitive.name).kind is PrimitiveClass.HALF:
            return [Reach.PRODUCT] * len(equation.invars)
        return super().operands(equation, results)

    def transfer(self, equation: JaxprEqn, results: Sequence[Reach]) -> Sequence[Reach]:
        """Where any result of the operation goes."""
        everything = UNUSED
        for end in results:
            everything |= end
        return [everything] * len(equation.invars)


def reach_in(jaxpr: Jaxpr, results: Sequence[Reach]) -> Mapping[Any, Reach]:
    """Where the values of a program go, given where its results go."""
    return backward(jaxpr, results, _ReachFlow())


def reach_of_program(program: SubJaxpr, outputs: Sequence[Reach]) -> tuple[Reach, ...]:
    """Where the results of a program go, given those of its equation."""
    return tuple(results_within(program, outputs, _ReachFlow()))


def recipes_in(jaxpr: Jaxpr) -> set[Any]:
    """The recipes of the regions in a program."""
    found = [
        options_of(scope)
        for equation in distinct_equations(jaxpr)
        for scope in scope_names(equation)
    ]
    return {options["recipe"] for options in found if options.get("recipe")}
