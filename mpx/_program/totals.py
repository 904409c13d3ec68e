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
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from .._jax_compat import bind_equation, equation_context
from .._typing import AnyArray
from .equations import aval_of, count

# Of the softmax of attention the compiler makes one kernel, with its derivative. A row
# of this many numbers is none.
_WIDE = 4096


def totals_of(closed: ClosedJaxpr) -> tuple[Var, ...]:
    """The sums over wide rows in a program, but those in programs within it."""
    return tuple(e.outvars[0] for e in closed.jaxpr.eqns if _is_total(e))


def _is_total(equation: JaxprEqn) -> bool:
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
    totals = totals_of(closed)
    known = dict(zip(totals, given, strict=True)) if given else {}
    values: dict[Var, Any] = dict(zip(closed.jaxpr.invars, xs, strict=True))
    values.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for equation in closed.jaxpr.eqns:
        operands = [
            a.val if isinstance(a, Literal) else values[a] for a in equation.invars
        ]
        with equation_context(equation):
            first = equation.outvars[0] if equation.outvars else None
            if first in known:
                results = [_sum_known_as(equation, operands[0], known[first])]
            else:
                results = bind_equation(equation, *operands)
        values.update(zip(equation.outvars, results, strict=True))
    outvars = closed.jaxpr.outvars
    results = [a.val if isinstance(a, Literal) else values[a] for a in outvars]
    return results, [values[total] for total in totals]


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
