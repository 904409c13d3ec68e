"""Residual streams: which additions add a branch to one.

Islands end there, and a scan that carries such a sum carries the stream.
"""

import collections
from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._jax_compat import open_jaxpr
from .._typing import Atom
from .equations import aval_of, count, is_multiplication, program_of
from .islands import is_cheap
from .primitives import PrimitiveClass, properties


class Makers(NamedTuple):
    """Where the values of a program come from, and how often they are read.

    Attributes:
        equations: The equation that each variable comes from.
        readers: How many operands and results of the program each variable is.
    """

    equations: dict[Atom, JaxprEqn]
    readers: collections.Counter[Atom]


def makers_of(jaxpr: Jaxpr) -> Makers:
    """Where the values of a program come from, and how often they are read."""
    read = [atom for equation in jaxpr.eqns for atom in equation.invars]
    variables = (a for a in (*read, *jaxpr.outvars) if not isinstance(a, Literal))
    made: dict[Atom, JaxprEqn] = {
        v: equation for equation in jaxpr.eqns for v in equation.outvars
    }
    return Makers(made, collections.Counter(variables))


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


def goes_around(equation: JaxprEqn, makers: Makers) -> bool:
    """Whether an operand of a sum goes around something: it has other readers.

    Not so in a sum of two products, as in a recurrent cell, in an associative scan, and
    in a sum over the turns of a loop.
    """
    return any(_is_read_elsewhere(atom, makers) for atom in equation.invars)


def is_sum_of_products(equation: JaxprEqn, makers: Makers) -> bool:
    """Whether an equation adds two products, as the gates of a recurrent cell do."""
    return equation.primitive.name == "add" and all(
        _is_product(atom, makers) for atom in equation.invars
    )


def _is_product(atom: Atom, makers: Makers) -> bool:
    """Whether a value is what a matrix product gave, turned perhaps."""
    maker = None if isinstance(atom, Literal) else makers.equations.get(atom)
    if maker is None:
        return False
    known = properties(maker.primitive.name)
    if known.rearranges:
        return _is_product(maker.invars[0], makers)
    if known.program:  # `jnp.einsum` is a jit
        inner = open_jaxpr(program_of(maker))
        result = inner.outvars[[v is atom for v in maker.outvars].index(True)]
        return _is_product(result, makers_of(inner))
    return known.kind is PrimitiveClass.HALF and not is_multiplication(maker)


def _is_read_elsewhere(value: Atom, makers: Makers) -> bool:
    while makers.readers[value] == 1:
        maker = makers.equations.get(value)
        if maker is None or not properties(maker.primitive.name).rearranges:
            return False
        value = maker.invars[0]
    return True


def looked_up(value: Atom, makers: Makers) -> Var | None:
    """The rows of a table that a value is, moved perhaps; None if it is something else.

    With them, the embeddings of tokens, a residual stream begins.
    """
    while not isinstance(value, Literal) and (maker := makers.equations.get(value)):
        if maker.primitive.name == "gather":
            return maker.outvars[0]
        if not properties(maker.primitive.name).moves:
            return None
        value = maker.invars[0]
    return None


def _is_gated(value: Atom, makers: Makers) -> bool:
    """Whether a value is the product of two computed ones, number by number."""
    maker = makers.equations.get(value)
    if maker is None or maker.primitive.name != "mul":
        return False
    return all(
        not isinstance(a, Literal) and aval_of(a).shape == aval_of(value).shape
        for a in maker.invars
    )


def _is_made_of(value: Atom, part: Atom, makers: Makers) -> bool:
    """Whether a value is made of another one by elementwise operations only."""
    return any(found is part for found, _ in _elementwise(value, makers))


def is_made_of_product(value: Atom, makers: Makers) -> bool:
    """Whether a value is made of a product by elementwise operations: bias, dropout."""
    makers_found = (maker for _, maker in _elementwise(value, makers) if maker)
    return any(_is_product(maker.outvars[0], makers) for maker in makers_found)


def _elementwise(value: Atom, makers: Makers) -> Iterator[tuple[Atom, JaxprEqn | None]]:
    """What a value is made of number by number, and the equations that made that."""
    waiting, steps, size = [value], 0, count(aval_of(value).shape)
    while waiting and steps < _ISLAND:
        found, steps = waiting.pop(), steps + 1
        maker = makers.equations.get(found)
        yield found, maker
        if maker is None:
            continue
        is_moved = properties(maker.primitive.name).kind is PrimitiveClass.MOVE
        if is_moved or is_cheap(maker):  # `jnp.where` is a jit
            operands = (a for a in maker.invars if not isinstance(a, Literal))
            waiting += [a for a in operands if count(aval_of(a).shape) == size]
