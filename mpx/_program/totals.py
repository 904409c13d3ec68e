"""Sums over wide rows, which a second computation of a program is given.

The sum of a softmax over a vocabulary is a number for each row, and the derivative
reads it. Computed again it is one more reader of the exponentials, and XLA writes what
several read where reading is cheap and computing is not: the cross entropy of a Llama
on a B200 wrote 1 GB of exponentials in float32 and moved 3.7 GB in place of 2.1 (jax
0.10.2, compiled for sm_100, November 2026).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._jax_compat import bind_equation, equation_context
from .._typing import AnyArray
from .equations import aval_of, count, run_by

# Of the softmax of attention the compiler makes one kernel, with its derivative. A row
# of this many numbers is none.
_WIDE = 4096


def _is_total(equation: JaxprEqn) -> bool:
    """Whether an equation is a sum over wide rows."""
    if equation.primitive.name != "reduce_sum":
        return False
    shape = aval_of(equation.invars[0]).shape
    return count(shape[axis] for axis in equation.params["axes"]) >= _WIDE


def evaluate_with_totals(
    closed: ClosedJaxpr, xs: Sequence[AnyArray], given: Sequence[AnyArray] = ()
) -> tuple[list[Any], list[Any]]:
    """The results of a program, and its sums over wide rows.

    Args:
        closed: The program.
        xs: Its inputs.
        given: These sums, if they are known. The derivative is that of the sum all the
            same.
    """
    totals = [e.outvars[0] for e in closed.jaxpr.eqns if _is_total(e)]
    known = dict(zip(totals, given, strict=True)) if given else {}

    def bind(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        with equation_context(equation):
            if equation.outvars and equation.outvars[0] in known:
                total = known[equation.outvars[0]]
                return [_sum_known_as(equation, operands[0], total)]
            return bind_equation(equation, *operands)

    read = run_by(bind, closed, xs)
    return list(map(read, closed.jaxpr.outvars)), list(map(read, totals))


def _sum_known_as(equation: JaxprEqn, x: AnyArray, known: AnyArray) -> AnyArray:
    """What a sum is known to be, with the derivative of the sum."""

    @jax.custom_jvp
    def total(x: AnyArray, known: AnyArray) -> AnyArray:
        return known

    @total.defjvp
    def _(
        primals: tuple[AnyArray, AnyArray], tangents: tuple[AnyArray, AnyArray]
    ) -> tuple[AnyArray, AnyArray]:
        # Nothing is added for what is known: it moves as the sum does.
        (dot,) = bind_equation(equation, tangents[0])
        return total(*primals), dot

    return total(x, known)
