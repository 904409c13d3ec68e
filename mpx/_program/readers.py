"""What reads the inputs of a program: products of which they are the weight, or more.

For who wants to know whether the derivative of an input is the sum of derivatives of
products, each of them whole.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from .._jax_compat import scan_counts
from .equations import aval_of, sub_jaxprs
from .flow import BackwardFlow, backward
from .primitives import properties

# Their programs read what the equation reads, once, and have no derivative of their
# own.
_ENTERED = frozenset({"jit", "pjit", "closed_call", "checkpoint", "remat2", "cond"})
# float16 ends at 65504: what is finite elsewhere may overflow in it.
_WIDE = (np.dtype(jnp.bfloat16), np.dtype(np.float32))


class Readers(NamedTuple):
    """What reads a value.

    Attributes:
        axes: Along how many of its first axes scans cut it on its way to products of
            which it is the weight.
        are_others: Whether anything else reads it.
    """

    axes: frozenset[int] = frozenset()
    are_others: bool = False


_OTHERS = Readers(are_others=True)


class _ReadersFlow(BackwardFlow[Readers]):
    """What reads values, from what reads the results of their users."""

    def __init__(self, weights: Mapping[JaxprEqn, int | None]) -> None:
        """Starts with what is known of equations: see `cut_axes`."""
        self._weights = weights

    @property
    def nothing(self) -> Readers:
        """Nobody reads it."""
        return Readers()

    def join(self, a: Readers, b: Readers) -> Readers:
        """What reads it in two places."""
        return Readers(a.axes | b.axes, a.are_others or b.are_others)

    def operands(
        self, equation: JaxprEqn, results: Sequence[Readers]
    ) -> Sequence[Readers]:
        """What reads the operands of any equation."""
        name = equation.primitive.name
        if equation in self._weights:
            found = [_OTHERS] * len(equation.invars)
            weight = self._weights[equation]
            if weight is not None:
                found[weight] = Readers(frozenset({0}))
            return found
        if name in _ENTERED:
            return super().operands(equation, results)
        if name == "scan":
            return self._of_scan(equation, results)
        if sub_jaxprs(equation):
            return [_OTHERS] * len(equation.invars)
        return self.transfer(equation, results)

    def transfer(
        self, equation: JaxprEqn, results: Sequence[Readers]
    ) -> Sequence[Readers]:
        """What reads the operands of an operation."""
        name = equation.primitive.name
        if name == "convert_element_type":
            dtypes = {aval_of(equation.invars[0]).dtype, equation.params["new_dtype"]}
            return [results[0] if dtypes.issubset(_WIDE) else _OTHERS]
        # What scans cut has its first axes still.
        if properties(name).rearranges and results[0].axes <= {0}:
            return [results[0]] + [_OTHERS] * (len(equation.invars) - 1)
        return [_OTHERS] * len(equation.invars)

    def _of_scan(self, equation: JaxprEqn, results: Sequence[Readers]) -> list[Readers]:
        found = list(super().operands(equation, results))
        n_consts, n_carry = scan_counts(equation.params)
        for i, readers in enumerate(found):
            if n_consts <= i < n_consts + n_carry:
                found[i] = _OTHERS
            elif i >= n_consts + n_carry:
                axes = frozenset(axis + 1 for axis in readers.axes)
                found[i] = readers._replace(axes=axes)
        return found


def cut_axes(jaxpr: Jaxpr, weights: Mapping[JaxprEqn, int | None]) -> list[int | None]:
    """Along how many of its first axes scans cut each input of a program.

    On its way to products of which it is the weight, transposed, reshaped, or cast
    between float32 and bfloat16 as it may be: each piece is the weight of products of
    its own.

    Args:
        jaxpr: The program.
        weights: Of such a product, which operand is the weight; None for an equation
            that reads its operands in another way, whatever program it holds.

    Returns:
        None for inputs that anything else reads, or nothing, or products behind
        different numbers of scans; and for float16.
    """
    readers = backward(jaxpr, [_OTHERS] * len(jaxpr.outvars), _ReadersFlow(weights))
    return [_cut_axes(v, readers.get(v, _OTHERS)) for v in jaxpr.invars]


def _cut_axes(variable: Var, readers: Readers) -> int | None:
    if readers.are_others or len(readers.axes) != 1:
        return None
    (axes,) = readers.axes
    return axes if aval_of(variable).dtype in _WIDE else None
