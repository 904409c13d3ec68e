"""A stack of linear layers, forward and backward, under each precision and recipe.

Every arm has float32 weights and random data, `gelu` between two layers, and gives the
gradients of weights and input: an offset that is learned stands for what comes before
the stack. No optimizer runs, and no step is checked or skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mpx

from ..our_arms import BY_LEG, RECIPES as _RECIPES, unscaled_on_purpose
from ..steps import ArrayStep, built

NAIVE = "naive bfloat16"
RECIPES = _RECIPES | BY_LEG
ARMS = ("float32", NAIVE, "autocast bfloat16", "autocast float16", *RECIPES)


def flops(tokens: int, features: Sequence[int]) -> int:
    """Floating point operations of forward, and of both gradients.

    >>> flops(10, (2, 3, 4))
    1080
    """
    weights = sum(a * b for a, b in zip(features, features[1:], strict=False))
    return 3 * 2 * tokens * weights


def random_weights(features: Sequence[int], key: Any) -> dict[str, Any]:
    """An offset and a matrix for every layer."""
    sizes = list(zip(features, features[1:], strict=False))
    keys = jax.random.split(key, len(sizes))
    return {
        "offset": jnp.zeros(features[0]),
        "layers": [
            jax.random.normal(k, size) / size[0] ** 0.5
            for k, size in zip(keys, sizes, strict=True)
        ],
    }


def random_data(
    tokens: int, features: Sequence[int], key: Any, dtype: Any
) -> tuple[Any, Any]:
    """An input, and a gradient of the output."""
    keys = jax.random.split(key)
    ends = (features[0], features[-1])
    return tuple(
        jax.random.normal(k, (tokens, size)).astype(dtype)
        for k, size in zip(keys, ends, strict=True)
    )


def inner_product(y: Any, gradient: Any) -> Any:
    """A loss whose gradient is `gradient`, in float32."""
    return jnp.sum((y * gradient.astype(y.dtype)).astype(jnp.float32))


def _loss(weights: Any, x: Any, gradient: Any) -> Any:
    x = x + weights["offset"].astype(x.dtype)
    for place, weight in enumerate(weights["layers"]):
        x = jax.nn.gelu(x) if place else x
        x = x @ weight.astype(x.dtype)
    return inner_product(x, gradient)


def build(
    arm: str,
    tokens: int,
    features: Sequence[int],
    devices: list[Any] | None = None,
    seed: int | None = None,
) -> ArrayStep:
    """Forward and backward of the stack, as a step without an optimizer.

    Args:
        arm: One of `ARMS`.
        tokens: Rows of the input.
        features: Of the input, and of what each layer gives.
        devices: See `steps.built`.
        seed: See `steps.built`.
    """
    return built(*_arm(arm, tokens, features), devices, seed)


def _arm(
    arm: str, tokens: int, features: Sequence[int]
) -> tuple[Callable[[Any], tuple[tuple, Any]], Callable[..., tuple]]:
    """What makes state and data of a key; and the step."""
    dtype = jnp.float32 if arm == "float32" else jnp.bfloat16
    dtype = jnp.float16 if arm == "autocast float16" else dtype

    def random(key: Any) -> tuple[Any, Any]:
        weights_key, data_key = jax.random.split(key)
        weights = random_weights(features, weights_key)
        return weights, random_data(tokens, features, data_key, dtype)

    if arm in ("float32", NAIVE):

        def plain_step(weights: Any, batch: Any) -> tuple:
            return weights, jax.value_and_grad(_loss)(weights, *batch)

        def plain_initial(key: Any) -> tuple[tuple, Any]:
            weights, data = random(key)
            return (weights,), data

        return plain_initial, plain_step
    options: dict[str, Any] = {}
    if arm in RECIPES:
        # The last product before a loss is one of the stack's own here.
        rule = mpx.Rule(mpx.Precision.LOW, primitive="dot_general")
        options = {"recipe": RECIPES[arm], "rules": mpx.Rules(rule)}
    half = jnp.float16 if dtype == jnp.float16 else jnp.bfloat16
    loss = mpx.autocast(_loss, half, **options)

    def initial(key: Any) -> tuple[tuple, Any]:
        weights, data = random(key)
        scaling = mpx.init_scaling(loss, weights, *data)
        return (weights, scaling.with_loss(mpx.NoLossScaling(skip=False))), data

    def step(weights: Any, scaling: Any, batch: Any) -> tuple:
        with unscaled_on_purpose():
            result = mpx.filter_value_and_grad(loss, scaling)(weights, *batch)
        return weights, result.scaling, (result.value, result.grads)

    return initial, step
