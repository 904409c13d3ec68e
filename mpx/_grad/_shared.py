"""Weights that all devices of a `shard_map` share: their gradients are summed in full.

With `check_vma` JAX knows on which mesh axes a value differs from device to device. A
weight that all devices share is made *varying* where it meets their data, and the
transpose of that is the sum of its gradients over the devices. In the explicit style
the weight has been cast by then, so that the sum would be in half precision, and of
scaled gradients: eight good ones of 1 at a scale of 2^14 would be infinite.

So the weight is made varying before the cast, and the sum stands behind the cast back.
That is the same function as long as its results differ between devices on the same axes
as before. Where they would not (a penalty of the weights alone, added to a loss that
all devices share), the casts stand at each use instead, as with `accumulate_dtype`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from .._cast import cast_leaf
from .._dtypes import full_precision_of, is_half
from .._jax_compat import as_varying, manual_axes, varied_axes, varying_axes
from .._program import NoFlow, walk
from .._typing import AnyArray


def axes_of_half_sums(
    loss: Callable[..., PyTree], weights: PyTree, tokens: object
) -> tuple[frozenset[str], list[frozenset[str]]]:
    """The mesh axes over which gradients of a loss would be summed in half precision.

    Args:
        loss: `loss(weights, tokens)` gives `(scaled, (loss, aux))`.
        weights: The weights, in half precision.
        tokens: The scales of recipes.

    Returns:
        The axes, and on which axes each result of the loss varies.
    """
    axes, found = set(manual_axes()), []
    if not any(axes - varying_axes(leaf) for leaf in jax.tree.leaves(weights)):
        return frozenset(), found

    def watched(weights: object, tokens: object) -> PyTree:
        results = loss(weights, tokens)
        found[:] = axes_of_results(results)
        return [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

    closed = jax.make_jaxpr(watched)(weights, tokens)
    visits = walk(closed, [None] * len(closed.jaxpr.invars), NoFlow())
    summed = [
        varied_axes(visit.equation)
        for visit in visits
        if any(_is_half(variable.aval) for variable in visit.equation.invars)
    ]
    return frozenset().union(*summed), found


def axes_of_results(results: PyTree) -> list[frozenset[str]]:
    """On which axes each array among the results of a loss varies."""
    leaves = jax.tree.leaves(results)
    return [varying_axes(x) for x in leaves if isinstance(x, jax.Array)]


def spread(weights: PyTree, cast: PyTree, axes: frozenset[str]) -> PyTree:
    """Casts weights that all devices share after making them varying."""

    def one(weight: AnyArray, cast: AnyArray) -> AnyArray:
        return (
            cast_leaf(as_varying(weight, axes), cast.dtype) if _is_half(cast) else cast
        )

    return jax.tree.map(one, weights, cast)


def summed(grads: PyTree, cast: PyTree, axes: frozenset[str]) -> PyTree:
    """The sums over devices of the gradients of weights that were spread."""

    def one(grad: AnyArray, cast: object) -> AnyArray:
        rest = axes - varying_axes(cast)
        if not rest or not _is_half(cast):
            return grad
        wide = cast_leaf(grad, full_precision_of(grad.dtype))
        return jax.lax.psum(wide, tuple(sorted(rest)))

    return jax.tree.map(one, grads, cast)


def _is_half(x: Any) -> bool:
    """Whether an array, or what stands for one in a program, is half precision."""
    return hasattr(x, "dtype") and is_half(x.dtype)
