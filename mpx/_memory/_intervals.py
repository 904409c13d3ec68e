"""Proves the kinds of an optimizer's arrays from its program, by interval arithmetic.

An array is *never negative* if it starts so and each update keeps it so: the results of
an update are bounded, given that all arrays of the state are within their bounds before
it (an induction over steps). The bounds tried are 0 to 1, 0 and more, and all numbers,
the narrowest that `init` satisfies first. Bounds that an update breaks are widened,
until all hold together.

An array *accumulates* if each update keeps most of it and adds to that: the squares of
Adagrad, an average whose factor is near 1. Each addition is much smaller than the
distance of two 8-bit codes, so the array would mostly be noise. It gets 16 bits.

An array that is computed from the weights in `init` is a *copy*, not a moment: a
master, the slow weights of an average. A step changes it by less than few bits resolve.

Names of fields do not decide any of this: `tests/memory/test_compress_state.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import PyTree

from .._base.jax_compat import open_jaxpr
from .._program import Flow, aval_of, propagate, properties

# --- Bounds ---------------------------------------------------------------------------
#
# Bounds of the values of a jaxpr for all inputs within theirs. Squares, absolute
# values, roots and exponentials are never negative, nor are sums, products and
# quotients of such numbers, nor is a factor 1 - b if b is at most 1. Bounds of results
# are rounded outward, so that they hold for float32 arithmetic. Infinities and NaN are
# ignored: NaN has no sign.
#
# Two forms need more than bounds: $(c x) x$ is never negative for c >= 0, and $x + c (y
# - x)$ is between x and y for c from 0 to 1. So the facts of a value include the
# variable that it is a multiple of (`root`), and the way from one value to another that
# it is a part of (`path`).
#
# They also include the array of the state that a value is, or was before something was
# added to it (`origin`), and the `factor` by which it was multiplied.

_INF = math.inf
# Origins other than inputs: a constant, which joins with any origin; and a computed
# value, whose origin is unknown.
CONSTANT, COMPUTED = -1, -2


class Bounds(NamedTuple):
    """Facts of a value.

    Attributes:
        low: No number is smaller.
        high: No number is larger.
        origin: The number of the input that the value is, times `factor`, perhaps with
            something added; or `CONSTANT`, or `COMPUTED`.
        factor: The smallest factor of its origin; positive.
        is_copy: Whether it depends on the weights.
        is_whole: Whether all numbers are integers.
        root: The variable that it is a multiple of, by factors that are never negative.
        path: The way from a variable to another value that it is a part of.
    """

    low: float = -_INF
    high: float = _INF
    origin: int = COMPUTED
    factor: float = 1.0
    is_copy: bool = False
    is_whole: bool = False
    root: object = None
    path: "Path | None" = None

    def within(self, other: "Bounds") -> bool:
        """Returns whether the other bounds hold, too."""
        return other.low <= self.low and self.high <= other.high


class Path(NamedTuple):
    """A part of the difference of two values.

    Attributes:
        start: The variable that is subtracted.
        low: The lower bound of the value from which it is subtracted.
        high: The upper bound of that value.
        least: The smallest part.
        most: The largest part.
    """

    start: object
    low: float
    high: float
    least: float
    most: float = 1.0


class Intervals(Flow[Bounds]):
    """Propagates bounds through a program."""

    def constant(self, value: Any) -> Bounds:
        """Returns the smallest and the largest number of a constant."""
        unknown = Bounds(origin=CONSTANT)
        if value is None or isinstance(value, Tracer):
            return unknown
        # Its own dtype: a random key cannot be converted to an array.
        dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
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
        """Returns bounds of both, of few possible ones, so that loops end."""
        low = a.low if a.low <= b.low else max(x for x in _LEVELS if x <= b.low)
        high = a.high if a.high >= b.high else min(x for x in _LEVELS if x >= b.high)
        is_copy, is_whole = a.is_copy or b.is_copy, a.is_whole and b.is_whole
        return Bounds(low, high, *_joined_origin(a, b), is_copy, is_whole)

    def transfer(self, equation: JaxprEqn, facts: Sequence[Bounds]) -> Sequence[Bounds]:
        """Returns the bounds of an operation's results."""
        name = equation.primitive.name
        is_copy = any(fact.is_copy for fact in facts)
        if name in _RULES:
            low, high = _RULES[name](equation, *facts)
            if name not in _EXACT:
                low, high = _rounded(low, high)
            fact = Bounds(low, high, *_origin(name, equation, facts))
            found = [_with_forms(fact, name, equation, facts)]
        elif name in _SAME or properties(name).moves:
            number = len(equation.outvars)
            found = [*facts[:number]] if len(facts) > 1 else [facts[0]] * number
            if name not in _IN_PLACE:
                found = [_elsewhere(fact) for fact in found]
        else:
            found = []
        if len(found) != len(equation.outvars):
            found = [Bounds()] * len(equation.outvars)
        return [
            self._of_dtype(variable, fact)._replace(is_copy=is_copy)
            for variable, fact in zip(equation.outvars, found, strict=True)
        ]

    def _of_dtype(self, variable: Any, fact: Bounds) -> Bounds:
        """Narrows bounds to those of the variable's dtype."""
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
# Like operations that move numbers: results contain only numbers of the first operand,
# or each those of its own.
_SAME = frozenset(
    "convert_element_type reduce_precision pcast reduce_max reduce_min sort cummax "
    "cummin pmax pmin".split()
)
_IN_PLACE = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims copy copy_p convert_element_type "
    "optimization_barrier sharding_constraint reshard pvary pcast device_put".split()
)
# Operations that do not round.
_EXACT = frozenset(
    "max min clamp select_n concatenate pad gather ppermute neg abs".split()
)
# Operations whose result keeps the origin of a term.
_ADDITIVE = frozenset(["add", "add_any", "sub"])

