"""Finds scores: matmuls that are scaled and masked on their way to a softmax.

A softmax reads its operand twice: it takes the maximum, and subtracts that. Its result
does not depend on what both have in common, and a masked element, whose exponential is
zero, only has to be far below the maximum.
"""

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from .._base.typing import Atom
from .equations import aval_of, is_multiplication, number_of
from .islands import Makers
from .primitives import properties

# How many operations may be between a maximum and the subtraction of it.
_STEPS = 8


def subtracts_maximum(equation: JaxprEqn, makers: Makers) -> bool:
    """Returns whether an equation subtracts from a value its maximum, or more.

    More is subtracted where a running maximum is kept, as by chunked attention.
    """
    if equation.primitive.name != "sub":
        return False
    value, *waiting = equation.invars
    for _ in range(_STEPS):
        if not waiting:
            return False
        atom = waiting.pop(0)
        maker = None if isinstance(atom, Literal) else makers.equations.get(atom)
        if maker is None:
            continue
        name = maker.primitive.name
        if name == "reduce_max":
            if maker.invars[0] is value:
                return True
        elif name in ("max", "select_n", "stop_gradient"):
            waiting += maker.invars
        elif properties(name).moves:
            waiting.append(maker.invars[0])
    return False


def scaled_product(equation: JaxprEqn, makers: Makers) -> tuple[Atom, float] | None:
    """Returns the matmul that an equation multiplies by a number, and the number.

    None if it does something else, if anything else reads the matmul, or for a number
    that is not known, or with whose inverse float32 may overflow.

    Args:
        equation: `mul` or `div`.
        makers: The makers of its program.
    """
    name = equation.primitive.name
    if name not in ("mul", "div") or aval_of(equation.outvars[0]).dtype != np.float32:
        return None
    pairs = [tuple(equation.invars)]
    if name == "mul":
        pairs.append(pairs[0][::-1])
    for value, factor in pairs:
        product = _only_read_here(value, makers)
        number = None if product is None else number_of(factor, makers.equations)
        if product is None or number is None or not 1e-30 < abs(number) < 1e30:
            continue
        return product, number if name == "mul" else 1 / number
    return None


def _only_read_here(value: Atom, makers: Makers) -> Atom | None:
    """Returns the result of a matmul that a value rearranges, if only it is read."""
    while not isinstance(value, Literal) and makers.readers[value] == 1:
        maker = makers.equations.get(value)
        if maker is None:
            return None
        if maker.primitive.name == "dot_general":
            return None if is_multiplication(maker) else value
        if not properties(maker.primitive.name).rearranges:
            return None
        value = maker.invars[0]
    return None
