"""The precision and format of an equation, and probable mistakes in a program.

Three flows follow values through a program: matmuls that are factored as matrices,
matmuls in a loop that decide when it ends, and integers that half precision rounds.
`unscaled_gradient` looks for float16 gradients without loss scaling.
"""

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
from ..._quantize import Leg
from ._report import HALF, is_low
from ._traced import phase


def precision_of(equation: JaxprEqn) -> str:
    """Returns the dtype that an equation is computed in.

    For matmuls and convolutions it is the dtype of the operands: `mixed` if they
    differ, `float8` if both are floats of 8 bits. Otherwise it is that of the first
    floating result, floating operand, or result.
    """
    operands = [a.dtype for a in avals(equation.invars) if hasattr(a, "dtype")]
    results = [a.dtype for a in avals(equation.outvars) if hasattr(a, "dtype")]
    numbers = [d for d in operands if jnp.issubdtype(d, jnp.inexact)]
    names = {str(dtype) for dtype in (numbers or operands)[:2]}
    if is_matmul(equation) and (numbers or len(names) == 1):
        if len(names) == 1:
            return names.pop()
        # E4M3 by E5M2 is a gradient times a weight, as intended.
        return "float8" if all(n.startswith("float8") for n in names) else "mixed"
    found = [d for d in results if jnp.issubdtype(d, jnp.inexact)] or numbers or results
    return dtype_name(found[0]) if found else ""


def precision_and_format(
    equation: JaxprEqn, note: Note | None, leg: Leg | None
) -> tuple[str, str]:
    """Returns the dtype of the computation, and the format it counts under.

    They only differ for quantized matmuls: see `Operation.format`.

    Args:
        equation: The equation.
        note: Autocast's note on it.
        leg: The leg of a quantized product that it is in, or None.
    """
    precision = precision_of(equation)
    found = None if note is None or leg is None else note.legs.get(leg)
    if found is None or not is_matmul(equation) or not found.format:
        return precision, precision
    if not found.is_emulated:
        if precision in HALF:
            return precision, precision
        if not is_low(precision):
            precision = "float8"  # XLA moves casts into the matmul: `_in_fp8_to_sum`
    return precision, found.format


def precision_of_product(equation: JaxprEqn) -> str | None:
    """Returns the dtype of a matmul; None for other operations."""
    return precision_of(equation) if is_matmul(equation) else None


def hides_a_program(equation: JaxprEqn) -> bool:
    """Returns whether floats go into a program that cannot be inspected."""
    return properties(equation.primitive.name).hides_a_program and any(
        jnp.issubdtype(getattr(aval_of(v), "dtype", bool), jnp.floating)
        for v in equation.invars
    )


def uses_half(equation: JaxprEqn) -> bool:
    """Returns whether an operand or a result is in half precision."""
    return any(
        str(getattr(aval_of(v), "dtype", "")) in HALF
        for v in (*equation.invars, *equation.outvars)
    )


