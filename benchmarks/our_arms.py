"""The training step with mpx, as its documentation says to write it."""

from __future__ import annotations

from typing import Any

import optax

import mpx
from examples.vit.step import is_norm

from .steps import FIRST_SCALE, FLOAT32, Arm, Loss, StepFunction


def _mpx_arm(name: str, dtype: str, first_scaling: Any) -> Arm:
    policy = mpx.get_policy(f"params=float32,compute={dtype},output=float32")

    def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
        def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
            value_and_grad = mpx.filter_value_and_grad(
                loss, scaling, policy=policy, keep=is_norm
            )
            result = value_and_grad(model, batch)
            model, opt_state, scaling = mpx.optimizer_step(
                model, optimizer, opt_state, result
            )
            return model, opt_state, scaling, result.value

        return step

    return Arm(name, "mpx", first_scaling, make_step)


def _autocast_arm(
    name: str, dtype: str, stream: str, first_scaling: Any, residuals: str | None = None
) -> Arm:
    def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
        loss = mpx.autocast(loss, dtype, residual_stream=stream, residuals=residuals)

        def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
            result = mpx.filter_value_and_grad(loss, scaling)(model, batch)
            model, opt_state, scaling = mpx.optimizer_step(
                model, optimizer, opt_state, result
            )
            return model, opt_state, scaling, result.value

        return step

    return Arm(name, "mpx", first_scaling, make_step, uses_mpx=False)


def _autocast_arms() -> list[Arm]:
    float16 = lambda: mpx.DynamicLossScaling(FIRST_SCALE)  # noqa: E731
    return [
        _autocast_arm(f"autocast {dtype}{suffix}", dtype, stream, first)
        for dtype, first in (("float16", float16), ("bfloat16", mpx.NoLossScaling))
        for stream, suffix in (("full", ""), ("half", ", half stream"))
    ]


ARMS = {
    arm.name: arm
    for arm in (
        FLOAT32,
        _mpx_arm("mpx float16", "float16", lambda: mpx.DynamicLossScaling(FIRST_SCALE)),
        _mpx_arm("mpx bfloat16", "bfloat16", mpx.NoLossScaling),
        # Without loss scaling, check and skip: what dynamic loss scaling adds is the
        # difference to this.
        _mpx_arm(
            "mpx float16 unscaled", "float16", lambda: mpx.NoLossScaling(skip=False)
        ),
        *_autocast_arms(),
        *(
            _autocast_arm(
                f"autocast bfloat16, {suffix}",
                "bfloat16",
                "full",
                mpx.NoLossScaling,
                residuals,
            )
            for suffix, residuals in (("kept", "fast"), ("recomputed", "small"))
        ),
    )
}
