"""The training step with the published MPX and JMP, as their READMEs write it.

Imported only in the peers' environment, where `mpx` is the published package.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jmp
import optax

import mpx

from ..steps import FIRST_SCALE, FLOAT32, Arm, Loss, StepFunction, no_scaling


def _mpx_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
    def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
        value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(
            model, batch
        )
        model, opt_state = mpx.optimizer_update(
            model, optimizer, opt_state, grads, finite
        )
        return model, opt_state, scaling, value

    return step


def _mpx_bfloat16_step(
    loss: Loss, optimizer: optax.GradientTransformation
) -> StepFunction:
    """The same with MPX's cast to bfloat16, without its scaling, check and select."""

    def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
        both = mpx.cast_to_bfloat16(model), mpx.cast_to_bfloat16(batch)
        value, grads = eqx.filter_value_and_grad(loss)(*both)
        grads = mpx.cast_to_full_precision(grads)
        updates, opt_state = optimizer.update(
            grads, opt_state, eqx.filter(model, eqx.is_array)
        )
        return eqx.apply_updates(model, updates), opt_state, scaling, value

    return step


def _jmp_bfloat16_step(
    loss: Loss, optimizer: optax.GradientTransformation
) -> StepFunction:
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def cast(model: Any, batch: Any) -> Any:
        return policy.cast_to_output(loss(*policy.cast_to_compute((model, batch))))

    return FLOAT32.make_step(cast, optimizer)


def _jmp_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def step(model: Any, opt_state: Any, state: Any, batch: Any) -> tuple:
        scaling = jmp.DynamicLossScale(*state)

        def scaled_loss(model: Any, batch: Any) -> Any:
            return scaling.scale(loss(*policy.cast_to_compute((model, batch))))

        value, grads = eqx.filter_value_and_grad(scaled_loss)(model, batch)
        grads = scaling.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = eqx.apply_updates(params, updates)
        params = jmp.select_tree(finite, new_params, params)
        opt_state = jmp.select_tree(finite, new_opt_state, opt_state)
        value = scaling.unscale(value)
        scaling = scaling.adjust(finite)
        state = (scaling.loss_scale, scaling.counter)
        return eqx.combine(params, rest), opt_state, state, value

    return step


def _mpx_scaling(loss: Loss, model: Any, batch: Any) -> Any:
    return mpx.DynamicLossScaling(jnp.float32(FIRST_SCALE), jnp.float32(1.0))


def _jmp_scaling(loss: Loss, model: Any, batch: Any) -> Any:
    # Not the object itself: it cannot hold the placeholders of `eqx.partition`.
    return jnp.float32(FIRST_SCALE), jnp.zeros((), jnp.int32)


ARMS = {
    arm.name: arm
    for arm in (
        FLOAT32,
        Arm("MPX float16", _mpx_scaling, _mpx_step),
        Arm("MPX bfloat16", no_scaling, _mpx_bfloat16_step),
        Arm("JMP float16", _jmp_scaling, _jmp_step),
        Arm("JMP bfloat16", no_scaling, _jmp_bfloat16_step),
    )
}
ON_CPU = ARMS