def dtype_name(dtype: object) -> str:
    """Returns its name; NumPy has another for JAX's `float0`, of integer gradients."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


# --- Rounded matmuls that are factored or inverted as matrices ------------------------
#
# `cholesky(K + 1e-3 * eye)`, `solve` and `inv` magnify errors of their matrix by its
# condition number. The Gram matrix `K = x @ x.T`, rounded after the matmul, has errors
# of 2^-8 of its values in bfloat16, and may not be positive definite; as a float32
# matmul of the same operands it is.
#
# A matmul is followed as long as each number is computed from its own: through sums,
# scaling, movement and casts. After functions, as in `exp(-distances)`, it only counts
# if the factored matrix has its shape. A norm, a reduction or another matmul ends it.

Products = frozenset[int]


class _Fact(NamedTuple):
    """The matmuls that a value depends on, by the identity of their equations.

    Attributes:
        scaled: Those whose values it has, scaled, maybe with something added.
        bent: Those of whose values it has functions, element by element.
        all: These, and others since the last matmul.
    """

    scaled: Products = frozenset()
    bent: Products = frozenset()
    all: Products = frozenset()


_NOTHING = _Fact()


def factored_products(jaxpr: ClosedJaxpr) -> dict[int, str]:
    """Returns the matmuls in half precision or lower that are factored as matrices.

    Args:
        jaxpr: A program.

    Returns:
        The primitive that factors the result, by the identity of the matmul's equation.
    """
    names = {e.primitive.name for e in distinct_equations(jaxpr)}
    flow = _Factored()
    if any(properties(name).factors for name in names):
        for _ in walk(jaxpr, [_NOTHING] * len(jaxpr.in_avals), flow):
            pass
    return flow.found


class _Factored(Flow[_Fact]):
    """Follows matmuls to their factorization."""

    def __init__(self) -> None:
        self.found: dict[int, str] = {}
        self._matrices: dict[int, Shape] = {}

    def constant(self, value: object) -> _Fact:
        """Returns no matmuls."""
        return _NOTHING

    def join(self, a: _Fact, b: _Fact) -> _Fact:
        """Returns the matmuls of both."""
        return _Fact(*(x | y for x, y in zip(a, b, strict=True)))

    def transfer(self, equation: JaxprEqn, facts: Sequence[_Fact]) -> list[_Fact]:
        """Returns the matmuls that the results depend on."""
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
    # A factor computed from all numbers of the matmul normalizes it.
    normalized = frozenset[int]().union(*(f.all - f.scaled - f.bent for f in facts))
    carried = (scaled | bent) - normalized
    factors = facts[:1] if name == "div" else facts if name == "mul" else ()
    alone = frozenset(p for p in scaled if sum(p in fact.all for fact in facts) == 1)
    once = frozenset[int]().union(*(fact.scaled & alone for fact in factors))
    return _Fact(once - normalized, carried - once, every)


# --- Loops that end by a comparison of half-precision matmuls -------------------------
#
# A solver that stops at an error below a tolerance never stops, or stops too early, if
# each iteration computes the error with half-precision matmuls: their relative error is
# 2^-8 in bfloat16 and 2^-11 in float16, for any tolerance.


class _LoopFact(NamedTuple):
    """The facts of a value in a loop.

    Attributes:
        is_rounded: Whether it depends on a half-precision matmul in the loop.
        tests: The comparisons of such numbers that it depends on, by identity.
    """

    is_rounded: bool = False
    tests: frozenset[int] = frozenset()


_NOTHING_CARRIED = _LoopFact()


def deciding_comparisons(jaxpr: Program) -> frozenset[int]:
    """Returns the comparisons of rounded numbers that decide when loops end.

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
    """Follows numbers from matmuls in one loop to its condition."""

    def __init__(self, loop: object) -> None:
        self.deciding: frozenset[int] = frozenset()
        self._loop = loop

    def constant(self, value: object) -> _LoopFact:
        """Returns no dependency."""
        return _NOTHING_CARRIED

    def join(self, a: _LoopFact, b: _LoopFact) -> _LoopFact:
        """Returns the dependencies of both."""
        return _LoopFact(a.is_rounded or b.is_rounded, a.tests | b.tests)

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[_LoopFact]
    ) -> Sequence[_LoopFact]:
        """Floats stay rounded; booleans and integers carry the comparisons."""
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
        """Records the comparisons that the condition of the loop depends on."""
        if equation is self._loop and role == "condition":
            self.deciding |= results[0].tests


def _is_float(aval: Aval) -> bool:
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.inexact)


# --- Unscaled float16 gradients: below 6e-8 they are zero -----------------------------
#
# A scaled gradient is found by the number that the loss was multiplied by: in the
# backward pass, a multiplication before the first float16 operation, by an argument of
# the program or a large number.

FINDING = "float16 gradients without loss scaling: below 6e-8 they are zero"

_FLOAT16 = np.dtype(np.float16)
# A factor that a loss has for other reasons is smaller.
# unsure: a loss with a weight above 16 hides the finding, a manual scale below 16
# triggers it
_LARGE = 16.0


