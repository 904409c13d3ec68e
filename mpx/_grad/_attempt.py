"""A try at a step: differentiate, check, unscale; and again where it overflowed.

The check comes before the gradients, also for the compiler. Left free to mix the
optimizer into the backward pass, XLA keeps activations for longer: 10% more memory for
a Vision Transformer's step on an H100. So the scale that gradients are divided by
depends on the check (`_known_after`), and nothing can use a gradient before. Every
gradient is read for the check, before the optimizer reads it again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._cast import cast_leaf
from .._dtypes import dtype_of_gradient, full_precision_of
from .._jax_compat import manual_axes, stack, varying_axes
from .._loss_scaling import AbstractLossScaling, NoLossScaling, StaticLossScaling
from .._recipe_state import SlotName
from .._tree import Filled, finite_by_leaf
from .._typing import BoolScalar, LossScalar
from ._accumulate import Accumulation, accumulated
from ._devices import ON_ITS_OWN, accumulated_on_devices
from ._engine import Problem, as_weights, scaled_value_and_grad


class Outcome(NamedTuple):
    """What a try gave.

    Attributes:
        loss: The unscaled loss, float32 at least.
        aux: What the function returned beside it.
        grads: The unscaled gradients, one tree for each differentiated argument.
        flags: Whether the loss, each gradient, and all else that may be looked at
            later is finite; None if nobody asks.
        amaxes: The amaxes that the recipes in the function saw, by slot.
    """

    loss: LossScalar
    aux: PyTree
    grads: tuple[PyTree, ...]
    flags: Bool[Array, " n"] | None
    amaxes: dict[SlotName, Array]


def attempt(
    problem: Problem,
    how: Accumulation,
    scaling: AbstractLossScaling,
    args: PyTree,
    kwargs: PyTree,
) -> Outcome:
    """Runs a step with a scaling, over micro-batches if there are any."""
    if how.axes or how.steps > 1:
        inner = problem
        if how.axes:
            inner = dataclasses.replace(problem, wire=ON_ITS_OWN)

        def one(scaling: AbstractLossScaling, part: PyTree, kwargs: PyTree) -> PyTree:
            found = scaled_value_and_grad(inner, scaling, part, kwargs)
            grads = scaling.unscale(as_weights(inner, found.grads, args))
            return found.loss, found.aux, grads, found.amaxes

        if how.axes:
            found = accumulated_on_devices(how, one, problem, scaling, args, kwargs)
        else:
            run = functools.partial(one, scaling)
            found = accumulated(how, run, problem, args, kwargs)
        loss, aux, grads, amaxes = found
        if not scaling._is_stateful:
            return Outcome(loss, aux, grads, None, amaxes)
        flags = finite_flags(NoLossScaling(), loss, grads)
        return Outcome(loss, aux, grads, flags, amaxes)
    found = scaled_value_and_grad(problem, scaling, args, kwargs)
    grads = as_weights(problem, found.grads, args)
    if not scaling._is_stateful:
        unscaled = _returned(problem, scaling.unscale(grads))
        return Outcome(found.loss, found.aux, unscaled, None, found.amaxes)
    flags = finite_flags(scaling, found.loss, found.grads)
    unscaled = _returned(problem, _known_after(flags, scaling).unscale(grads))
    return Outcome(found.loss, found.aux, unscaled, flags, found.amaxes)


def _returned(problem: Problem, grads: PyTree) -> PyTree:
    """Gradients in the dtype that the policy says."""
    asked = problem.grad_dtype
    if asked is None:
        return grads
    return jax.tree.map(lambda g: g.astype(dtype_of_gradient(g.dtype, asked)), grads)


def retried(
    attempt: Callable[[AbstractLossScaling], Outcome],
    scaling: AbstractLossScaling,
    outcome: Outcome,
    retries: int,
) -> tuple[AbstractLossScaling, Outcome]:
    """Tries a step again at smaller scales while it is not finite.

    A loss that is not finite is so at every scale.

    Returns:
        The scaling of the last try, and its outcome.
    """

    def is_bad(outcome: Any) -> Array:
        # The first flag is that of the loss.
        return ~jnp.all(outcome.flags) & outcome.flags[0]

    def again(scaling: AbstractLossScaling) -> PyTree:
        lower = scaling._backed_off()
        return lower, attempt(lower)

    return tried_again(again, is_bad, scaling, outcome, retries)


def tried_again(
    again: Callable[[Any], PyTree],
    is_bad: Callable[[Any], Array],
    state: PyTree,
    result: PyTree,
    times: int,
) -> PyTree:
    """A state and a result, tried again while the result is bad.

    Args:
        again: `again(state)` gives the next of both.
        is_bad: Whether a result is.
        state: That of the first try.
        result: That of the first try.
        times: How many more there may be.
    """
    # A loop carries arrays only; the rest of aux is the same at every scale.
    arrays, static = eqx.partition(result, eqx.is_array)

    def goes_on(carry: PyTree) -> Array:
        _, arrays, tries = carry
        return is_bad(arrays) & (tries < times)

    def body(carry: PyTree) -> PyTree:
        state, result = again(carry[0])
        return state, eqx.filter(result, eqx.is_array), carry[2] + 1

    start = (state, arrays, jnp.zeros((), jnp.int32))
    state, arrays, _ = jax.lax.while_loop(goes_on, body, start)
    return state, eqx.combine(arrays, static)


def _known_after(
    flags: Bool[Array, " n"], scaling: AbstractLossScaling
) -> StaticLossScaling:
    """The same scale, to unscale with, as a value that depends on the flags.

    The maximum is 1 whatever the flags are, which XLA does not find out. A barrier
    would do the same and cost memory: 7 % more for the paper's ViT, 12 blocks, compiled
    for an H100 (jax 0.10.2, November 2026; `python -m benchmarks residuals` has it).
    """
    one = jax.lax.max(jnp.all(flags).astype(jnp.float32), np.float32(1))
    return StaticLossScaling(scaling.loss_scale * one)


# --- Whether a try is finite ----------------------------------------------------------


def finite_flags(
    scaling: AbstractLossScaling, loss: LossScalar, grads: PyTree
) -> Bool[Array, " n"]:
    r"""Whether the loss, and each gradient once it is divided by the scale, is finite.

    $$|g| \le m \cdot \min(s, 1)$$

    with the largest number $m$ of its dtype: dividing by a scale below 1 can make a
    finite gradient overflow. Nothing is divided for it, which is one product less for
    each gradient to trace and to lower.

    Gradients in float16 need only be finite, being below 2^16. For them no step counts
    as finite at a scale below 2^-111.

    Args:
        scaling: The loss scaling that gradients are still scaled by.
        loss: The unscaled loss.
        grads: The gradients.

    Returns:
        One flag for the loss, one for each gradient, one for the rest: in this order
        bad places are named. All devices agree on them.
    """
    leaves = jax.tree.leaves(grads)
    if scaling._is_one:
        is_finite, *flags = finite_by_leaf((loss, leaves))
        rest = jnp.asarray(True)
    else:
        # Below 1 a little smaller, because 1 / s is rounded.
        scale = scaling.loss_scale
        reach = jax.lax.select(scale < 1, scale * (1 - 2.0**-20), jnp.ones_like(scale))
        limits = Filled(lambda dtype: reach.astype(dtype) * jnp.finfo(dtype).max)
        (is_finite,) = finite_by_leaf(loss)
        rest = jnp.asarray(True)
        if any(grad.dtype == np.float16 for grad in leaves):
            rest = scale >= 2.0**-111
        flags = [_is_within(grad, limits) for grad in leaves]
    return _agreed(stack([is_finite, *flags, rest]))


def _is_within(grad: Array, limits: Filled) -> BoolScalar:
    if grad.dtype == np.float16:
        return finite_by_leaf(grad)[0]
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        return _is_within(grad.real, limits) & _is_within(grad.imag, limits)
    wide = cast_leaf(grad, full_precision_of(grad.dtype))
    flags = jax.lax.le(jax.lax.abs(wide), limits.like(wide))
    return jax.lax.reduce_and(flags, axes=tuple(range(grad.ndim)))


def _agreed(flags: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """The flags, agreed on by all devices."""
    axes = manual_axes()
    if axes and varying_axes(jax.lax.axis_index(axes[0])):
        # `check_vma=True`: where flags do not vary, devices agree, and JAX 0.12 takes
        # only axes of one kind.
        axes = tuple(axis for axis in axes if axis in varying_axes(flags))
    if not axes:
        return flags
    return jax.lax.pmin(flags.astype(jnp.int32), axes).astype(bool)