# Computes bounds of a result from an equation and the bounds of its operands.
Rule = Callable[..., tuple[float, float]]


def _whole(bound: float, direction: int) -> float:
    """Rounds a bound outward to an integer."""
    return float(np.ceil(bound) if direction > 0 else np.floor(bound))


def _elsewhere(fact: Bounds) -> Bounds:
    """Returns the facts that remain true of numbers at other indices."""
    origin = CONSTANT if fact.origin == CONSTANT else COMPUTED
    return fact._replace(origin=origin, root=None, path=None)


def _is_flag(fact: Bounds) -> bool:
    return fact.is_whole and fact.low >= 0 and fact.high <= 1


def _with_forms(
    fact: Bounds, name: str, equation: JaxprEqn, facts: Sequence[Bounds]
) -> Bounds:
    """Adds what the two forms above prove of a result."""
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
                fact = fact._replace(low=low, high=high)
                if part.path.least > 0:
                    left = whole.factor * (1 - part.path.most)
                    fact = fact._replace(**_kept(whole.origin, left)._asdict())
                return fact
    if name == "mul":
        if (a.root or x) is (b.root or y):
            fact = fact._replace(low=max(fact.low, 0.0))
        for factor, whole, of in ((a, b, y), (b, a, x)):
            if factor.low >= 0:
                fact = fact._replace(root=whole.root or of)
                if whole.path is not None and factor.high <= 1:
                    least = whole.path.least * factor.low
                    most = whole.path.most * factor.high
                    path = whole.path._replace(least=least, most=most)
                    fact = fact._replace(path=path)
    if name == "div" and a.path is not None and b.low >= 1:
        least = 0.0 if math.isinf(b.high) else a.path.least / b.high
        most = a.path.most / b.low
        fact = fact._replace(path=a.path._replace(least=least, most=most))
    return fact


class _Origin(NamedTuple):
    """The fields of `Bounds` that name the input in a value."""

    origin: int = COMPUTED
    factor: float = 1.0


def _kept(origin: int, factor: float) -> _Origin:
    return _Origin(origin, factor) if origin >= 0 and factor > 0 else _Origin()


def _joined_origin(*cases: Bounds) -> _Origin:
    known = {case.origin for case in cases} - {CONSTANT}
    if len(known) > 1:
        return _Origin()
    factor = min(case.factor for case in cases)
    return _Origin(known.pop(), factor) if known else _Origin(CONSTANT)


