"""Residual streams: which additions add a branch to one, and which products are scaled.

Autocast's demands stop there, islands end there, and a scan that carries such a sum
carries the stream.
"""

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jax_compat import open_jaxpr
from .._typing import Atom
from .equations import aval_of, program_of
from .primitives import PrimitiveClass, properties

# The equation that each variable comes from.
Makers = dict[Atom, JaxprEqn]


def makers_of(jaxpr: Jaxpr) -> Makers:
    """The equation that each variable comes from."""
    return {v: equation for equation in jaxpr.eqns for v in equation.outvars}


# How far back to look for one operand of a sum among what made the other.
_ISLAND = 32


def is_residual(equation: JaxprEqn, makers: Makers, is_wanted_full: bool) -> bool:
    """Whether an equation of two computed values adds a branch to a stream.

    JAX's derivatives sum gradients by `add_any`. The gradients of one weight, which end
    in float32, are no stream: a weight that is used many times needs a sum in float32.
    """
    name = equation.primitive.name
    if name not in ("add", "add_any"):
        return False
    if name == "add_any" and is_wanted_full:
        return False
    first, second = equation.invars
    if aval_of(first).shape != aval_of(second).shape:
        return False
    if _is_gated(first, makers) and _is_gated(second, makers):
        return False  # `f * c + i * g` in a recurrent cell, `z * h + (1 - z) * n`
    return not (
        _is_made_of(second, first, makers) or _is_made_of(first, second, makers)
    )


def looked_up(value: Atom, makers: Makers) -> Var | None:
    """The rows of a table that a value is, moved perhaps; None if it is something else.

    With them, the embeddings of tokens, a residual stream begins.
    """
    while not isinstance(value, Literal) and (maker := makers.get(value)) is not None:
        if maker.primitive.name == "gather":
            return maker.outvars[0]
        if not properties(maker.primitive.name).moves:
            return None
        value = maker.invars[0]
    return None


def _is_gated(value: Atom, makers: Makers) -> bool:
    """Whether a value is the product of two computed ones, number by number."""
    maker = makers.get(value)
    if maker is None or maker.primitive.name != "mul":
        return False
    return all(
        not isinstance(a, Literal) and aval_of(a).shape == aval_of(value).shape
        for a in maker.invars
    )


def _is_made_of(value: Atom, part: Atom, makers: Makers) -> bool:
    """Whether a value is made of another one by elementwise operations only."""
    waiting, steps = [value], 0
    while waiting and steps < _ISLAND:
        found, steps = waiting.pop(), steps + 1
        if found is part:
            return True
        maker = makers.get(found)
        if maker is None or properties(maker.primitive.name).kind not in _ELEMENTWISE:
            continue
        waiting += [
            a
            for a in maker.invars
            if not isinstance(a, Literal) and aval_of(a).shape == aval_of(value).shape
        ]
    return False


_ELEMENTWISE = (
    PrimitiveClass.FULL,
    PrimitiveClass.PROMOTE,
    PrimitiveClass.FOLLOW,
    PrimitiveClass.CONVERT,
)


def is_scaling(equation: JaxprEqn, makers: Makers) -> bool:
    """Whether an equation multiplies or divides a product by a number."""
    if equation.primitive.name not in ("mul", "div"):
        return False
    first, second = equation.invars
    if isinstance(first, Literal) and equation.primitive.name == "mul":
        # Not of a quotient: a number divided by a product is no scaling of it.
        first, second = second, first
    return isinstance(second, Literal) and _is_product(first, makers)


def _is_product(atom: Atom, makers: Makers) -> bool:
    """Whether a value is what a matrix product gave, moved perhaps."""
    if isinstance(atom, Literal):
        return False
    maker = makers.get(atom)
    if maker is None:
        return False
    name = maker.primitive.name
    known = properties(name)
    if known.program:  # `jnp.einsum` is a jit
        inner = open_jaxpr(program_of(maker))
        result = inner.outvars[maker.outvars.index(atom)]
        return _is_product(result, makers_of(inner))
    if known.moves:
        return _is_product(maker.invars[0], makers)
    return known.kind is PrimitiveClass.HALF
