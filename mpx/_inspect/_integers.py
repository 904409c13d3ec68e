"""Products in half precision of integers that it does not hold.

bfloat16 has all integers up to 256, float16 up to 2048. Counts by `tril @ mask`, a look
up by `one_hot @ positions` and a grid of pixels by `theta @ grid` are rounded above. So
each value has a *bound*: it holds integers, at most so large. None: real numbers, or
unknown ones.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._program import (
    Flow,
    PrimitiveClass,
    aval_of,
    count,
    properties,
    summed_numbers,
    walk,
)
from .._typing import Aval
from ._precision import precision_of_product

LARGEST = {"bfloat16": 256, "float16": 2048}

# Loops end soon: a bound that grows goes to the next of these.
_STEPS = (1.0, 256.0, 2048.0, math.inf)
_MANY = 2**20  # of so many numbers in the program none is read
_SAME = frozenset(
    "abs ceil cummax cummin floor neg reduce_max reduce_min round".split()
)
_LEAST = frozenset("and clamp min rem".split())


class _Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        bound: The largest integer that it may hold; None of real or unknown numbers.
        hot: The length of an axis along which one number is not zero; 0: none has.
    """

    bound: float | None
    hot: int = 0


_REAL = _Fact(None)


def rounded_integers(jaxpr: ClosedJaxpr) -> dict[int, str]:
    """The products that may round integers.

    Args:
        jaxpr: A program.

    Returns:
        By the identity of an equation, the precision that is too short.
    """
    flow = _Integers()
    for _ in walk(jaxpr, [_of_type(_REAL, a) for a in jaxpr.in_avals], flow):
        pass
    return flow.rounding


class _Integers(Flow[_Fact]):
    """Follows integers, also where they are kept as floating numbers."""

    def __init__(self) -> None:
        self.rounding: dict[int, str] = {}

    def constant(self, value: Any) -> _Fact:
        """The largest of its numbers, if all are integers."""
        if np.size(value) > _MANY:
            return _REAL
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):  # a key, or no number at all
            return _REAL
        if not np.all(np.isfinite(numbers) & (numbers == np.rint(numbers))):
            return _REAL
        return _Fact(float(np.abs(numbers).max(initial=0)))

    def join(self, a: _Fact, b: _Fact) -> _Fact:
        """Real numbers if one of them is."""
        if a == b or a.bound is None or b.bound is None:
            return a if a == b else _REAL
        largest = max(a.bound, b.bound)
        if a.bound != b.bound:
            largest = next(step for step in _STEPS if step >= largest)
        return _Fact(largest)

    def transfer(self, equation: JaxprEqn, facts: Sequence[_Fact]) -> list[_Fact]:
        """The facts of the results."""
        results = [aval_of(v) for v in equation.outvars]
        if len(results) == len(facts) > 1 and _is_moved(equation):
            return list(map(_of_type, facts, results))
        fact = _result(equation, facts)
        precision = precision_of_product(equation)
        if precision in LARGEST:
            pairs = list(zip(facts, equation.invars, strict=True))[:2]
            numbers = [f for f, x in pairs if _of_type(_REAL, aval_of(x)) == _REAL]
            if any((f.bound or 0) > LARGEST[precision] for f in (fact, *numbers)):
                self.rounding[id(equation)] = precision
        return [_of_type(fact, aval) for aval in results]


def _of_type(fact: _Fact, aval: Aval) -> _Fact:
    """A fact of numbers of a type; the bound of the type, where there is no other."""
    dtype = getattr(aval, "dtype", None)
    if dtype == np.bool_:
        return _Fact(1.0, fact.hot)
    if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.integer):
        return fact
    # What wider integers hold, nobody knows.
    widest = float(np.iinfo(dtype).max) if dtype.itemsize == 1 else math.inf
    return _Fact(widest if fact.bound is None else min(fact.bound, widest), fact.hot)


def _is_moved(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return properties(name).moves or name in _SAME or name == "sort"


def _result(equation: JaxprEqn, facts: Sequence[_Fact]) -> _Fact:
    """The fact of what an operation gives, whatever its type."""
    name, params = equation.primitive.name, equation.params
    known = properties(name)
    if name == "iota":
        return _Fact(float(count([params["shape"][params["dimension"]]]) - 1))
    if _is_moved(equation) or known.kind is PrimitiveClass.CONVERT:
        return facts[0]
    facts = facts[1:] if name == "select_n" else facts
    bounds = [fact.bound for fact in facts if fact.bound is not None]
    if len(bounds) < len(facts) or not bounds:
        return _REAL
    if name == "eq":  # ids == iota: as many as the shorter one has
        return _Fact(1.0, int(min(bounds)) + 1 if min(bounds) < math.inf else 0)
    if known.joins or name in ("max", "select_n"):
        return _Fact(max(bounds))
    if known.adds:
        return _Fact(sum(bounds))
    if name in _LEAST:
        return _Fact(min(bounds))
    terms = 1 if name == "mul" else summed_numbers(equation)
    if name in ("cumsum", "reduce_sum"):
        shape = aval_of(equation.invars[0]).shape
        axes = params["axes"] if name == "reduce_sum" else (params["axis"],)
        terms = count(shape[axis] for axis in axes)
    if terms in [fact.hot for fact in facts]:
        terms = min(terms, 1)
    largest = terms * math.prod(bounds)
    return _Fact(largest) if terms and not math.isnan(largest) else _REAL
