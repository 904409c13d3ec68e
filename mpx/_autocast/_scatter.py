"""Scatters, which hold a program of their own in the declared dtype."""

import jax
from jax.extend.core import JaxprEqn

from .._jax_compat import bind_equation
from .._program import aval_of
from .._typing import AnyArray

SCATTERS = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def scatter(equation: JaxprEqn, arrays: list[AnyArray]) -> AnyArray:
    """The result of a scatter of arrays that are perhaps of another dtype now."""
    if arrays[0].dtype == aval_of(equation.invars[0]).dtype:
        return bind_equation(equation, *arrays)[0]
    params = equation.params
    operand, indices, updates = arrays
    return SCATTERS[equation.primitive.name](
        operand,
        indices,
        updates,
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
