"""What autodiff keeps of an island, and what recomputing it needs.

Autodiff keeps for the backward pass what derivatives are multiplied with: both factors
of a product, what exp gave, what a sine was taken of. Which values those are is known
from the primitives, so it is counted here without differentiating, which would take as
long as everything else. The count is no exact one: JAX keeps a cube's slope and not the
number, and a function with a derivative rule of its own keeps what it likes.
`measured_bytes` differentiates.
"""

from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.numpy import inexact, issubdtype
from jaxtyping import PyTree

from .._dtypes import HALF
from .._typing import AnyArray, Atom, Aval
from .equations import aval_of, avals, count
from .flow import Flow, propagate
from .primitives import Saves, properties


class _Node:
    """A value: its bytes, and what it was made of."""

    __slots__ = ("bytes", "is_active", "is_free", "made_of")

    def __init__(
        self, size: int, made_of: "Iterable[_Node]" = (), is_active: bool = False
    ) -> None:
        self.bytes = size
        self.made_of: tuple[_Node, ...] = tuple(made_of)
        self.is_active = is_active  # whether it has a derivative
        self.is_free = False  # whether it is kept by others anyway


def kept_bytes(
    jaxpr: Jaxpr,
    are_free: tuple[bool, ...],
    stored: Sequence[np.dtype | None] = (),
) -> tuple[int, int]:
    """The bytes that autodiff keeps of an island, and those to recompute it from.

    Args:
        jaxpr: The island, as it was emitted.
        are_free: For each input whether it is there anyway: a weight, a constant.
        stored: For each input the dtype in which it is kept; None for its own.

    Returns:
        Both counts. Not in them is what is there anyway, and what an island gives in
        half precision, since the product that it goes into keeps it.
    """
    inputs = [
        _Node(_bytes(aval_of(v)), is_active=_is_float(aval_of(v))) for v in jaxpr.invars
    ]
    for node, is_free in zip(inputs, are_free, strict=True):
        node.is_free = is_free
    flow = _Keeping()
    constants = (None,) * len(jaxpr.constvars)
    results = propagate(jaxpr, constants, inputs, flow)
    for aval, node in zip(avals(jaxpr.outvars), results, strict=True):
        if node is not None and aval.dtype in HALF:
            node.is_free = True
    kept = flow.kept
    bytes_kept = sum(node.bytes for node in kept if not node.is_free)
    for node, v, dtype in zip(inputs, jaxpr.invars, stored, strict=False):
        if dtype is not None:  # autodiff would keep it as it is
            node.bytes = count(aval_of(v).shape) * dtype.itemsize
    needed, waiting = set(kept), list(kept)
    while waiting:
        for node in waiting.pop().made_of:
            if node not in needed:
                needed.add(node)
                waiting.append(node)
    return (
        bytes_kept,
        sum(node.bytes for node in inputs if node in needed and not node.is_free),
    )


def measured_bytes(
    function: Callable[..., PyTree],
    types: Sequence[Aval | jax.ShapeDtypeStruct],
    are_free: tuple[bool, ...],
) -> int:
    """The bytes that autodiff keeps of a function, by differentiating it.

    Not in them is what is not in those of `kept_bytes`.
    """

    def residuals(*arrays: AnyArray) -> tuple[PyTree, list[AnyArray]]:
        results, pullback = jax.vjp(function, *arrays)
        return results, jax.tree.leaves(pullback)

    closed = jax.make_jaxpr(residuals)(*types)
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(jax.eval_shape(function, *types)))
    results = jaxpr.outvars[:count]
    elsewhere = {v for v, free in zip(jaxpr.invars, are_free, strict=True) if free}
    elsewhere |= {v for v in results if not _is_literal(v) and aval_of(v).dtype in HALF}
    # A set: what several derivatives keep is there once.
    kept = {v for v in jaxpr.outvars[count:] if not _is_literal(v)}
    return sum(_bytes(aval_of(v)) for v in kept - elsewhere)


class _Keeping(Flow[_Node | None]):
    """Makes the nodes of a program; None stands for constants.

    Attributes:
        kept: The nodes that autodiff keeps.
    """

    def __init__(self) -> None:
        self.kept: dict[_Node, None] = {}

    def constant(self, value: object) -> None:
        """A number of the program is kept by nobody."""

    def join(self, a: _Node | None, b: _Node | None) -> _Node | None:
        """Regions have neither branches nor loops."""
        return a

    def transfer(
        self, equation: JaxprEqn, facts: Sequence[_Node | None]
    ) -> Sequence[_Node | None]:
        """The nodes of the results."""
        made_of = [node for node in facts if node is not None]
        results = equation.outvars
        if not made_of:  # of numbers only, or of constants
            return [None] * len(results)
        has_derivative = any(node.is_active for node in made_of)
        saves = properties(equation.primitive.name).saves
        if saves is Saves.SAME and not has_derivative:  # of a mask, say: never written
            return [made_of[0]]
        nodes = [
            _Node(_bytes(aval_of(v)), made_of, has_derivative and _is_float(aval_of(v)))
            for v in results
        ]
        if has_derivative and _is_float(aval_of(results[0])):
            self.kept.update(dict.fromkeys(_kept(saves, equation, facts, nodes[0])))
        return nodes


def _kept(
    saves: Saves, equation: JaxprEqn, operands: Sequence[_Node | None], result: _Node
) -> list[_Node]:
    """What the derivative of an operation is computed from."""
    if saves is Saves.RESULT:
        return [result]
    if saves is Saves.RESULT_AND_SLOPE:
        return [result, _Node(result.bytes, [result])]
    if saves is Saves.OPERAND:
        return [node for node in operands if node is not None]
    if saves is Saves.OTHERS:
        kept = [
            node
            for i, node in enumerate(operands)
            if node is not None
            and any(
                other is not None and other.is_active
                for j, other in enumerate(operands)
                if j != i
            )
        ]
        is_quotient = equation.primitive.name == "div"
        divisor = operands[-1] if is_quotient else None
        if divisor is not None and not divisor.is_active:
            return [divisor]  # the numerator is not needed
        return kept
    if saves is Saves.CHOICE:
        made_of = [o for o in operands if o is not None]
        (aval,) = avals(equation.outvars)
        # A truth value takes a byte.
        return [_Node(count(aval.shape), made_of)]
    if saves is Saves.PREDICATE and operands[0] is not None:
        return [operands[0]]
    return []


def _is_literal(atom: Atom) -> bool:
    return isinstance(atom, Literal)


def _is_float(aval: Aval) -> bool:
    return issubdtype(aval.dtype, inexact)


def _bytes(aval: Aval) -> int:
    return count(aval.shape) * aval.dtype.itemsize


def may_keep(equation: JaxprEqn) -> bool:
    """Whether autodiff may keep something for an equation."""
    known = properties(equation.primitive.name)
    if known.joins_regions:
        return any(_is_float(aval) for aval in avals(equation.invars))
    keeps_nothing = known.saves in (Saves.NOTHING, Saves.SAME)
    return not keeps_nothing and _is_float(aval_of(equation.outvars[0]))
