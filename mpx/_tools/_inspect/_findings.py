"""In which precision an equation is computed, and in which format."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._autocast import Note, is_scaling_note
from ..._base.typing import Aval, Program, Shape
from ..._program import (
    Flops,
    Flow,
    PrimitiveClass,
    Visit,
    aval_of,
    avals,
    count,
    distinct_equations,
    is_matmul,
    properties,
    summed_numbers,
    walk,
    walk_inside,
)
from ._report import HALF, is_low
from ._traced import phase


def precision_of(equation: JaxprEqn) -> str:
    """The dtype that an equation is computed in.

    That of its operands for matrix products and convolutions, `mixed` where they
    differ, `float8` if both are formats of 8 bits. Else that of its first floating
    result, or operand, or result.
    """
    operands = [a.dtype for a in avals(equation.invars) if hasattr(a, "dtype")]
    results = [a.dtype for a in avals(equation.outvars) if hasattr(a, "dtype")]
    numbers = [d for d in operands if jnp.issubdtype(d, jnp.inexact)]
    if is_matmul(equation) and numbers:
        names = {str(dtype) for dtype in numbers[:2]}
        if len(names) == 1:
            return names.pop()
        # E4M3 by E5M2 is how gradients meet weights, and no accident.
        return "float8" if all(n.startswith("float8") for n in names) else "mixed"
    found = [d for d in results if jnp.issubdtype(d, jnp.inexact)] or numbers or results
    return dtype_name(found[0]) if found else ""


def precision_and_format(
    equation: JaxprEqn, note: Note | None, phase: str
) -> tuple[str, str]:
    """The dtype that an equation is computed in, and the format it counts under.

    That is the same but for quantized products: see `Operation.format`.

    Args:
        equation: The equation.
        note: What autocast noted on it.
        phase: As in `Operation`.
    """
    precision = precision_of(equation)
    if note is None or not is_matmul(equation):
        return precision, precision
    if precision in HALF and not note.is_emulated:
        return precision, precision
    format = note.formats[phase == "backward"]
    if format and not note.is_emulated and not is_low(precision):
        precision = "float8"  # XLA takes the casts into the product: `_in_fp8_to_sum`
    return precision, format or precision


def precision_of_product(equation: JaxprEqn) -> str | None:
    """The dtype of a product; None of all else."""
    return precision_of(equation) if is_matmul(equation) else None


def hides_a_program(equation: JaxprEqn) -> bool:
    """Whether numbers go into a program of which nothing is known."""
    return properties(equation.primitive.name).hides_a_program and any(
        jnp.issubdtype(getattr(aval_of(v), "dtype", bool), jnp.floating)
        for v in equation.invars
    )


def uses_half(equation: JaxprEqn) -> bool:
    """Whether an operand or a result is in half precision."""
    return any(
        str(getattr(aval_of(v), "dtype", "")) in HALF
        for v in (*equation.invars, *equation.outvars)
    )


def dtype_name(dtype: object) -> str:
    """Of a dtype; NumPy spells JAX's `float0`, of gradients of integers, otherwise."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


# ----------------------------------------------------------------------------
# Rounded products that are factored or inverted as matrices.
#
# `cholesky(K + 1e-3 * eye)`, `solve` and `inv` magnify errors of their matrix by its
# condition number. The Gram matrix `K = x @ x.T`, rounded behind the product, is off by
# 2^-8 of its numbers in bfloat16, and need not be positive any more; as a float32
# product of the same operands it is.
#
# A product is followed as far as each number is made of its own: through sums, scaling,
# movement and casts. Through functions, as in `exp(-distances)`, it is where it is that
# matrix, by its shape. It is not through a norm, a reduction or another product.

Products = frozenset[int]


class _Fact(NamedTuple):
    """The products that a value depends on, by the identity of their equations.

    Attributes:
        scaled: Those whose numbers it has, scaled, with something added perhaps.
        bent: Those of whose numbers, each by itself, it has functions.
        all: Those, and others since the last product.
    """

    scaled: Products = frozenset()
    bent: Products = frozenset()
    all: Products = frozenset()


_NOTHING = _Fact()


def factored_products(jaxpr: ClosedJaxpr) -> dict[int, str]:
    """The products in half precision and below that are factored as matrices.

    Args:
        jaxpr: A program.

    Returns:
        By the identity of an equation, the primitive that factors its result.
    """
    names = {e.primitive.name for e in distinct_equations(jaxpr)}
    flow = _Factored()
    if any(properties(name).factors for name in names):
        for _ in walk(jaxpr, [_NOTHING] * len(jaxpr.in_avals), flow):
            pass
    return flow.found


