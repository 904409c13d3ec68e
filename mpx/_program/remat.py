"""A program whose backward pass computes it again, instead of keeping its values.

A program whose reductions are sums (a norm, an RMS) keeps them, and is held apart from
its first computation by the barrier of `jax.checkpoint`, unless it sums over a batch.
Every other one (softmax with its maximum, gelu, gates) keeps only what goes in, and
sums over wide rows (`totals`), and is held apart by a factor of 1 that the compiler
cannot see through, which cuts nothing.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    jaxpr_as_fun,
)
from jaxtyping import PyTree

from .._base.dtypes import HALF
from .._base.jax_compat import bind_equation, equation_context
from .._base.typing import AnyArray, Aval
from .equations import (
    aval_of,
    avals,
    constants_as_inputs,
    count,
    equations,
    is_inexact,
    run_by,
)
from .flow import Flow, propagate
from .islands import is_cheap, reachable
from .primitives import Saves, properties

# ----------------------------------------------------------------------------
# Sums over wide rows, which a second computation of a program is given.
#
# The sum of a softmax over a vocabulary is a number for each row, and the derivative
# reads it. Computed again it is one more reader of the exponentials, and XLA writes
# what several read where reading is cheap and computing is not: the cross entropy of a
# Llama on a B200 wrote 1 GB of exponentials in float32 and moved 3.7 GB in place of 2.1
# (jax 0.10.2, compiled for sm_100, November 2026).

# Of the softmax of attention the compiler makes one kernel, with its derivative. A row
# of this many numbers is none.
_WIDE = 4096


def _is_total(equation: JaxprEqn) -> bool:
    """Whether an equation is a sum over wide rows."""
    if equation.primitive.name != "reduce_sum":
        return False
    shape = aval_of(equation.invars[0]).shape
    return count(shape[axis] for axis in equation.params["axes"]) >= _WIDE


def evaluate_with_totals(
    closed: ClosedJaxpr, xs: Sequence[AnyArray], given: Sequence[AnyArray] = ()
) -> tuple[list[Any], list[Any]]:
    """The results of a program, and its sums over wide rows.

    Args:
        closed: The program.
        xs: Its inputs.
        given: These sums, if they are known. The derivative is that of the sum all the
            same.
    """
    totals = [e.outvars[0] for e in closed.jaxpr.eqns if _is_total(e)]
    known = dict(zip(totals, given, strict=True)) if given else {}

    def bind(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        with equation_context(equation):
            if equation.outvars and equation.outvars[0] in known:
                total = known[equation.outvars[0]]
                return [_sum_known_as(equation, operands[0], total)]
            return bind_equation(equation, *operands)

    read = run_by(bind, closed, xs)
    return list(map(read, closed.jaxpr.outvars)), list(map(read, totals))


def _sum_known_as(equation: JaxprEqn, x: AnyArray, known: AnyArray) -> AnyArray:
    """What a sum is known to be, with the derivative of the sum."""

    @jax.custom_jvp
    def total(x: AnyArray, known: AnyArray) -> AnyArray:
        return known

    @total.defjvp
    def _(
        primals: tuple[AnyArray, AnyArray], tangents: tuple[AnyArray, AnyArray]
    ) -> tuple[AnyArray, AnyArray]:
        # Nothing is added for what is known: it moves as the sum does.
        (dot,) = bind_equation(equation, tangents[0])
        return total(*primals), dot

    return total(x, known)


# ----------------------------------------------------------------------------
# What autodiff keeps of an island, and what recomputing it needs.
#
# Autodiff keeps for the backward pass what derivatives are multiplied with: both
# factors of a product, what exp gave, what a sine was taken of. Which values those are
# is known from the primitives, so it is counted here without differentiating, which
# would take as long as everything else. The count is no exact one: JAX keeps a cube's
# slope and not the number, and a function with a derivative rule of its own keeps what
# it likes. `measured_bytes` differentiates.


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


# ----------------------------------------------------------------------------

# The dtype in which each input is kept; None for its own.
Stored = Sequence[np.dtype | None]

# The sums that a norm takes are of at least so many numbers.
_FEW = 16
# What a norm makes of its sums, and what the derivative does: means, roots, slopes.
_OF_SUMS = frozenset("div rsqrt sqrt".split())
_SOFTMAX = frozenset(("reduce_max", "exp"))
# What recomputing saves of the bytes that autodiff would keep must be worth its while:
# a quarter of them.
_WORTH = 0.75
# A norm has thirty operations. What has more than this is computed in many kernels.
_LONG = 50
# What has more than this is a computation of its own right, which would take as long
# again.
_MANY = 300


def is_worth_while(
    jaxpr: Jaxpr, are_free: tuple[bool, ...], stored: Stored = ()
) -> bool:
    """Whether recomputing a program saves memory and costs little.

    Args:
        jaxpr: The program.
        are_free: For each input whether it is there anyway: a weight, a constant.
        stored: See `computed_again`.
    """
    kept, needed = kept_bytes(jaxpr, are_free, stored)
    is_small = sum(1 for _ in operations(jaxpr)) <= _MANY
    return kept > 0 and needed <= _WORTH * kept and is_small


def recomputed_if_cheap(
    closed: ClosedJaxpr, are_free: tuple[bool, ...]
) -> Callable[..., PyTree]:
    """A program as a function that is recomputed if it could be an island.

    Args:
        closed: The program.
        are_free: For each input whether it is there anyway: a weight, a constant.

    Returns:
        A function of the program's inputs.
    """
    are_cheap = all(is_cheap(e, with_lookups=True) for e in closed.jaxpr.eqns)
    if not are_cheap or not is_worth_while(closed.jaxpr, are_free):
        return jaxpr_as_fun(closed)
    # What the program closes over may be differentiated, too: it goes in.
    closed, constants = constants_as_inputs(closed)
    return functools.partial(computed_again(closed), *constants)


def computed_again(
    closed: ClosedJaxpr,
    *,
    is_in_loop: bool = False,
    stored: Stored = (),
    unread: int = 0,
) -> Callable[..., PyTree]:
    """A program as a function that is computed again in the backward pass.

    The compiler must not find out: XLA merges what is computed twice.

    Args:
        closed: The program.
        is_in_loop: Whether it stands in the body of a loop. There is nothing to merge:
            the backward pass is a loop of its own. And only sums are kept: with means,
            too, a scanned GPT's step moves 0.7% more bytes.
        stored: For each input the half precision in which it is kept for the backward
            pass, or None. The value itself is computed from the input as it is.
        unread: How many of the last inputs are there for their gradients only.

    Returns:
        A function of the program's inputs.
    """
    plain = jaxpr_as_fun(closed)
    sums = _sums(closed.jaxpr)
    is_softmax = _SOFTMAX <= {e.primitive.name for e in operations(closed.jaxpr)}
    if is_in_loop and (sums or not any(stored)):
        return jax.checkpoint(plain, prevent_cse=False, policy=_Kept(frozenset()))
    if sums and not is_softmax:
        is_apart = not _are_of_a_batch(closed.jaxpr)
        cuts: bool | tuple[bool, ...] = is_apart
        if unread:  # what goes into a barrier is written, read or not
            count = len(closed.in_avals) - unread
            cuts = (is_apart,) * count + (False,) * unread
        return jax.checkpoint(plain, policy=_Kept(sums), prevent_cse=cuts)
    if is_in_loop:
        return _from_inputs(closed, stored, _Apart.NOT)
    is_long = sum(1 for _ in operations(closed.jaxpr)) > _LONG
    apart = _Apart.BY_GRADIENTS if is_long else _Apart.BY_NUMBER
    # Exponentials of what is kept rounded do not add up to the sum of the others.
    with_totals = is_softmax and not any(stored)
    return _from_inputs(closed, stored, apart, with_totals=with_totals)


def operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The operations of a program, those of programs within it, too."""
    for equation in equations(jaxpr):
        if not properties(equation.primitive.name).joins_regions:
            yield equation


