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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jaxtyping import PyTree

from .._typing import AnyArray, Aval
from .equations import aval_of, avals, constants_as_inputs, count, equations, is_inexact
from .islands import is_cheap
from .primitives import properties
from .residuals import kept_bytes
from .totals import evaluate_with_totals

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
