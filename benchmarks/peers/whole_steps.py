"""Linear layers in FP8 by Flax and by Qwix, as functions of their weights.

Linen's modules are not used for the model, so that `jax.checkpoint` and `jax.lax.scan`
are JAX's own, in every arm.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from ..models.arranged import Around

_OPERANDS = ("lhs", "rhs", "grad")
SCALES = (" scale", " amax_history")
_HISTORY = 1024  # Flax's own


class ByFlax(Around):
    """Linear layers of Flax's delayed scaling, which has its state in the weights."""

    def dense(self, name: str, x: Array, features: int) -> Array:
        """A product in FP8; the gradients of its scales are the next scales."""
        from flax.linen import fp8_ops

        state = {}
        for operand in _OPERANDS:
            for suffix, size in zip(SCALES, (1, _HISTORY), strict=True):
                what = f"{operand}{suffix}"
                weight = self.layers.weight(f"{name} {what}", size)
                state[what.replace(" ", "_")] = weight
        weight = self.layers.weight(name, x.shape[-1], features)
        y = fp8_ops.fp8_scaled_dot_general(
            x.reshape(-1, x.shape[-1]),
            weight.astype(x.dtype),
            (((1,), (0,)), ((), ())),
            preferred_element_type=x.dtype,
            quantize_compute_type=x.dtype,
            **state,
        )
        return y.reshape(*x.shape[:-1], features)


def by_qwix(x: Array, weight: Array) -> Array:
    """A product that Qwix quantizes: E4M3 forward, E5M2 for gradients."""
    import flax.linen as linen
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=True,
    )
    layer = linen.Dense(weight.shape[1], use_bias=False, dtype=x.dtype)
    quantized = qwix.quantize_model(layer, qwix.QtProvider([rule]))
    y = quantized.apply({"params": {"kernel": weight}}, x.reshape(-1, x.shape[-1]))
    return jnp.asarray(y).reshape(*x.shape[:-1], -1)
