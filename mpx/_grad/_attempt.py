"""A try at a step: differentiate, check, unscale; and again where it overflowed.

The check comes before the gradients, also for the compiler. Left free to mix the
optimizer into the backward pass, XLA keeps activations for longer: 10% more memory for
a Vision Transformer's step on an H100. So the scale that gradients are divided by
becomes known together with the check (`_held_back`), and nothing can use a gradient
before. The check itself looks at gradients that were divided by the same scale, because
a scale below 1 can make a finite gradient overflow.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .._jax_compat import manual_axes
from .._loss_scaling import AbstractLossScaling, NoLossScaling, StaticLossScaling
from .._tree import finite_by_leaf
from .._typing import FloatScalar
from ._accumulate import Accumulation, accumulated
from ._engine import Problem, scaled_value_and_grad


class Outcome(NamedTuple):
    """What a try gave.

    Attributes:
        loss: The unscaled loss, float32 at least.
        aux: What the function returned beside it.
        grads: The unscaled gradients, one tree for each differentiated argument.
        flags: Whether the loss and each gradient is finite; None if nobody asks.
    """

    loss: FloatScalar
    aux: Any
    grads: tuple[PyTree, ...]
    flags: Bool[Array, " n"] | None


def attempt(
    problem: Problem,
    how: Accumulation,
    scaling: AbstractLossScaling,
    args: Any,
    kwargs: Any,
) -> Outcome:
    """Runs a step with a scaling, over micro-batches if there are any."""
    if how.steps > 1:

        def one(args: Any, kwargs: Any) -> Any:
            _, loss, aux, grads = scaled_value_and_grad(problem, scaling, args, kwargs)
            return loss, aux, scaling.unscale(grads)

        loss, aux, grads = accumulated(how, one, problem.argnums, args, kwargs)
        flags = _finite_flags(loss, grads) if scaling._is_stateful else None
        return Outcome(loss, aux, grads, flags)
    _, loss, aux, grads = scaled_value_and_grad(problem, scaling, args, kwargs)
    if not scaling._is_stateful:
        return Outcome(loss, aux, scaling.unscale(grads), None)
    flags = _finite_flags(loss, scaling.unscale(grads))
    scaling, flags = _held_back(scaling, flags)
    return Outcome(loss, aux, scaling.unscale(grads), flags)


def retried(
    attempt: Callable[[AbstractLossScaling], Outcome],
    scaling: AbstractLossScaling,
    outcome: Outcome,
    retries: int,
) -> tuple[AbstractLossScaling, Outcome]:
    """Tries a step again at smaller scales while it is not finite.

    Returns:
        The scaling of the last try, and its outcome.
    """
    arrays, static = eqx.partition(outcome, eqx.is_array)

    def is_bad(state: Any) -> Any:
        _, arrays, tries = state
        return ~jnp.all(arrays.flags) & (tries < retries)

    def again(state: Any) -> Any:
        scaling, _, tries = state
        lower = scaling._backed_off()
        return lower, eqx.filter(attempt(lower), eqx.is_array), tries + 1

    start = (scaling, arrays, jnp.zeros((), jnp.int32))
    scaling, arrays, _ = jax.lax.while_loop(is_bad, again, start)
    return scaling, eqx.combine(arrays, static)


def _finite_flags(loss: FloatScalar, grads: PyTree) -> Bool[Array, " n"]:
    """Whether the loss and each gradient is finite, agreed on by all devices."""
    flags = jnp.stack(finite_by_leaf((loss, grads)))
    axes = manual_axes()
    if not axes:
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axes).astype(bool)


def _held_back(
    scaling: AbstractLossScaling, flags: Bool[Array, " n"]
) -> tuple[AbstractLossScaling, Bool[Array, " n"]]:
    """The same scaling, to unscale with, known to the compiler only with the flags."""
    if isinstance(scaling, NoLossScaling):
        # A scale of one: that of `NoLossScaling` is no value that could be held back.
        scaling = StaticLossScaling(1.0)
    arrays, static = eqx.partition(scaling, eqx.is_array)
    arrays, flags = jax.lax.optimization_barrier((arrays, flags))
    return eqx.combine(arrays, static), flags