def _origin(name: str, equation: JaxprEqn, facts: Sequence[Bounds]) -> _Origin:
    if name == "select_n":
        return _joined_origin(*facts[1:])
    if name in _ADDITIVE:
        terms = facts[:1] if name == "sub" else facts
        most = max(terms, key=lambda fact: (fact.origin >= 0, fact.factor))
        return _kept(most.origin, most.factor)
    if name == "integer_pow" and equation.params["y"] == 1:
        return _kept(facts[0].origin, facts[0].factor)
    if name == "mul":
        a, b = facts
        if _is_flag(a) or _is_flag(b):
            whole = b if _is_flag(a) else a
            return _kept(whole.origin, whole.factor)  # as it was, or zero
        whole, other = (a, b) if a.origin >= 0 else (b, a)
        return _kept(whole.origin, whole.factor * max(other.low, 0.0))
    if name == "div" and facts[1].low > 0:
        return _kept(facts[0].origin, facts[0].factor / facts[1].high)
    return _Origin()


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Moves bounds a little outward, except those that are exact in any dtype."""
    if math.isnan(low) or math.isnan(high):
        return -_INF, _INF
    if low not in _LEVELS:
        # Rounding is monotonic: a number above 1 does not become less than 1.
        low = max(low - abs(low) * 2.0**-6, *(x for x in _LEVELS if x <= low))
    if high not in _LEVELS:
        high = min(high + abs(high) * 2.0**-6, *(x for x in _LEVELS if x >= high))
    return low, high


def _product(a: Bounds, b: Bounds) -> tuple[float, float]:
    ends = [x * y if x and y else 0.0 for x in a[:2] for y in b[:2]]
    return min(ends), max(ends)


def _quotient(a: Bounds, b: Bounds) -> tuple[float, float]:
    if b.low > 0 or b.high < 0:
        ends = [0.0 if math.isinf(y) else x / y for x in a[:2] for y in b[:2]]
        return min(ends), max(ends)
    return _sign(a) if b.low == 0 else (-_INF, _INF)


def _sign(a: Bounds) -> tuple[float, float]:
    """Returns bounds of numbers with the sign of others: their sums and quotients."""
    return (0.0 if a.low >= 0 else -_INF), (0.0 if a.high <= 0 else _INF)


def _magnitude(a: Bounds) -> tuple[float, float]:
    return max(a.low, -a.high, 0.0), max(-a.low, a.high)


def _integer_power(a: Bounds, y: int) -> tuple[float, float]:
    if y < 0:
        return (0.0 if y % 2 == 0 or a.low >= 0 else -_INF), _INF
    ends = a[:2] if y % 2 else _magnitude(a)
    with np.errstate(over="ignore"):
        low, high = (float(np.float64(x) ** y) for x in ends)
    return low, high


def _power(a: Bounds, b: Bounds) -> tuple[float, float]:
    if a.low < 0:
        return -_INF, _INF
    if (a.high <= 1 and b.low >= 0) or (a.low >= 1 and b.high <= 0):
        return 0.0, 1.0
    return (1.0 if a.low >= 1 and b.low >= 0 else 0.0), _INF


def _either(*cases: Bounds) -> tuple[float, float]:
    return min(case.low for case in cases), max(case.high for case in cases)


def _grows(function: Any, least: float = -_INF) -> Rule:
    """Returns the rule of an increasing function that is defined from `least` on."""

    def rule(_: JaxprEqn, a: Bounds) -> tuple[float, float]:
        with np.errstate(all="ignore"):
            low, high = (float(function(np.float64(max(x, least)))) for x in a[:2])
        return low, high

    return rule


def _always(low: float, high: float) -> Rule:
    return lambda *_: (low, high)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ["add", "add_any"], lambda _, a, b: (a.low + b.low, a.high + b.high)
    ),
    "sub": lambda _, a, b: (a.low - b.high, a.high - b.low),
    "mul": lambda _, a, b: _product(a, b),
    "div": lambda _, a, b: _quotient(a, b),
    "pow": lambda _, a, b: _power(a, b),
    "integer_pow": lambda e, a: _integer_power(a, e.params["y"]),
    "square": lambda _, a: _integer_power(a, 2),
    "neg": lambda _, a: (-a.high, -a.low),
    "abs": lambda _, a: _magnitude(a),
    "max": lambda _, a, b: (max(a.low, b.low), max(a.high, b.high)),
    "min": lambda _, a, b: (min(a.low, b.low), min(a.high, b.high)),
    "clamp": lambda _, low, x, high: (
        min(max(x.low, low.low), high.low),
        min(max(x.high, low.high), high.high),
    ),
    "select_n": lambda _, which, *cases: _either(*cases),
    **dict.fromkeys(["concatenate", "pad"], lambda _, *cases: _either(*cases)),
    # Indices out of bounds may give 0, and devices without a source get 0.
    **dict.fromkeys(
        ["gather", "ppermute"],
        lambda _, a, *_where: (min(a.low, 0.0), max(a.high, 0.0)),
    ),
    "dynamic_update_slice": lambda _, a, b, *where: _either(a, b),
    **dict.fromkeys(["reduce_sum", "cumsum", "psum"], lambda _, a: _sign(a)),
    "dot_general": lambda _, a, b: _sign(Bounds(*_product(a, b))),
    "sqrt": _grows(np.sqrt, 0.0),
    **{
        name: _grows(getattr(np, name))
        for name in "cbrt exp exp2 expm1 sign floor ceil round tanh".split()
    },
    **dict.fromkeys(["rsqrt", "iota", "argmax", "argmin"], _always(0.0, _INF)),
    **dict.fromkeys(["erf", "sin", "cos"], _always(-1.0, 1.0)),
    "logistic": _always(0.0, 1.0),
}


# --- Kinds ----------------------------------------------------------------------------

_UNIT, _POSITIVE, _ANY = Bounds(0.0, 1.0), Bounds(0.0), Bounds()
# 8 bits can follow an average with Adam's factor 0.999, but not with AdEMAMix' 0.9999:
# docs/guides/state.md lists their noise.
# unsure: between 0.999, which works, and 0.9999, which does not; nothing between was
# trained
_MOST = 0.9995


class Kind(NamedTuple):
    """Facts of an array of a state.

    Attributes:
        signed: Whether it may become negative.
        accumulates: Whether each update keeps `_MOST` of it, or more.
        is_copy: Whether `init` computes it from the weights.
    """

    signed: bool = True
    accumulates: bool = True
    is_copy: bool = False


def kinds_of(
    init: Callable[[PyTree], PyTree],
    update: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    state: PyTree,
) -> PyTree:
    """Returns the kinds of the leaves of a state, as a tree like it.

    Args:
        init: Returns a state for weights.
        update: Returns the state after a step, from the weights (and gradients like
            them) and the state before.
        params: The weights.
        state: A state.
    """
    count, weights = len(jax.tree.leaves(state)), len(jax.tree.leaves(params))
    starts = _results(jax.make_jaxpr(init)(params), [Bounds(is_copy=True)] * weights)
    program = jax.make_jaxpr(update)(params, state)
    if len(starts) != count or len(program.jaxpr.outvars) != count:
        return jax.tree.map(
            lambda _: Kind(), state
        )  # it changes its structure, for which `update` raises
    allowed = [[b for b in (_UNIT, _POSITIVE, _ANY) if s.within(b)] for s in starts]
    while True:
        before = [
            bounds[0]._replace(origin=number) for number, bounds in enumerate(allowed)
        ]
        after = _results(program, [_ANY] * weights + before)
        broken = [
            number
            for number, (old, new) in enumerate(zip(before, after, strict=True))
            if not new.within(old)
        ]
        if not broken:
            kinds = [
                Kind(old.low < 0, _accumulates(old, new), start.is_copy)
                for old, new, start in zip(before, after, starts, strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(state), kinds)
        for number in broken:
            allowed[number].pop(0)


def _accumulates(old: Bounds, new: Bounds) -> bool:
    return new.origin == old.origin and new.factor >= _MOST


def _results(program: ClosedJaxpr, inputs: Sequence[Bounds]) -> list[Bounds]:
    return propagate(open_jaxpr(program), program.consts, inputs, Intervals())
