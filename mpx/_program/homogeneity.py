r"""Decides whether a program is proportional to some of its inputs.

A value is homogeneous of degree $d$ in these inputs if it is multiplied by $c^d$ when
they are multiplied by a number $c > 0$. A value that does not depend on them has degree
0, a linear one degree 1, a norm's square degree 2. A zero has every degree. The
primitives determine whether the program has only such values.

An operation that may map an infinity to a finite number counts as not homogeneous: a
test for infinities and NaN, the smaller of two numbers. So a program that is
proportional here hides no overflow. Kernels cannot be inspected, and are assumed to be
linear.
"""

import enum
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .equations import aval_of, is_inexact
from .flow import Flow, propagate
from .primitives import PRIMITIVES, PrimitiveClass, properties


class _Special(enum.Enum):
    ZERO = enum.auto()
    """Zero, whatever the inputs are."""
    OTHER = enum.auto()
    """Not homogeneous, as far as known."""


_Degree = Fraction | _Special
_ZERO, _OTHER = _Special.ZERO, _Special.OTHER
_FIXED, _LINEAR = Fraction(0), Fraction(1)


def is_proportional(closed: ClosedJaxpr, count: int) -> bool:
    """Returns whether all results of a program are proportional to its last inputs.

    Args:
        closed: The program.
        count: The number of these inputs.
    """
    first = len(closed.jaxpr.invars) - count
    inputs: Sequence[_Degree] = [_FIXED] * first + [_LINEAR] * count
    flow = _Degrees()
    results = propagate(closed.jaxpr, closed.consts, inputs, flow)
    pairs = zip(results, closed.jaxpr.outvars, strict=True)
    are_known = all(d in (_LINEAR, _ZERO) for d, v in pairs if is_inexact(aval_of(v)))
    return are_known and not flow.branches_differ


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of one operand, with a result of the operand's degree.
_KEEPING = _names(
    """
    abs conj copysign cummax cummin cumsum fft imag neg real reduce_max reduce_min
    reduce_precision reduce_sum reduce_window_max reduce_window_min reduce_window_sum
    select_and_gather_add select_and_scatter_add
    """
)
# Of several operands, whose elements are copied into or added to the result.
_JOINING = _names(
    """
    add add_any complex concatenate dynamic_update_slice pad scatter scatter-add
    scatter-sub select_n stack sub
    """
)
_MULTIPLYING = _names(
    "conv_general_dilated dot_general mul ragged_dot ragged_dot_general"
)
_COMPARING = _names("eq ge gt le lt ne")
_POWERS = {
    "cbrt": Fraction(1, 3),
    "rsqrt": Fraction(-1, 2),
    "sign": Fraction(0),
    "sqrt": Fraction(1, 2),
    "square": Fraction(2),
}
_KERNELS = _names(
    """
    call_exported custom_partitioning dot_product_attention_bwd_wrapper linear_call
    pallas_call
    """
)


