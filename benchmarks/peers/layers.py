"""The stack of `models.layers` with the FP8 of others: Flax and Qwix, both of Linen.

They run beside ours in one process. Whichever is not installed is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..models.layers import inner_product, random_data
from ..steps import ArrayStep, built

# The arms, and the packages that each needs.
ARMS = {"Flax fp8": ("flax",), "Qwix fp8": ("flax", "qwix")}


def build(arm: str, tokens: int, features: Sequence[int], seed: int) -> ArrayStep:
    """Forward and backward of the stack; see `models.layers.build`."""
    import flax.linen as linen
    from flax.linen import fp8_ops

    options = {}
    if arm == "Flax fp8":
        options = {"dot_general_cls": fp8_ops.Fp8DirectDotGeneralOp}

    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            offset = self.param("offset", linen.initializers.zeros, x.shape[-1:])
            x = x + offset.astype(x.dtype)
            for place, size in enumerate(features[1:]):
                x = jax.nn.gelu(x) if place else x
                x = linen.Dense(size, use_bias=False, dtype=jnp.bfloat16, **options)(x)
            return x

    module = Stack() if arm == "Flax fp8" else _by_qwix(Stack())

    def initial(key: Any) -> tuple[tuple, Any]:
        weights_key, data_key = jax.random.split(key)
        data = random_data(tokens, features, data_key, jnp.bfloat16)
        return (module.init(weights_key, data[0]),), data

    def loss(variables: Any, x: Any, gradient: Any) -> Any:
        return inner_product(module.apply(variables, x), gradient)

    def step(variables: Any, batch: Any) -> tuple:
        value, grads = jax.value_and_grad(loss)(variables, *batch)
        # Flax's scales and histories come as the gradients of themselves.
        scales = {k: v for k, v in grads.items() if k != "params"}
        return {**variables, **scales}, (value, grads["params"])

    return built(initial, step, seed=seed)


def _by_qwix(module: Any) -> Any:
    """Quantized as its documentation has it: E4M3 forward, E5M2 for gradients."""
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )
    return qwix.quantize_model(module, qwix.QtProvider([rule]))
