"""What autodiff keeps of an island, and what recomputing it needs.

Autodiff keeps for the backward pass what derivatives are multiplied with: both factors
of a product, what exp gave, what a sine was taken of. Which values those are is known
from the primitives, so it is counted here without differentiating, which would take as
long as everything else. The count is no exact one: JAX keeps a cube's slope and not the
number, and a function with a derivative rule of its own keeps what it likes.
`measured_bytes` differentiates.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.numpy import inexact, issubdtype

from .._dtypes import is_half
from .._jax_compat import open_jaxpr
from .._jaxpr import count
from ._islands import HOLDERS
from ._plan import program_of

# The derivative is computed from the result.
_RESULT = frozenset("cbrt exp exp2 expm1 logistic rsqrt sqrt tan tanh".split())
# The derivative is computed from the operand.
_OPERAND = frozenset(
    """
    abs acos acosh asin asinh atan atanh cos cosh digamma erf erf_inv erfc integer_pow
    lgamma log log1p log2 one_minus_square polynomial reduce_max reduce_min reduce_prod
    sign sin sinh square bessel_i0e bessel_i1e
    """.split()
)
# The derivative by one operand is computed from the others.
_OTHERS = frozenset("atan2 div dot_general igamma igammac mul pow rem".split())
# These give the numbers of their operand again.
_COPIES = frozenset("broadcast_in_dim broadcast_to expand_dims reshape squeeze".split())
# The derivative asks which operand it was: a boolean for each number of the result.
_CHOICES = frozenset("clamp max min".split())


class _Node:
    """A value: its bytes, and what it was made of."""

    __slots__ = ("bytes", "is_active", "is_free", "made_of")

    def __init__(self, size: int, made_of: Any = (), is_active: bool = False) -> None:
        self.bytes = size
        self.made_of: tuple[_Node, ...] = tuple(made_of)
        self.is_active = is_active  # whether it has a derivative
        self.is_free = False  # whether it is kept by others anyway


def kept_bytes(jaxpr: Any, are_free: tuple[bool, ...]) -> tuple[int, int]:
    """The bytes that autodiff keeps of an island, and those to recompute it from.

    Args:
        jaxpr: The island, as it was emitted.
        are_free: For each input whether it is there anyway: a weight, a constant.

    Returns:
        Both counts. Not in them is what is there anyway, and what an island gives in
        half precision, since the product that it goes into keeps it.
    """
    inputs = [_Node(_bytes(v.aval), is_active=_is_float(v.aval)) for v in jaxpr.invars]
    for node, is_free in zip(inputs, are_free, strict=True):
        node.is_free = is_free
    nodes: dict[Any, _Node] = dict(zip(jaxpr.invars, inputs, strict=True))
    kept: dict[_Node, None] = {}
    _walk(jaxpr, nodes, kept)
    for variable in jaxpr.outvars:
        is_known = not _is_literal(variable) and variable in nodes
        if is_known and is_half(variable.aval.dtype):
            nodes[variable].is_free = True
    needed, waiting = set(kept), list(kept)
    while waiting:
        for node in waiting.pop().made_of:
            if node not in needed:
                needed.add(node)
                waiting.append(node)
    return (
        sum(node.bytes for node in kept if not node.is_free),
        sum(node.bytes for node in inputs if node in needed and not node.is_free),
    )


def measured_bytes(
    function: Any, types: Sequence[Any], are_free: tuple[bool, ...]
) -> int:
    """The bytes that autodiff keeps of a function, by differentiating it.

    Not in them is what is not in those of `kept_bytes`.
    """

    def residuals(*arrays: Any) -> tuple[Any, Any]:
        results, pullback = jax.vjp(function, *arrays)
        return results, jax.tree.leaves(pullback)

    closed = jax.make_jaxpr(residuals)(*types)
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(jax.eval_shape(function, *types)))
    results = jaxpr.outvars[:count]
    elsewhere = {v for v, free in zip(jaxpr.invars, are_free, strict=True) if free}
    elsewhere |= {v for v in results if not _is_literal(v) and is_half(v.aval.dtype)}
    kept = {v for v in jaxpr.outvars[count:] if not _is_literal(v)}
    return sum(_bytes(v.aval) for v in kept - elsewhere)


def _walk(jaxpr: Any, nodes: dict[Any, _Node], kept: dict[_Node, None]) -> None:
    """Adds the nodes of a program, and those that autodiff keeps."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [nodes.get(a) for a in equation.invars if not _is_literal(a)]
        made_of = [node for node in operands if node is not None]
        if name in HOLDERS:
            inner = open_jaxpr(program_of(equation))
            inside = {
                v: nodes[a]
                for v, a in zip(inner.invars, equation.invars, strict=True)
                if not _is_literal(a) and a in nodes
            }
            _walk(inner, inside, kept)
            for outer, result in zip(equation.outvars, inner.outvars, strict=True):
                if not _is_literal(result) and result in inside:
                    nodes[outer] = inside[result]
            continue
        if not made_of:  # of numbers only, or of constants
            continue
        has_derivative = any(node.is_active for node in made_of)
        if name in _COPIES and not has_derivative:  # of a mask, say: never written
            nodes[equation.outvars[0]] = made_of[0]
            continue
        for variable in equation.outvars:
            is_active = has_derivative and _is_float(variable.aval)
            nodes[variable] = _Node(_bytes(variable.aval), made_of, is_active)
        if has_derivative and _is_float(equation.outvars[0].aval):
            kept.update(dict.fromkeys(_kept(name, equation, nodes)))


def _kept(name: str, equation: Any, nodes: dict[Any, _Node]) -> list[_Node]:
    """What the derivative of an operation is computed from."""
    operands = [None if _is_literal(a) else nodes.get(a) for a in equation.invars]
    result = nodes[equation.outvars[0]]
    if name in _RESULT:
        return [result]
    if name in _OPERAND:
        return [node for node in operands if node is not None]
    if name in _OTHERS:
        kept = [
            node
            for i, node in enumerate(operands)
            if node is not None
            and any(
                o is not None and o.is_active for o in operands[:i] + operands[i + 1 :]
            )
        ]
        divisor = operands[-1] if name == "div" else None
        if divisor is not None and not divisor.is_active:
            return [divisor]  # the numerator is not needed
        return kept
    if name in _CHOICES:
        made_of = [o for o in operands if o is not None]
        return [_Node(count(equation.outvars[0].aval.shape), made_of)]
    if name == "select_n" and operands[0] is not None:
        return [operands[0]]
    return []


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _is_float(aval: Any) -> bool:
    return issubdtype(aval.dtype, inexact)


def _bytes(aval: Any) -> int:
    return count(aval.shape) * aval.dtype.itemsize


_KEEPERS = _RESULT | _OPERAND | _OTHERS | _CHOICES | {"select_n"} | HOLDERS


def may_keep(equation: Any) -> bool:
    """Whether autodiff may keep something for an equation."""
    return equation.primitive.name in _KEEPERS
