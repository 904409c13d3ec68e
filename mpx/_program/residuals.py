"""What autodiff keeps of an island, and what recomputing it needs.

Autodiff keeps for the backward pass what derivatives are multiplied with: both factors
of a product, what exp gave, what a sine was taken of. Which values those are is known
from the primitives, so it is counted here without differentiating, which would take as
long as everything else. The count is no exact one: JAX keeps a cube's slope and not the
number, and a function with a derivative rule of its own keeps what it likes.
`measured_bytes` differentiates.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jaxtyping import PyTree

from .._dtypes import HALF
from .._typing import AnyArray, Aval
from .equations import aval_of, avals, count, is_inexact
from .flow import Flow, propagate
from .islands import reachable
from .primitives import Saves, properties


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """A value: its bytes, and what it was made of.

    Attributes:
        bytes: How many it takes.
        made_of: The values that it was computed from.
        is_active: Whether it has a derivative.
        is_free: Whether it is kept by others anyway.
    """

    bytes: int
    made_of: "Sequence[_Node]" = ()
    is_active: bool = False
    is_free: bool = False


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
        _Node(_bytes(aval), (), is_inexact(aval), is_free)
        for aval, is_free in zip(avals(jaxpr.invars), are_free, strict=True)
    ]
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
    needed = reachable(kept, lambda node: node.made_of)
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
    variables = (v for v in results if not isinstance(v, Literal))
    elsewhere |= {v for v in variables if aval_of(v).dtype in HALF}
    # A set: what several derivatives keep is there once.
    kept = {v for v in jaxpr.outvars[count:] if not isinstance(v, Literal)}
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
            _Node(_bytes(aval), made_of, has_derivative and is_inexact(aval))
            for aval in avals(results)
        ]
        if has_derivative and is_inexact(aval_of(results[0])):
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
        divisor = operands[-1] if equation.primitive.name == "div" else None
        if divisor is not None and not divisor.is_active:
            return [divisor]  # the numerator is not needed
        active = [node is not None and node.is_active for node in operands]
        return [
            node
            for i, node in enumerate(operands)
            if node is not None and any((*active[:i], *active[i + 1 :]))
        ]
    if saves is Saves.CHOICE:
        made_of = [node for node in operands if node is not None]
        # A truth value takes a byte.
        return [_Node(count(aval_of(equation.outvars[0]).shape), made_of)]
    if saves is Saves.PREDICATE and operands[0] is not None:
        return [operands[0]]
    return []


def _bytes(aval: Aval) -> int:
    return count(aval.shape) * aval.dtype.itemsize


def may_keep(equation: JaxprEqn) -> bool:
    """Whether autodiff may keep something for an equation."""
    known = properties(equation.primitive.name)
    if known.joins_regions:
        return any(is_inexact(aval) for aval in avals(equation.invars))
    keeps_nothing = known.saves in (Saves.NOTHING, Saves.SAME)
    return not keeps_nothing and is_inexact(aval_of(equation.outvars[0]))