class _Apart(enum.Enum):
    """What holds a second computation apart from the first one.

    XLA (jaxlib 0.10.2, 2026-11) writes down what goes into a barrier and merges no
    kernel across it, so behind one each gate that is cut out of a product would be
    written, and softmax would be two kernels with its derivative. So it is a factor of
    1 that goes through the barrier, and not what it is multiplied with.
    """

    NOT = "nothing"
    BY_NUMBER = "the factor"
    BY_GRADIENTS = "the factor, and it waits for the gradients of the results"
    """Else what is computed in many kernels is computed for all layers before the first
    of them needs it: the associative scan of a gated state space model for an H100
    takes 1.44 times the temporaries of a naive cast, and 1.05 times so (`benchmarks
    workloads`). The gradients of a softmax, which are a product, would be written once
    more: 2% of the traffic of a ViT with 197 tokens."""


def _from_inputs(
    closed: ClosedJaxpr, stored: Stored, apart: _Apart, *, with_totals: bool = False
) -> Callable[..., PyTree]:
    """A program as a function whose derivative keeps what goes in, and wide sums."""
    plain = jaxpr_as_fun(closed)

    def evaluate(
        xs: Sequence[AnyArray], totals: Sequence[AnyArray] = ()
    ) -> tuple[list[AnyArray], list[AnyArray]]:
        if with_totals:
            return evaluate_with_totals(closed, xs, totals)
        return plain(*xs), []

    are_inexact = tuple(map(is_inexact, closed.in_avals))
    exact = [None if is_inexact(aval) else aval for aval in closed.out_avals]

    def inexact_of(arrays: Sequence[AnyArray]) -> list[AnyArray]:
        return [x for x, is_in in zip(arrays, are_inexact, strict=True) if is_in]

    def tangents(
        ones: list[AnyArray],
        xs: list[AnyArray],
        totals: list[AnyArray],
        dots: list[AnyArray],
    ) -> list[AnyArray]:
        """Those of the inexact results, from those of the inexact inputs."""

        def of_inexact(*inexact: AnyArray) -> list[AnyArray]:
            given = iter(inexact)
            pairs = zip(xs, are_inexact, strict=True)
            every = [next(given) if is_in else x for x, is_in in pairs]
            results, _ = evaluate(every, totals)
            return [x for x, aval in zip(results, exact, strict=True) if aval is None]

        opaque = inexact_of(xs)
        if apart is _Apart.BY_NUMBER:
            ones = jax.lax.optimization_barrier(ones)
        if apart is not _Apart.NOT:
            opaque = [x * one for x, one in zip(opaque, ones, strict=True)]
        opaque = [x.astype(dot.dtype) for x, dot in zip(opaque, dots, strict=True)]
        return jax.jvp(of_inexact, opaque, dots)[1]

    # Nothing is kept of what the derivative computes.
    cuts = (True, False, False, False) if apart is _Apart.BY_GRADIENTS else False
    again = jax.checkpoint(tangents, prevent_cse=cuts)

    @jax.custom_jvp
    def function(*xs: object) -> PyTree:
        return plain(*xs)

    @function.defjvp
    def rule(
        xs: tuple[AnyArray, ...], dots: tuple[AnyArray, ...]
    ) -> tuple[PyTree, PyTree]:
        pairs = itertools.zip_longest(xs, stored)
        kept = [x if dtype is None else x.astype(dtype) for x, dtype in pairs]
        ones = [np.ones((), x.dtype) for x in inexact_of(kept)]
        results, totals = evaluate(xs)
        made = iter(again(ones, kept, totals, inexact_of(dots)))
        of_all = [
            next(made) if aval is None else np.zeros(aval.shape, jax.dtypes.float0)
            for aval in exact
        ]
        return results, of_all

    return function


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A policy of `jax.checkpoint`: what is small and expensive is kept.

    That is sums, and means and roots of them. From sums alone a norm's derivative is a
    hundred operations, which XLA tries to fuse in every way: a GPT's step takes a fifth
    longer to compile.

    Not a maximum, which softmax finds on its way: XLA makes one kernel of softmax and
    its derivative, and two of one that comes with a maximum.

    Attributes:
        sums: How many numbers the program's sums have.
    """

    sums: frozenset[int]

    def __call__(self, primitive: Primitive, *operands: Aval, **params: object) -> bool:
        """Whether the result of an operation is kept."""
        if primitive.name == "reduce_sum":
            return _is_of_many(operands[0], params)
        if primitive.name not in _OF_SUMS:
            return False
        return max(count(operand.shape) for operand in operands) in self.sums


def _sums(jaxpr: Jaxpr) -> frozenset[int]:
    """How many numbers the sums of a program have."""
    sums = (e for e in operations(jaxpr) if e.primitive.name == "reduce_sum")
    of_many = (e for e in sums if _is_of_many(aval_of(e.invars[0]), e.params))
    return frozenset(count(avals(e.outvars)[0].shape) for e in of_many)


def _are_of_a_batch(jaxpr: Jaxpr) -> bool:
    """Whether a program sums over the first axis, and keeps a later one.

    XLA (jaxlib 0.10.2, 2026-11) reads an array several times for a batch norm and its
    derivative. What comes to it behind a barrier is written in float32 first: compiled
    for an H100 the step of a ResNet moves 4 to 14 % more bytes (`benchmarks workloads`,
    ResNet).
    """
    sums = (e for e in operations(jaxpr) if e.primitive.name == "reduce_sum")
    of_first = (e for e in sums if 0 in e.params["axes"])
    return any(
        len(e.params["axes"]) < aval_of(e.invars[0]).ndim
        and _is_of_many(aval_of(e.invars[0]), e.params)
        for e in of_first
    )


def _is_of_many(operand: Aval, params: dict[str, Any]) -> bool:
    """Whether each number that a reduction gives is made of many."""
    return count(operand.shape[axis] for axis in params["axes"]) >= _FEW
