"""Products in 8 bits without mpx: written by hand, and by JAX alone.

What is written by hand is what one writes after reading a page on FP8: an absolute
maximum, a scale, a clip, a cast, a product.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..models.weights import Product


def quantize(x: Array, dtype: Any) -> tuple[Array, Array]:
    """8 bits of the whole range of `dtype`, and what they are to be multiplied by."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    limit = float(jnp.finfo(dtype).max)
    scale = jnp.where(largest > 0, limit / largest, 1.0)
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -limit, limit)
    return scaled.astype(dtype), 1 / scale


def _product(
    a: tuple[Array, Array], b: tuple[Array, Array], axes: tuple[Any, Any], dtype: Any
) -> Array:
    """A result in the dtype of the activations: one in float32 is written and read."""
    (left, left_scale), (right, right_scale) = a, b
    product = jax.lax.dot_general(
        left, right, (axes, ((), ())), preferred_element_type=dtype
    )
    scaled = product.astype(jnp.float32) * (left_scale * right_scale)
    return scaled.astype(dtype)


@jax.custom_vjp
def by_hand(x: Array, weight: Array) -> Array:
    """A product in FP8: E4M3 forward, gradients in E5M2, a scale for each array."""
    return _forward(x, weight)[0]


def _forward(x: Array, weight: Array) -> tuple[Array, Any]:
    kept = quantize(x, jnp.float8_e4m3fn), quantize(weight, jnp.float8_e4m3fn)
    axes = (x.ndim - 1,), (0,)
    return _product(*kept, axes, x.dtype), kept


def _backward(kept: Any, gradient: Array) -> tuple[Array, Array]:
    x, weight = kept
    quantized = quantize(gradient, jnp.float8_e5m2)
    dtype, rows = gradient.dtype, tuple(range(gradient.ndim - 1))
    of_x = _product(quantized, weight, ((gradient.ndim - 1,), (1,)), dtype)
    return of_x, _product(x, quantized, (rows, rows), dtype)


by_hand.defvjp(_forward, _backward)


def by_jax(mode: Any) -> Product:
    """A product of `jax.nn.scaled_dot_general`, whose operands have scaled blocks."""

    def product(x: Array, weight: Array) -> Array:
        config = jax.nn.get_scaled_dot_general_config(mode)
        rows = x.reshape(1, -1, x.shape[-1])
        dimensions = (((2,), (1,)), ((0,), (0,)))
        y = jax.nn.scaled_dot_general(
            rows, weight[None], dimensions, x.dtype, [config] * 3
        )
        return y.reshape(*x.shape[:-1], -1)

    return product


PRODUCTS: dict[str, Product] = {
    "FP8 by hand": by_hand,
    "jax.nn MXFP8": by_jax("mxfp8"),
    "jax.nn NVFP4": by_jax("nvfp4"),
}
