"""What is proved of the arrays of an optimizer's state, from its program.

An array is *never negative* if it starts so, and each update leaves it so: what an
update gives is bounded, given that all arrays of the state are within their bounds
before it (`_intervals`). The bounds that are tried are 0 to 1, 0 and more, and all
numbers, the narrowest that `init` allows first; what does not hold is given up, until
the rest holds together.

An array *accumulates* if each update keeps most of it and adds to that: the squares of
Adagrad, an average whose factor is near 1. What is added is much less than the distance
of two codes in 8 bits, so what is stored would mostly be noise of the rounding. So it
gets 16 bits.

An array that starts as the weights is a *copy*, and no moment: a master, the slow
weights of an average. A step changes it by less than few bits can say.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._jax_compat import open_jaxpr
from .._program import propagate
from ._intervals import Bounds, Intervals

_UNIT, _POSITIVE, _ANY = Bounds(0.0, 1.0), Bounds(0.0), Bounds()
# Adam's 0.999 is an average that 8 bits follow, AdEMAMix' 0.9999 is not: their noise is
# in docs/guides/state.md.
_MOST = 0.9995


class Kind(NamedTuple):
    """What is known of an array of a state.

    Attributes:
        signed: Whether it may become negative.
        accumulates: Whether each update keeps `_MOST` of it, or more.
        is_copy: Whether it starts as the weights, or is made of them.
    """

    signed: bool = True
    accumulates: bool = True
    is_copy: bool = False


def kinds_of(
    init: Callable[[PyTree], PyTree],
    update: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    state: PyTree,
) -> PyTree:
    """The kinds of the leaves of a state, as a tree like it.

    Args:
        init: Makes a state of weights.
        update: Makes the state after a step, from the weights (and gradients like
            them) and the state before.
        params: The weights.
        state: A state.
    """
    count, weights = len(jax.tree.leaves(state)), len(jax.tree.leaves(params))
    made = jax.make_jaxpr(init)(params)
    starts = _results(made, [Bounds(is_copy=True)] * weights)
    program = jax.make_jaxpr(update)(params, state)
    if len(starts) != count or len(program.jaxpr.outvars) != count:
        return jax.tree.map(
            lambda _: Kind(), state
        )  # it changes its form; `update` says so
    allowed = [[b for b in (_UNIT, _POSITIVE, _ANY) if s.within(b)] for s in starts]
    while True:
        before = [
            bounds[0]._replace(origin=number) for number, bounds in enumerate(allowed)
        ]
        after = _results(program, [_ANY] * weights + before)
        broken = [
            number
            for number, (old, new) in enumerate(zip(before, after, strict=True))
            if not new.within(old)
        ]
        if not broken:
            kinds = [
                Kind(old.low < 0, _accumulates(old, new), start.is_copy)
                for old, new, start in zip(before, after, starts, strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(state), kinds)
        for number in broken:
            allowed[number].pop(0)


def _accumulates(old: Bounds, new: Bounds) -> bool:
    return new.origin == old.origin and new.factor >= _MOST


def _results(program: ClosedJaxpr, inputs: Sequence[Bounds]) -> list[Bounds]:
    return propagate(open_jaxpr(program), program.consts, inputs, Intervals())
