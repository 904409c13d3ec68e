"""Float16 gradients that nothing scales: below 6e-8 they are zero.

A program does not say so, it is missing something. What makes a scaled gradient is a
number that the loss was multiplied by: in the backward pass it stands in front of the
first float16 operation, and is an argument of the program, or large.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import JaxprEqn

from .._autocast import is_scaling_note
from .._program import Visit, aval_of
from ._source_text import phase

FINDING = "float16 gradients without loss scaling: below 6e-8 they are zero"

_FLOAT16 = np.dtype(np.float16)
# A factor that a loss may have for other reasons is smaller.
_LARGE = 16.0


def unscaled_gradient(visits: Sequence[Visit[Any]]) -> int | None:
    """The place of the first operation of a gradient that nothing scales, if any."""
    first = None
    for number, visit in enumerate(visits):
        if any(is_scaling_note(entry.name) for entry in visit.scopes):
            return None
        if first is not None or phase(visit.scopes) != "backward":
            continue
        if _multiplies_by_a_scale(visit.equation):
            return None
        if _computes_in_float16(visit.equation):
            first = number
    return first


def _computes_in_float16(equation: JaxprEqn) -> bool:
    atoms = (*equation.invars, *equation.outvars)
    return any(getattr(aval_of(atom), "dtype", None) == _FLOAT16 for atom in atoms)


def _multiplies_by_a_scale(equation: JaxprEqn) -> bool:
    """Whether a number is multiplied by another one, as the scale is."""
    if equation.primitive.name != "mul" or aval_of(equation.outvars[0]).shape != ():
        return False
    numbers = [float(x.val) for x in equation.invars if isinstance(x, core.Literal)]
    # The derivative of the loss itself is 1.
    is_seed_by_variable = numbers == [1.0]
    return not numbers or is_seed_by_variable or max(map(abs, numbers)) >= _LARGE
