"""The functions that are compared: plain, cast naively, and in each precision of mpx.

Each takes a program and gives `step(state, params, batch) -> (state, Result)`. The
state is what mpx threads through steps (a loss scale, histories of amaxes); the others
have none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx

from .record import Built

SCALE = 2.0**15
"""Where the search for a loss scale begins: `mpx.DynamicLossScaling`'s default."""

RECIPES: dict[str, Callable[[], Any]] = {
    "current": mpx.Float8CurrentScaling,
    "delayed": mpx.DelayedScaling,
    "mxfp8": mpx.MXFP8BlockScaling,
    "nvfp4": mpx.NVFP4BlockScaling,
}
QUANTIZERS: dict[str, mpx.quantization.Quantizer] = {
    "current": mpx.quantization.TensorQuantizer(),
    "delayed": mpx.quantization.TensorQuantizer(),
    "mxfp8": mpx.quantization.MXFP8Quantizer(),
    "nvfp4": mpx.quantization.NVFP4Quantizer(),
}
"""How each recipe quantizes data and weights in the forward pass."""
STATEFUL = ("float16", "delayed")
"""Those whose training step threads a state through."""


class Result(NamedTuple):
    """What one step gives.

    Attributes:
        value: The loss.
        outputs: What the loss returns beside it.
        grads: The gradients of the floating point leaves of the parameters.
        finite: Whether the gradients are; a scaled step that is not is tried again.
    """

    value: Any
    outputs: Any
    grads: Any
    finite: Any


class Step(NamedTuple):
    """A way to compute a gradient.

    Attributes:
        run: `run(state, params, batch) -> (state, Result)`.
        state: What it begins with.
        steps: How often it runs before it counts: histories of amaxes have to fill.
    """

    run: Callable[..., Any]
    state: Any
    steps: int = 1


def are_finite(grads: Any) -> Any:
    """Whether all floating point leaves are finite, as an array."""
    leaves = jax.tree.leaves(eqx.filter(grads, eqx.is_inexact_array))
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in leaves]))


def gradient(loss: Any) -> Callable[..., Any]:
    """The gradient of a loss with outputs, by Equinox alone."""
    differentiate = eqx.filter_value_and_grad(loss, has_aux=True)

    def run(state: Any, params: Any, batch: Any) -> Any:
        (value, outputs), grads = differentiate(params, *batch)
        return state, Result(value, outputs, grads, are_finite(grads))

    return run


def plain(built: Built) -> Step:
    """The program as it is, in float32."""
    return Step(gradient(built.loss), None)


def naive(built: Built, dtype: str) -> Step:
    """All weights and inputs cast; the state is the loss scale."""

    def run(scale: Any, params: Any, batch: Any) -> Any:
        def scaled(params: Any) -> Any:
            value, outputs = built.loss(*mpx.cast_tree((params, *batch), dtype))
            value = jnp.asarray(value, jnp.float32)
            return value * scale, (value, outputs)

        (_, (value, outputs)), grads = eqx.filter_value_and_grad(scaled, has_aux=True)(
            params
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        finite = are_finite(grads)
        smaller = jnp.where(finite, scale, scale / 2)
        return smaller, Result(value, outputs, grads, finite)

    scale = SCALE if dtype == "float16" else 1.0
    return Step(run, jnp.float32(scale))


def wrapped(built: Built, precision: str) -> Any:
    """The loss after the one line."""
    if precision in RECIPES:
        return mpx.autocast(built.loss, recipe=RECIPES[precision]())
    return mpx.autocast(built.loss, precision)


def scaling_of(built: Built, precision: str) -> Any:
    """The state that the wrapped loss needs; None if it needs none."""
    if precision not in STATEFUL:
        return None
    return mpx.init_scaling(wrapped(built, precision), built.params, *built.batch)


def differentiated(loss: Any, precision: str) -> Callable[..., Any]:
    """The gradient of a wrapped loss, as a training step of its precision has it."""
    if precision not in STATEFUL:
        return gradient(loss)

    def run(scaling: Any, params: Any, batch: Any) -> Any:
        differentiate = mpx.filter_value_and_grad(loss, scaling, has_aux=True)
        result = differentiate(params, *batch)
        found = Result(result.value, result.aux, result.grads, result.finite)
        return result.scaling, found

    return run


def autocast(built: Built, precision: str) -> Step:
    """The program under mpx."""
    run = differentiated(wrapped(built, precision), precision)
    # The histories of amaxes have to fill.
    steps = 3 if precision == "delayed" else 1
    return Step(run, scaling_of(built, precision), steps)
