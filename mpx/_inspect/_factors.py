"""Rounded products that are factored or inverted as matrices.

`cholesky(K + 1e-3 * eye)`, `solve` and `inv` magnify errors of their matrix by its
condition number. The Gram matrix `K = x @ x.T`, rounded behind the product, is off by
2^-8 of its numbers in bfloat16, and need not be positive any more; as a float32 product
of the same operands it is.

A product is followed as far as each number is made of its own: through sums, scaling,
movement and casts. Through functions, as in `exp(-distances)`, it is where it is that
matrix, by its shape. It is not through a norm, a reduction or another product.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._program import (
    Flops,
    Flow,
    PrimitiveClass,
    aval_of,
    distinct_equations,
    properties,
    walk,
)
from .._typing import Shape
from ._precision import precision_of_product
from ._report import HALF, is_low

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