def unscaled_gradient(visits: Sequence[Visit[Any]]) -> int | None:
    """Returns the position of the first operation of an unscaled gradient, or None."""
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
    """Returns whether it multiplies two scalars, as loss scaling does."""
    if equation.primitive.name != "mul" or aval_of(equation.outvars[0]).shape != ():
        return False
    numbers = [float(x.val) for x in equation.invars if isinstance(x, core.Literal)]
    # The derivative of the loss itself is 1.
    is_seed_by_variable = numbers == [1.0]
    return not numbers or is_seed_by_variable or max(map(abs, numbers)) >= _LARGE


# --- Half-precision matmuls of integers that the format rounds ------------------------
#
# bfloat16 has all integers up to 256, float16 up to 2048. Counts by `tril @ mask`, a
# lookup by `one_hot @ positions` and a grid of pixels by `theta @ grid` are rounded
# above. So each value has a *bound*: it holds integers of at most this magnitude. None
# means real or unknown numbers.

LARGEST = {"bfloat16": 256, "float16": 2048}

# A bound that grows in a loop is raised to the next of these, so the search ends soon.
_STEPS = (1.0, 256.0, 2048.0, math.inf)
# unsure: a limit on time, not measured; bounds of larger constants are unknown
_MANY = 2**20  # larger constants are not read
_SAME = frozenset(
    "abs ceil cummax cummin floor neg reduce_max reduce_min round".split()
)
_LEAST = frozenset("and clamp min rem".split())


class _IntegerFact(NamedTuple):
    """The facts of a value.

    Attributes:
        bound: The largest integer that it may hold; None of real or unknown numbers.
        hot: The length of an axis along which one number is nonzero; 0 if unknown.
    """

    bound: float | None
    hot: int = 0


_REAL = _IntegerFact(None)


def rounded_integers(jaxpr: ClosedJaxpr) -> dict[int, str]:
    """Returns the matmuls that may round integers.

    Args:
        jaxpr: A program.

    Returns:
        The precision that is too low, by the identity of the matmul's equation.
    """
    flow = _Integers()
    for _ in walk(jaxpr, [_of_type(_REAL, a) for a in jaxpr.in_avals], flow):
        pass
    return flow.rounding


class _Integers(Flow[_IntegerFact]):
    """Follows integers, also those stored as floats."""

    def __init__(self) -> None:
        self.rounding: dict[int, str] = {}

    def constant(self, value: Any) -> _IntegerFact:
        """Returns the largest magnitude, if all numbers are integers."""
        if np.size(value) > _MANY:
            return _REAL
        try:
            numbers = np.asarray(value, np.float64)
        except (TypeError, ValueError):  # a key, or not a number
            return _REAL
        if not np.all(np.isfinite(numbers) & (numbers == np.rint(numbers))):
            return _REAL
        return _IntegerFact(float(np.abs(numbers).max(initial=0)))

    def join(self, a: _IntegerFact, b: _IntegerFact) -> _IntegerFact:
        """Returns the larger bound; real if one of them is."""
        if a == b or a.bound is None or b.bound is None:
            return a if a == b else _REAL
        largest = max(a.bound, b.bound)
        if a.bound != b.bound:
            largest = next(step for step in _STEPS if step >= largest)
        return _IntegerFact(largest)

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[_IntegerFact]
    ) -> list[_IntegerFact]:
        """Returns the facts of the results."""
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
    """Returns the fact of numbers of a type, limited to the type's bound."""
    dtype = getattr(aval, "dtype", None)
    if dtype == np.bool_:
        return _IntegerFact(1.0, fact.hot)
    if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.integer):
        return fact
    # The bound of wider integers is unknown.
    widest = float(np.iinfo(dtype).max) if dtype.itemsize == 1 else math.inf
    return _IntegerFact(
        widest if fact.bound is None else min(fact.bound, widest), fact.hot
    )


def _is_moved(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    return properties(name).moves or name in _SAME or name == "sort"


def _integer_result(equation: JaxprEqn, facts: Sequence[_IntegerFact]) -> _IntegerFact:
    """Returns the fact of an operation's result, before `_of_type`."""
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
    if name == "eq":  # ids == iota: the shorter length
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
