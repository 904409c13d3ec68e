"""The training step with mpx, as its documentation says to write it."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optax

import mpx
from mpx.contrib import PallasKernel
from mpx.quantization import RecipeByLeg

from .steps import FIRST_SCALE, FLOAT32, NAIVE, Arm, Loss, StepFunction, no_scaling

RECIPES = {
    "delayed": mpx.DelayedScaling(),
    "current": mpx.Float8CurrentScaling(),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(),
    "row-wise": mpx.Float8RowwiseScaling(),
    "int8": mpx.Int8CurrentScaling(),
    "int8, one scale": mpx.Int8CurrentScaling(one_scale=True),
}
_ROWS, _FP8 = RECIPES["row-wise"], RECIPES["current"]
BY_LEG = {
    "forward half": RecipeByLeg(dgrad=_FP8, wgrad=_FP8),
    "wgrad half": RecipeByLeg(forward=_ROWS, dgrad=_ROWS),
}
# Those with a kernel of Pallas.
BY_KERNEL = {
    "mxfp8 by Pallas": mpx.MXFP8BlockScaling(kernel=PallasKernel()),
    "nvfp4 by Pallas": mpx.NVFP4BlockScaling(kernel=PallasKernel()),
}


def _is_norm(path: str, leaf: Any) -> bool:
    """Weights of layer norm: computed with in float32, so not worth a cast to half."""
    return path.rpartition(".")[0].endswith("norm")


def _dynamic(loss: Loss, model: Any, batch: Any) -> mpx.DynamicLossScaling:
    return mpx.DynamicLossScaling(FIRST_SCALE)


def _skipping(loss: Loss, model: Any, batch: Any) -> mpx.NoLossScaling:
    return mpx.NoLossScaling()


@contextlib.contextmanager
def unscaled_on_purpose() -> Iterator[None]:
    """Nobody is told that float16 without loss scaling loses gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* computes in float16 with `mpx.NoLoss")
        yield


# What scales by default, in each precision.
_FIRST = {"float16": _dynamic, "bfloat16": _skipping}


def _steps_of(differentiate: Callable[[Loss, Any], Any]) -> Any:
    """What makes the step of a loss whose gradients `differentiate` gives."""

    def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
        def step(model: Any, opt_state: Any, scaling: Any, batch: Any) -> tuple:
            with unscaled_on_purpose():
                result = differentiate(loss, scaling)(model, batch)
            model, opt_state, scaling = mpx.optimizer_step(
                model, optimizer, opt_state, result
            )
            return model, opt_state, scaling, result.value

        return step

    return make_step


def _mpx_arm(name: str, dtype: str) -> Arm:
    policy = mpx.get_policy(f"params=float32,compute={dtype},output=float32")

    def differentiate(loss: Loss, scaling: Any) -> Any:
        return mpx.filter_value_and_grad(loss, scaling, policy=policy, keep=_is_norm)

    return Arm(name, _FIRST[dtype], _steps_of(differentiate))


def autocast_arm(
    name: str, dtype: str = "bfloat16", accumulate: int = 1, **options: Any
) -> Arm:
    """The step of `mpx.autocast(loss, dtype, **options)`, in so many micro-batches."""

    def cast(loss: Loss) -> Any:
        return mpx.autocast(loss, dtype, **options)

    def differentiate(loss: Loss, scaling: Any) -> Any:
        return mpx.filter_value_and_grad(cast(loss), scaling, accumulate=accumulate)

    def of_recipe(loss: Loss, model: Any, batch: Any) -> Any:
        return mpx.init_scaling(cast(loss), model, batch)

    first_scaling = of_recipe if "recipe" in options else _FIRST[dtype]
    return Arm(name, first_scaling, _steps_of(differentiate), uses_mpx=False)


ARMS = {
    arm.name: arm
    for arm in (
        FLOAT32,
        NAIVE,
        _mpx_arm("mpx float16", "float16"),
        _mpx_arm("mpx bfloat16", "bfloat16"),
        *(
            autocast_arm(f"autocast {dtype}{suffix}", dtype, residual_stream=stream)
            for dtype in ("float16", "bfloat16")
            for stream, suffix in ((None, ""), ("half", ", half stream"))
        ),
        autocast_arm("autocast bfloat16, kept", residuals="fast"),
        autocast_arm(
            "autocast bfloat16, half scan",
            residual_stream="half",
            rules=mpx.Rules(mpx.Rule(mpx.Precision.HALF, primitive=("add", "mul"))),
        ),
        *(
            autocast_arm(name, recipe=recipe, residual_stream="full")
            for name, recipe in RECIPES.items()
        ),
    )
}


def _alone(name: str, **options: Any) -> Arm:
    """`mpx.autocast` around the loss and nothing else, which is enough in bfloat16."""

    def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> StepFunction:
        return FLOAT32.make_step(mpx.autocast(loss, "bfloat16", **options), optimizer)

    return Arm(name, no_scaling, make_step, uses_mpx=False)


# Those of `time.cpu`, with the defaults of `mpx.autocast`.
ON_CPU = {
    arm.name: arm
    for arm in (
        FLOAT32,
        NAIVE,
        _alone("mpx bfloat16"),
        _alone("mpx bfloat16, form for units", target="cpu bf16"),
        _alone("mpx bfloat16, plain form", target="cpu"),
        autocast_arm("mpx float16", "float16"),
        autocast_arm("mpx delayed", recipe=RECIPES["delayed"]),
        autocast_arm("mpx current", recipe=RECIPES["current"]),
        autocast_arm("mpx int8", recipe=RECIPES["int8"]),
    )
}

# Those of whole steps on TPUs: what is set, and whether gradients are checked.
ON_TPU = {
    "float32": FLOAT32,
    "nothing set": autocast_arm("nothing set"),
    "full stream": autocast_arm("full stream", residual_stream="full"),
    "by the loss": dataclasses.replace(
        autocast_arm("by the loss"),
        first_scaling=lambda *_: mpx.NoLossScaling(skip="loss"),
    ),
    "unchecked": _alone("unchecked"),
    **{
        f"{name}, unchecked": _alone(name, recipe=RECIPES[name])
        for name in ("row-wise", "int8", "int8, one scale")
    },
}
