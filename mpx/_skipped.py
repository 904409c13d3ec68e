"""Whether a step was skipped by a transformation inside of another one."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._optimizer import SkipNonfiniteState
from ._typing import BoolScalar


def was_skipped(before: PyTree, after: PyTree) -> BoolScalar | None:
    """Whether a `skip_nonfinite` inside of a transformation has skipped a step.

    Args:
        before: The state before the step.
        after: The state after it.

    Returns:
        A boolean; None if there is none inside.
    """
    records = [
        [s.record.skipped for s in jax.tree.leaves(state, is_leaf=_skips) if _skips(s)]
        for state in (before, after)
    ]
    flags = [old != new for old, new in zip(*records, strict=True)]
    return functools.reduce(jnp.logical_and, flags) if flags else None


def _skips(node: object) -> bool:
    return isinstance(node, SkipNonfiniteState)
