"""Between which numbers a value of a program lies, whatever its inputs are.

By interval arithmetic on the equations of a jaxpr: squares, absolute values, roots and
exponentials are not negative, nor are sums, products and quotients of such numbers; and
a factor 1 - b is not, if b is at most 1. Bounds of results are rounded away from each
other, so that they hold for what is computed in float32. Infinities and NaN are left
out: what is NaN is neither negative nor not.

Two forms need more than bounds: $(c x) x$ is not negative for c >= 0, and
$x + c (y - x)$ lies between x and y for c from 0 to 1. So a value remembers of what it
is a multiple (`root`), and how it leads from one value to another (`path`).

With the bounds travels which array of the state a value is, or was before something
was added to it: `origin`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from .._program import Flow, aval_of

_INF = math.inf
# An origin that nothing is known of: of constants, which add nothing to what else a
# value may be; and of values that were computed.
CONSTANT, COMPUTED = -1, -2


class Bounds(NamedTuple):
    """What is known of a value.

    Attributes:
        low: No number is smaller.
        high: No number is larger.
        origin: The input that it is, or to which something was added; or `CONSTANT`,
            or `COMPUTED`.
        is_copy: Whether it depends on the weights.
        is_whole: Whether all numbers are integers.
        root: The variable that it is a multiple of, by factors that are not negative.
        path: It is part of the way from a variable to another value.
    """

    low: float = -_INF
    high: float = _INF
    origin: int = COMPUTED
    is_copy: bool = False
    is_whole: bool = False
    root: object = None
    path: "Path | None" = None

    def within(self, other: "Bounds") -> bool:
        """Whether the other bounds hold, too."""
        return other.low <= self.low and self.high <= other.high


class Path(NamedTuple):
    """Part of the difference of two values.

    Attributes:
        start: The variable that is subtracted.
        low: The lower bound of the value that it is subtracted from.
        high: The upper bound.
        least: The smallest part.
    """

    start: object
    low: float
    high: float
    least: float


class Intervals(Flow[Bounds]):
    """Bounds that travel through a program."""

    def constant(self, value: Any) -> Bounds:
        """The smallest and the largest number of a constant."""
        unknown = Bounds(origin=CONSTANT)
        if value is None or isinstance(value, Tracer):
            return unknown
        dtype = getattr(value, "dtype", np.asarray(value).dtype)
        is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
        if not is_number or jnp.issubdtype(dtype, np.complexfloating):
            return unknown
        array = np.asarray(value).astype(np.float64)
        if array.size == 0 or np.isnan(array).any():
            return unknown
        is_whole = bool((array == np.round(array)).all())
        low, high = float(array.min()), float(array.max())
        return Bounds(low, high, CONSTANT, is_whole=is_whole)

    def join(self, a: Bounds, b: Bounds) -> Bounds:
        """Bounds of both; only a few, so that a loop comes to an end."""
        low = a.low if a.low <= b.low else max(x for x in _LEVELS if x <= b.low)
        high = a.high if a.high >= b.high else min(x for x in _LEVELS if x >= b.high)
        origin = _joined_origin(a, b)
        return Bounds(
            low, high, origin, a.is_copy or b.is_copy, a.is_whole and b.is_whole
        )

    def transfer(self, equation: JaxprEqn, facts: Sequence[Bounds]) -> Sequence[Bounds]:
        """Bounds of the results of an operation."""
        name = equation.primitive.name
        is_copy = any(fact.is_copy for fact in facts)
        if name in _SAME:
            number = len(equation.outvars)
            found = list(facts[:number] if len(facts) > 1 else facts * number)
            if name not in _IN_PLACE:
                found = [_elsewhere(fact) for fact in found]
        elif name in _RULES:
            low, high = _RULES[name](equation, facts)
            if name not in _EXACT:
                low, high = _rounded(low, high)
            fact = Bounds(low, high, _origin(name, equation, facts))
            found = [_with_forms(fact, name, equation, facts)]
        else:
            found = []
        if len(found) != len(equation.outvars):
            found = [Bounds()] * len(equation.outvars)
        return [
            self._of_dtype(variable, fact)._replace(is_copy=is_copy)
            for variable, fact in zip(equation.outvars, found, strict=True)
        ]

    def _of_dtype(self, variable: Any, fact: Bounds) -> Bounds:
        """The bounds that the dtype has besides."""
        dtype = getattr(aval_of(variable), "dtype", None)
        if dtype == np.bool_:
            return fact._replace(low=0.0, high=1.0, is_whole=True)
        if dtype is None or not jnp.issubdtype(dtype, np.integer):
            return fact
        fact = fact._replace(is_whole=True)
        if jnp.issubdtype(dtype, np.unsignedinteger) and fact.low < 0:
            return fact._replace(low=0.0, high=_INF)
        return fact._replace(low=_whole(fact.low, -1), high=_whole(fact.high, 1))


_LEVELS = (-_INF, -1.0, 0.0, 1.0, _INF)
# Results are numbers of the first operand, or of the operand at their place.
_SAME = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice "
    "copy copy_p convert_element_type reduce_precision optimization_barrier "
    "sharding_constraint reshard pvary pcast device_put reduce_max reduce_min sort "
    "cummax cummin all_gather pmax pmin ppermute split".split()
)
_IN_PLACE = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims copy copy_p convert_element_type "
    "optimization_barrier sharding_constraint reshard pvary pcast device_put".split()
)
# No arithmetic that rounds.
_EXACT = frozenset("max min clamp select_n concatenate pad gather neg abs".split())
# To which something may be added, and it is still what it was before, and more.
_ADDITIVE = frozenset(["add", "add_any", "sub"])

Rule = Callable[[JaxprEqn, Sequence[Bounds]], tuple[float, float]]


def _whole(bound: float, direction: int) -> float:
    """A bound as an integer, away from the others."""
    if math.isinf(bound):
        return bound
    return float(math.ceil(bound) if direction > 0 else math.floor(bound))


def _elsewhere(fact: Bounds) -> Bounds:
    """What holds of numbers that were moved."""
    origin = CONSTANT if fact.origin == CONSTANT else COMPUTED
    return fact._replace(origin=origin, root=None, path=None)


def _is_flag(fact: Bounds) -> bool:
    return fact.is_whole and fact.low >= 0 and fact.high <= 1


def _with_forms(
    fact: Bounds, name: str, equation: JaxprEqn, facts: Sequence[Bounds]
) -> Bounds:
    """What holds of a result beside its bounds, by the forms above."""
    if len(facts) != 2:
        return fact
    (a, b), (x, y) = facts, equation.invars
    if name == "sub":
        return fact._replace(path=Path(y, a.low, a.high, 1.0))
    if name in ("add", "add_any"):
        for part, whole, start in ((b, a, x), (a, b, y)):
            if part.path is not None and part.path.start is start:
                low, high = (
                    min(part.path.low, whole.low),
                    max(part.path.high, whole.high),
                )
                origin = COMPUTED if part.path.least > 0 else fact.origin
                return fact._replace(low=low, high=high, origin=origin)
    if name == "mul":
        if (a.root or x) is (b.root or y):
            fact = fact._replace(low=max(fact.low, 0.0))
        for factor, whole, of in ((a, b, y), (b, a, x)):
            if factor.low >= 0:
                fact = fact._replace(root=whole.root or of)
                if whole.path is not None and factor.high <= 1:
                    least = whole.path.least * factor.low
                    fact = fact._replace(path=whole.path._replace(least=least))
    if name == "div" and a.path is not None and b.low >= 1:
        least = 0.0 if math.isinf(b.high) else a.path.least / b.high
        fact = fact._replace(path=a.path._replace(least=least))
    return fact


def _joined_origin(a: Bounds, b: Bounds) -> int:
    known = {a.origin, b.origin} - {CONSTANT}
    if len(known) > 1:
        return COMPUTED
    return known.pop() if known else CONSTANT


def _origin(name: str, equation: JaxprEqn, facts: Sequence[Bounds]) -> int:
    if name == "select_n":
        origin = facts[1]
        for fact in facts[2:]:
            origin = Bounds(origin=_joined_origin(origin, fact))
        return origin.origin
    if name in _ADDITIVE:
        if facts[0].origin >= 0 or name == "sub":
            return facts[0].origin if facts[0].origin >= 0 else COMPUTED
        return facts[1].origin if facts[1].origin >= 0 else COMPUTED
    if name == "integer_pow" and equation.params["y"] == 1:
        return facts[0].origin
    if name == "mul" and any(map(_is_flag, facts)):
        return facts[_is_flag(facts[0])].origin  # as it was, or zero
    return COMPUTED


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Bounds a little further apart, but for those that are exact in any dtype."""
    if math.isnan(low) or math.isnan(high):
        return -_INF, _INF
    if low not in _LEVELS:
        # Rounding keeps the order: what is above 1 does not become less.
        low = max(low - abs(low) * 2.0**-6, *(x for x in _LEVELS if x <= low))
    if high not in _LEVELS:
        high = min(high + abs(high) * 2.0**-6, *(x for x in _LEVELS if x >= high))
    return low, high


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _mul(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    a, b = facts
    ends = [_times(x, y) for x in a[:2] for y in b[:2]]
    if equation.invars[0] is equation.invars[1]:
        return max(0.0, min(ends)), max(ends)
    return min(ends), max(ends)


def _add(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return facts[0].low + facts[1].low, facts[0].high + facts[1].high


def _sub(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return facts[0].low - facts[1].high, facts[0].high - facts[1].low


def _div(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    a, b = facts
    if b.low > 0 or b.high < 0:
        ends = [0.0 if math.isinf(y) else x / y for x in a[:2] for y in b[:2]]
        return min(ends), max(ends)
    if b.low == 0:
        return (0.0 if a.low >= 0 else -_INF), (0.0 if a.high <= 0 else _INF)
    return -_INF, _INF


def _integer_pow(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    (a,), y = facts, equation.params["y"]
    if y == 1:
        return a.low, a.high
    if y < 0:
        return (0.0 if y % 2 == 0 or a.low >= 0 else -_INF), _INF
    ends = (_power(a.low, y), _power(a.high, y))
    if y % 2:
        return ends
    return (0.0 if a.low <= 0 <= a.high else min(ends)), max(ends)


def _power(x: float, y: int) -> float:
    try:
        return x**y
    except OverflowError:
        return _INF if x > 0 or y % 2 == 0 else -_INF


def _pow(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    a, b = facts
    if a.low < 0:
        return -_INF, _INF
    if (a.high <= 1 and b.low >= 0) or (a.low >= 1 and b.high <= 0):
        return 0.0, 1.0
    return (1.0 if a.low >= 1 and b.low >= 0 else 0.0), _INF


def _monotone(function: Callable[[float], float]) -> Rule:
    """A rule for a function that grows, given where it is defined."""

    def rule(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
        with np.errstate(all="ignore"):
            low, high = (float(function(np.float64(x))) for x in facts[0][:2])
        return low, high

    return rule


def _sqrt(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return math.sqrt(max(facts[0].low, 0.0)), math.sqrt(max(facts[0].high, 0.0))


def _abs(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    (a,) = facts
    ends = abs(a.low), abs(a.high)
    return (0.0 if a.low <= 0 <= a.high else min(ends)), max(ends)


def _neg(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return -facts[0].high, -facts[0].low


def _max(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return max(f.low for f in facts), max(f.high for f in facts)


def _min(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return min(f.low for f in facts), min(f.high for f in facts)


def _clamp(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    low, x, high = facts
    return min(max(x.low, low.low), high.low), min(max(x.high, low.high), high.high)


def _cases(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    """One of several: what is chosen, or stands side by side."""
    if equation.primitive.name == "select_n":
        facts = facts[1:]
    return min(f.low for f in facts), max(f.high for f in facts)


def _sum(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    return (
        0.0 if facts[0].low >= 0 else -_INF,
        0.0 if facts[0].high <= 0 else _INF,
    )


def _product(equation: JaxprEqn, facts: Sequence[Bounds]) -> tuple[float, float]:
    """Sums of products."""
    low, high = _mul(equation, facts[:2])
    return (0.0 if low >= 0 else -_INF), (0.0 if high <= 0 else _INF)


def _within(low: float, high: float) -> Rule:
    return lambda equation, facts: (low, high)


_RULES: dict[str, Rule] = {
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "integer_pow": _integer_pow,
    "square": lambda e, f: _integer_pow_2(f[0]),
    "pow": _pow,
    "neg": _neg,
    "abs": _abs,
    "sqrt": _sqrt,
    "rsqrt": _within(0.0, _INF),
    "cbrt": _monotone(np.cbrt),
    "exp": _monotone(np.exp),
    "exp2": _monotone(np.exp2),
    "expm1": _monotone(np.expm1),
    "log1p": _monotone(lambda x: np.log1p(max(x, -1.0))),
    "sign": _monotone(np.sign),
    "floor": _monotone(np.floor),
    "ceil": _monotone(np.ceil),
    "round": _monotone(np.round),
    "logistic": _within(0.0, 1.0),
    "tanh": _monotone(np.tanh),
    "erf": _within(-1.0, 1.0),
    "sin": _within(-1.0, 1.0),
    "cos": _within(-1.0, 1.0),
    "max": _max,
    "min": _min,
    "clamp": _clamp,
    "select_n": _cases,
    "concatenate": _cases,
    "pad": _cases,
    # Out of bounds it may give 0.
    "gather": lambda e, f: (min(f[0].low, 0.0), max(f[0].high, 0.0)),
    "dynamic_update_slice": lambda e, f: _cases(e, f[:2]),
    "reduce_sum": _sum,
    "cumsum": _sum,
    "psum": _sum,
    "reduce_prod": lambda e, f: (0.0 if f[0].low >= 0 else -_INF, _INF),
    "dot_general": _product,
    "iota": _within(0.0, _INF),
    "argmax": _within(0.0, _INF),
    "argmin": _within(0.0, _INF),
}


def _integer_pow_2(a: Bounds) -> tuple[float, float]:
    ends = _power(a.low, 2), _power(a.high, 2)
    return (0.0 if a.low <= 0 <= a.high else min(ends)), max(ends)
