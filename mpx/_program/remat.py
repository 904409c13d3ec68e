"""A program whose backward pass computes it again, instead of keeping its values.

The compiler must not find out: XLA merges what is computed twice. There are three ways
to hold it back, and each is the best one somewhere, by memory and traffic of what is
compiled for an H100:

* The barrier of `jax.checkpoint`, in front of the backward pass: for norms and what is
  elementwise.
* For softmax, a factor of 1 that the compiler cannot see through. Its values stand
  between products. A barrier would make XLA write down what it cuts out of a product
  that it has padded, and keep the cut from the one kernel that softmax's derivative is.
* In a loop nothing: there is nothing to merge between its passes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jaxtyping import PyTree

from .._typing import AnyArray, Aval
from .equations import aval_of, avals, constants_as_inputs, count, equations
from .islands import is_cheap
from .primitives import properties
from .residuals import kept_bytes

# The sums that a norm takes are of at least so many numbers.
_FEW = 16
# What a norm makes of its sums, and what the derivative does: means, roots, slopes.
_OF_SUMS = frozenset("div rsqrt sqrt".split())
_SOFTMAX = frozenset(("reduce_max", "exp"))


# What recomputing saves of the bytes that autodiff would keep must be worth its while:
# a quarter of them.
_WORTH = 0.75
# A norm has thirty operations. What has more than this is a computation of its own
# right, which would take as long again.
_MANY = 300


def is_worth_while(jaxpr: Jaxpr, are_free: tuple[bool, ...]) -> bool:
    """Whether recomputing a program saves memory and costs little.

    Args:
        jaxpr: The program.
        are_free: For each input whether it is there anyway: a weight, a constant.
    """
    kept, needed = kept_bytes(jaxpr, are_free)
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
    closed: ClosedJaxpr, *, is_in_loop: bool = False
) -> Callable[..., PyTree]:
    """A program as a function that is computed again in the backward pass.

    Args:
        closed: The program.
        is_in_loop: Whether it stands in the body of a loop. There only sums are kept:
            with means, too, a scanned GPT's step moves 0.7% more bytes.

    Returns:
        A function of the program's inputs.
    """
    plain = jaxpr_as_fun(closed)
    if is_in_loop:
        return jax.checkpoint(plain, prevent_cse=False, policy=_Kept(frozenset()))
    names = {equation.primitive.name for equation in operations(closed.jaxpr)}
    if names >= _SOFTMAX and all(map(_is_inexact, closed.out_avals)):
        return _from_inputs(plain, tuple(map(_is_inexact, closed.in_avals)))
    return jax.checkpoint(plain, policy=_Kept(_sums(closed.jaxpr)))


def operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The operations of a program, those of programs within it, too."""
    for equation in equations(jaxpr):
        if not properties(equation.primitive.name).joins_regions:
            yield equation


def _is_inexact(aval: Aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _from_inputs(
    plain: Callable[..., PyTree], are_inexact: tuple[bool, ...]
) -> Callable[..., PyTree]:
    """A function whose derivative keeps what goes in, and nothing else."""

    def tangents(xs: list[Any], dots: list[Any]) -> PyTree:
        """Those of the results, from those of the inputs that have any."""
        pairs = zip(xs, are_inexact, strict=True)
        xs = [x * _one(x.dtype) if is_in else x for x, is_in in pairs]

        def of_inexact(*inexact: object) -> PyTree:
            given = iter(inexact)
            pairs = zip(xs, are_inexact, strict=True)
            return plain(*(next(given) if is_in else x for x, is_in in pairs))

        return jax.jvp(of_inexact, inexact_of(xs), dots)[1]

    def inexact_of(arrays: Any) -> list[Any]:
        return [x for x, is_in in zip(arrays, are_inexact, strict=True) if is_in]

    again = jax.checkpoint(tangents, prevent_cse=False)

    @jax.custom_jvp
    def function(*xs: object) -> PyTree:
        return plain(*xs)

    @function.defjvp
    def rule(xs: tuple[Any, ...], dots: tuple[Any, ...]) -> tuple[Any, Any]:
        return plain(*xs), again(list(xs), inexact_of(dots))

    return function


def _one(dtype: Any) -> AnyArray:
    """A number that the compiler does not know."""
    return jax.lax.optimization_barrier(jnp.ones((), dtype))


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

    def __call__(self, primitive: Any, *operands: Aval, **params: object) -> bool:
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


def _is_of_many(operand: Any, params: dict[str, Any]) -> bool:
    """Whether each number that a reduction gives is made of many."""
    return count(operand.shape[axis] for axis in params["axes"]) >= _FEW