class _Degrees(Flow[_Degree]):
    """The degrees of the values of a program.

    Attributes:
        branches_differ: Whether a branch or the length of a loop may depend on the
            scale of the inputs.
    """

    def __init__(self) -> None:
        self.branches_differ = False

    def constant(self, value: object) -> _Degree:
        """Returns degree 0, or zero."""
        is_known = isinstance(value, int | float | complex | np.ndarray | np.generic)
        return _ZERO if is_known and not np.any(value) else _FIXED

    def join(self, a: _Degree, b: _Degree) -> _Degree:
        """Returns the common degree of two facts."""
        if a == b or b is _ZERO:
            return a
        return b if a is _ZERO else _OTHER

    def leave(
        self,
        equation: JaxprEqn,
        role: str,
        operands: Sequence[_Degree],
        results: Sequence[_Degree],
    ) -> None:
        """Notes whether branches and ends of loops may depend on the scale."""
        chooses = operands[:1] if equation.primitive.name == "cond" else ()
        ends = results if role == "condition" else ()
        self.branches_differ |= not all(map(_is_fixed, (*chooses, *ends)))

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[_Degree]
    ) -> Sequence[_Degree]:
        """Maps the degrees of an operation's operands to those of its results."""
        name, results = equation.primitive.name, equation.outvars
        kind = properties(name).kind
        if _OTHER in facts:
            return [_OTHER] * len(results)
        is_parallel = name == "sort" or kind is PrimitiveClass.MOVE
        if is_parallel and len(facts) == len(results):
            return facts
        if name in _MULTIPLYING and not _is_zero(facts[:2]):
            return [sum(map(_number, facts), _FIXED)]
        if name == "top_k":
            return [facts[0], _FIXED]
        if name in ("argmax", "argmin"):
            return [_FIXED]
        if name in _KEEPING or name in _MULTIPLYING or kind is PrimitiveClass.MOVE:
            others = facts[1:] if kind is PrimitiveClass.MOVE else ()
            found = _ZERO if name in _MULTIPLYING else facts[0]
            return [found if all(map(_is_fixed, others)) else _OTHER] * len(results)
        if name in _JOINING:
            return [self._joined(equation, facts)]
        found = self._of_elements(equation, facts)
        if found is None:
            return _of_any(equation, facts)
        return [found] * len(results)

    def _joined(self, equation: JaxprEqn, facts: Sequence[_Degree]) -> _Degree:
        pairs = list(zip(facts, equation.invars, strict=True))
        if equation.primitive.name == "select_n":  # the first operand selects
            if not _is_fixed(facts[0]):
                return _OTHER
            del pairs[0]
        joined: _Degree = _ZERO
        for fact, atom in pairs:
            if is_inexact(aval_of(atom)):
                joined = self.join(joined, fact)
            elif not _is_fixed(fact):
                return _OTHER
        return joined if is_inexact(aval_of(equation.outvars[0])) else _FIXED

    def _of_elements(
        self, equation: JaxprEqn, facts: Sequence[_Degree]
    ) -> _Degree | None:
        """Returns the degree of an elementwise function; None if unknown."""
        name, params = equation.primitive.name, equation.params
        if name == "convert_element_type":
            is_number = is_inexact(aval_of(equation.outvars[0]))
            is_number = is_number and is_inexact(aval_of(equation.invars[0]))
            return facts[0] if is_number or facts[0] is _ZERO else None
        if name == "div" and facts[1] is not _ZERO:
            return _ZERO if facts[0] is _ZERO else _number(facts[0]) - _number(facts[1])
        if name == "triangular_solve":
            return _number(facts[1]) - _number(facts[0])
        if all(map(_is_fixed, facts)):
            is_largest = name in ("max", "min") and _is_zero(facts)
            return _ZERO if is_largest and all(x is _ZERO for x in facts) else None
        if name in _POWERS or name == "integer_pow":
            power = _POWERS.get(name) or Fraction(params.get("y", 0))
            return _number(facts[0]) * power
        # Compared with zero, any degree is fine: the comparison tests the sign.
        if name in ("max", "min") and _is_zero(facts):
            return next(x for x in facts if x is not _ZERO)
        return _FIXED if name in _COMPARING and _is_zero(facts) else None


def _of_any(equation: JaxprEqn, facts: Sequence[_Degree]) -> list[_Degree]:
    """Returns the degrees of any other operation's results."""
    if all(map(_is_fixed, facts)):
        return [_FIXED] * len(equation.outvars)
    name = equation.primitive.name
    is_kernel = name in _KERNELS or name not in PRIMITIVES
    is_linear = all(x == _LINEAR or _is_fixed(x) for x in facts)
    found = _LINEAR if is_kernel and is_linear else _OTHER
    return [found] * len(equation.outvars)


def _is_fixed(degree: _Degree) -> bool:
    return degree in (_FIXED, _ZERO)


def _is_zero(degrees: Sequence[_Degree]) -> bool:
    return any(degree is _ZERO for degree in degrees)


def _number(degree: _Degree) -> Fraction:
    return degree if isinstance(degree, Fraction) else _FIXED