class _Factored(Flow[_Fact]):
    """Follows products to where they are factored."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}
        self._matrices: dict[int, Shape] = {}

    def constant(self, value: object) -> _Fact:
        """A constant is made of no product."""
        return _NOTHING

    def join(self, a: _Fact, b: _Fact) -> _Fact:
        """The products of both."""
        return _Fact(*(x | y for x, y in zip(a, b, strict=True)))

    def transfer(self, equation: JaxprEqn, facts: Sequence[_Fact]) -> list[_Fact]:
        """What the results are made of."""
        name, own = equation.primitive.name, id(equation)
        precision = precision_of_product(equation) or ""
        if precision in HALF or is_low(precision):
            self._matrices[own] = _sides(aval_of(equation.outvars[0]).shape)
            made = _Fact(frozenset((own,)), all=frozenset((own,)))
            return [made] * len(equation.outvars)
        if properties(name).factors:
            sides = _sides(aval_of(equation.invars[0]).shape)
            same = {p for p in facts[0].bent if self._matrices[p] == sides}
            for product in facts[0].scaled | same:
                self.found.setdefault(product, name)
        return [_result(equation, facts)] * len(equation.outvars)


def _sides(shape: Shape) -> Shape:
    return tuple(sorted(shape[-2:]))


def _result(equation: JaxprEqn, facts: Sequence[_Fact]) -> _Fact:
    scaled, bent, every = (
        frozenset[int]().union(*(fact[i] for fact in facts)) for i in range(3)
    )
    name = equation.primitive.name
    known = properties(name)
    keeps = known.moves or known.joins or known.adds or known.writes_part
    if keeps or known.kind is PrimitiveClass.CONVERT or name == "neg":
        return _Fact(scaled - bent, bent, every)
    if known.flops is not Flops.ELEMENTWISE:
        return _Fact(all=every)
    # A factor that is made of all numbers of the product normalizes it.
    normalized = frozenset[int]().union(*(f.all - f.scaled - f.bent for f in facts))
    carried = (scaled | bent) - normalized
    factors = facts[:1] if name == "div" else facts if name == "mul" else ()
    alone = frozenset(p for p in scaled if sum(p in fact.all for fact in facts) == 1)
    once = frozenset[int]().union(*(fact.scaled & alone for fact in factors))
    return _Fact(once - normalized, carried - once, every)


# ----------------------------------------------------------------------------
# Loops that end by a comparison of what half precision products gave.
#
# A solver that stops where an error is below a tolerance stops never, or too early,
# where the error is computed with products in half precision in each iteration: they
# are off by 2^-8 of themselves in bfloat16, and 2^-11 in float16, whatever the
# tolerance.


class _LoopFact(NamedTuple):
    """What is known of a value in a loop.

    Attributes:
        is_rounded: A number that depends on a product in half precision in the loop.
        tests: The comparisons of such numbers that it depends on, by identity.
    """

    is_rounded: bool = False
    tests: frozenset[int] = frozenset()


_NOTHING_CARRIED = _LoopFact()


def deciding_comparisons(jaxpr: Program) -> frozenset[int]:
    """The comparisons by which loops end, of numbers that products in them round.

    Args:
        jaxpr: A program.

    Returns:
        The identities of their equations.
    """
    found: frozenset[int] = frozenset()
    for equation in distinct_equations(jaxpr):
        if equation.primitive.name != "while":
            continue
        flow = _Rounding(equation)
        walk_inside(equation, [_NOTHING_CARRIED] * len(equation.invars), flow)
        found |= flow.deciding
    return found


class _Rounding(Flow[_LoopFact]):
    """Follows numbers from products in one loop to its condition."""

    def __init__(self, loop: object) -> None:
        self.deciding: frozenset[int] = frozenset()
        self._loop = loop

    def constant(self, value: object) -> _LoopFact:
        """A constant depends on nothing."""
        return _NOTHING_CARRIED

    def join(self, a: _LoopFact, b: _LoopFact) -> _LoopFact:
        """What one of them depends on."""
        return _LoopFact(a.is_rounded or b.is_rounded, a.tests | b.tests)

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[_LoopFact]
    ) -> Sequence[_LoopFact]:
        """Numbers stay rounded; truth values and integers carry the comparisons."""
        is_rounded = any(fact.is_rounded for fact in facts)
        is_rounded |= precision_of_product(equation) in HALF
        tests = frozenset[int]().union(*(fact.tests for fact in facts))
        if is_rounded and properties(equation.primitive.name).orders:
            tests |= {id(equation)}
        number, other = _LoopFact(is_rounded), _LoopFact(False, tests)
        return [number if _is_float(aval_of(v)) else other for v in equation.outvars]

    def leave(
        self,
        equation: JaxprEqn,
        role: str,
        operands: Sequence[_LoopFact],
        results: Sequence[_LoopFact],
    ) -> None:
        """What the condition of the loop depends on decides when it ends."""
        if equation is self._loop and role == "condition":
            self.deciding |= results[0].tests


def _is_float(aval: Aval) -> bool:
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


# ----------------------------------------------------------------------------
# Float16 gradients that nothing scales: below 6e-8 they are zero.
#
# A program does not say so, it is missing something. What makes a scaled gradient is a
# number that the loss was multiplied by: in the backward pass it stands in front of the
# first float16 operation, and is an argument of the program, or large.

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


# ----------------------------------------------------------------------------
# Products in half precision of integers that it does not hold.
#
# bfloat16 has all integers up to 256, float16 up to 2048. Counts by `tril @ mask`, a
# look up by `one_hot @ positions` and a grid of pixels by `theta @ grid` are rounded
# above. So each value has a *bound*: it holds integers, at most so large. None: real
# numbers, or unknown ones.

LARGEST = {"bfloat16": 256, "float16": 2048}

# Loops end soon: a bound that grows goes to the next of these.
_STEPS = (1.0, 256.0, 2048.0, math.inf)
_MANY = 2**20  # of so many numbers in the program none is read
_SAME = frozenset(
    "abs ceil cummax cummin floor neg reduce_max reduce_min round".split()
)
_LEAST = frozenset("and clamp min rem".split())


class _IntegerFact(NamedTuple):
    """What is known of a value.

    Attributes:
        bound: The largest integer that it may hold; None of real or unknown numbers.
        hot: The length of an axis along which one number is not zero; 0: none has.
    """

    bound: float | None
    hot: int = 0


_REAL = _IntegerFact(None)


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


class _Integers(Flow[_IntegerFact]):
    """Follows integers, also where they are kept as floating numbers."""

    def __init__(self) -> None:
        self.rounding: dict[int, str] = {}

    def constant(self, value: Any) -> _IntegerFact:
        """The largest of its numbers, if all are integers."""
        if np.size(value) > _MANY:
            return _REAL
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):  # a key, or no number at all
            return _REAL
        if not np.all(np.isfinite(numbers) & (numbers == np.rint(numbers))):
            return _REAL
        return _IntegerFact(float(np.abs(numbers).max(initial=0)))

    def join(self, a: _IntegerFact, b: _IntegerFact) -> _IntegerFact:
        """Real numbers if one of them is."""
        if a == b or a.bound is None or b.bound is None:
            return a if a == b else _REAL
        largest = max(a.bound, b.bound)
        if a.bound != b.bound:
            largest = next(step for step in _STEPS if step >= largest)
        return _IntegerFact(largest)

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[_IntegerFact]
    ) -> list[_IntegerFact]:
        """The facts of the results."""
        results = [aval_of(v) for v in equation.outvars]
        if len(results) == len(facts) > 1 and _is_moved(equation):
            return list(map(_of_type, facts, results))
        fact = _integer_result(equation, facts)
        precision = precision_of_product(equation)
        if precision in LARGEST:
            pairs = list(zip(facts, equation.invars, strict=True))[:2]
            numbers = [f for f, x in pairs if _of_type(_REAL, aval_of(x)) == _REAL]
            if any((f.bound or 0) > LARGEST[precision] for f in (fact, *numbers)):
                self.rounding[id(equation)] = precision
        return [_of_type(fact, aval) for aval in results]


def _of_type(fact: _IntegerFact, aval: Aval) -> _IntegerFact:
    """A fact of numbers of a type; the bound of the type, where there is no other."""
    dtype = getattr(aval, "dtype", None)
    if dtype == np.bool_:
        return _IntegerFact(1.0, fact.hot)
    if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.integer):
        return fact
    # What wider integers hold, nobody knows.
    widest = float(np.iinfo(dtype).max) if dtype.itemsize == 1 else math.inf
    return _IntegerFact(
        widest if fact.bound is None else min(fact.bound, widest), fact.hot
    )


def _is_moved(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return properties(name).moves or name in _SAME or name == "sort"


def _integer_result(equation: JaxprEqn, facts: Sequence[_IntegerFact]) -> _IntegerFact:
    """The fact of what an operation gives, whatever its type."""
    name, params = equation.primitive.name, equation.params
    known = properties(name)
    if name == "iota":
        return _IntegerFact(float(count([params["shape"][params["dimension"]]]) - 1))
    if _is_moved(equation) or known.kind is PrimitiveClass.CONVERT:
        return facts[0]
    facts = facts[1:] if name == "select_n" else facts
    bounds = [fact.bound for fact in facts if fact.bound is not None]
    if len(bounds) < len(facts) or not bounds:
        return _REAL
    if name == "eq":  # ids == iota: as many as the shorter one has
        return _IntegerFact(1.0, int(min(bounds)) + 1 if min(bounds) < math.inf else 0)
    if known.joins or name in ("max", "select_n"):
        return _IntegerFact(max(bounds))
    if known.adds:
        return _IntegerFact(sum(bounds))
    if name in _LEAST:
        return _IntegerFact(min(bounds))
    terms = 1 if name == "mul" else summed_numbers(equation)
    if name in ("cumsum", "reduce_sum"):
        shape = aval_of(equation.invars[0]).shape
        axes = params["axes"] if name == "reduce_sum" else (params["axis"],)
        terms = count(shape[axis] for axis in axes)
    if terms in [fact.hot for fact in facts]:
        terms = min(terms, 1)
    largest = terms * math.prod(bounds)
    return _IntegerFact(largest) if terms and not math.isnan(largest) else _REAL
