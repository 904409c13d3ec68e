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
from ._region import told_by
from ._settings import NOWHERE, Ends


def ends_of_results(avals: Sequence[Any]) -> tuple[Ends, ...]:
    """Where the results of a whole function go: a floating scalar is a loss."""
    return tuple(
        Ends.LOSS
        if count(aval.shape) == 1 and jnp.issubdtype(aval.dtype, np.floating)
        else Ends.RESULT
        for aval in avals
    )


class _Ends(BackwardFlow[Ends]):
    """Where values go, from where the results of their users go."""

    @property
    def nothing(self) -> Ends:
        """Nobody uses it."""
        return NOWHERE

    def join(self, a: Ends, b: Ends) -> Ends:
        """Where two users take it."""
        return a | b

    def operands(self, equation: JaxprEqn, results: Sequence[Ends]) -> Sequence[Ends]:
        """A product, whatever program it holds, is an end of its own."""
        if properties(equation.primitive.name).kind is PrimitiveClass.HALF:
            return [Ends.PRODUCT] * len(equation.invars)
        return super().operands(equation, results)

    def transfer(self, equation: JaxprEqn, results: Sequence[Ends]) -> Sequence[Ends]:
        """Where any result of the operation goes."""
        everything = NOWHERE
        for end in results:
            everything |= end
        return [everything] * len(equation.invars)


def ends_in(jaxpr: Jaxpr, results: Sequence[Ends]) -> Mapping[Any, Ends]:
    """Where the values of a program go, given where its results go."""
    return backward(jaxpr, results, _Ends())


def ends_of_program(program: SubJaxpr, outputs: Sequence[Ends]) -> tuple[Ends, ...]:
    """Where the results of a program go, given those of its equation."""
    return tuple(results_within(program, outputs, _Ends()))


def recipes_in(jaxpr: Jaxpr) -> set[Any]:
    """The recipes of the regions in a program."""
    told = [
        told_by(scope)
        for equation in distinct_equations(jaxpr)
        for scope in scope_names(equation)
    ]
    return {options["recipe"] for options in told if options.get("recipe")}
