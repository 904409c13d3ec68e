"""Casts that the program itself makes."""

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._jax_compat import bind_equation
from .._program import avals
from ._context import FULL, Value, computed, declared, is_castable


def converted(equation: JaxprEqn, value: Value) -> Value:
    """The result of a cast of the program, of a value as it is now.

    Args:
        equation: The cast.
        value: Its operand.

    Returns:
        The value in the dtype that is asked for; in the one that it has, where the
        program asks for what it had already.
    """
    target = equation.params["new_dtype"]
    from_aval, to_aval = avals((equation.invars[0], equation.outvars[0]))
    if not is_castable(from_aval) or not is_castable(to_aval):
        (array,) = bind_equation(equation, value.array)
        # Masks, positions, labels: like arguments they begin no residual stream.
        is_number = jnp.issubdtype(from_aval.dtype, jnp.integer)
        is_number = is_number or from_aval.dtype == np.bool_
        return declared(array) if is_number else computed(array)
    if from_aval.dtype == target:
        # A cast to what the program has already does not undo what was chosen: half
        # precision stays so.
        if equation.params.get("sharding") is None:
            return value
        params = {**equation.params, "new_dtype": value.dtype}
        (array,) = bind_equation(equation.replace(params=params), value.array)
        return Value(array, value.facts, slots=value.slots, stored=value.stored)
    array = value.cast(target)
    facts = value.facts._replace(is_declared=value.is_constant)
    result = Value(array, facts, value.is_constant, value.slots, value.stored)
    if value.facts.is_weight and value.dtype == FULL:
        result.float32_source = value
    return result
