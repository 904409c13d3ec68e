"""Training in 8 bits without mpx: written by hand, by Flax, by Qwix, by JAX alone.

What is written by hand is what one writes after reading a page on FP8: an absolute
maximum, a scale, a clip, a cast, a product. Flax and Qwix are used as their pages say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from ..models.weights import Block, Loop, Product, by_cudnn, convolution
from ..steps import StepFunction, checked_update, to_bfloat16

Model = Callable[..., Array]

# --- By hand --------------------------------------------------------------------------


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

# --- By Flax and by Qwix, both of Linen -----------------------------------------------

LINEN = ("Flax fp8", "Qwix fp8")


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Layers of a Linen module; see `weights.Layers`."""

    module: Any
    prefix: str
    options: dict[str, Any]

    def weight(self, name: str, *shape: int) -> Array:
        ones = jax.nn.initializers.ones
        start = jax.nn.initializers.lecun_normal() if len(shape) > 1 else ones
        return self.module.param(self.prefix + name, start, shape)

    def dense(self, name: str, x: Array, features: int) -> Array:
        import flax.linen as linen

        name = self.prefix + name
        options = {k: v for k, v in self.options.items() if k != "einsum"}
        layer = linen.Dense(
            features, use_bias=False, dtype=x.dtype, name=name, **options
        )
        return layer(x)

    def experts(self, name: str, x: Array, features: int) -> Array:
        name, shape = self.prefix + name, (x.shape[0], x.shape[-1], features)
        return _experts_module(self.options.get("einsum"), name)(x, shape)

    def convolve(
        self, name: str, x: Array, channels: int, window: int, stride: int = 1
    ) -> Array:
        weight = self.weight(name, window, window, x.shape[-1], channels)
        return convolution(x, weight, stride)

    def attend(self, query: Array, key: Array, value: Array) -> Array:
        # Weights are made in float32, which the kernel does not take.
        making = self.module.is_initializing()
        return query if making else by_cudnn(query, key, value)

    def at(self, name: str) -> _Layers:
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}_")

    def scan(
        self, name: str, length: int, block: Block, x: Array, loop: Loop = jax.lax.scan
    ) -> Array:
        raise NotImplementedError("the peers' arms have no workload with a scan")


def linen_module(arm: str, model: Model) -> Any:
    """`model(layers, batch)` as a module whose linear layers are in FP8."""
    import flax.linen as linen
    from flax.linen import fp8_ops

    options = {}
    if arm == "Flax fp8":
        product, einsum = fp8_ops.Fp8DirectDotGeneralOp, fp8_ops.Fp8Einsum
        options = {"dot_general_cls": product, "einsum": einsum}

    class Module(linen.Module):
        @linen.compact
        def __call__(self, batch: Any) -> Array:
            return model(_Layers(self, "", options), batch)

    if arm == "Flax fp8":
        return Module()
    import qwix

    shared = {
        "weight_qtype": jnp.float8_e4m3fn,
        "act_qtype": jnp.float8_e4m3fn,
        "disable_channelwise_axes": True,
    }
    # Every linear layer, but no product of the module itself: those are attention's and
    # the head's. And every convolution, of whose gradients Qwix 0.1.8 cannot multiply
    # two formats.
    convolution_names = ("conv_general_dilated",)
    rules = [
        qwix.QtRule(op_names=convolution_names, bwd_qtype=jnp.float8_e4m3fn, **shared),
        qwix.QtRule(module_path=".+", bwd_qtype=jnp.float8_e5m2, **shared),
    ]
    return qwix.quantize_model(Module(), qwix.QtProvider(rules))


def _experts_module(einsum: Any, name: str) -> Any:
    """A linear layer for each expert, whose product `einsum` makes, if given."""
    import flax.linen as linen

    class Experts(linen.Module):
        @linen.compact
        def __call__(self, x: Array, shape: tuple[int, ...]) -> Array:
            start = jax.nn.initializers.lecun_normal(batch_axis=(0,))
            weight = self.param("kernel", start, shape).astype(x.dtype)
            product = jnp.einsum if einsum is None else einsum()
            return product("e...i,eio->e...o", x, weight)

    return Experts(name=name)


def linen_step(module: Any, optimizer: optax.GradientTransformation) -> StepFunction:
    """The step of a module; Flax's scales come as the gradients of themselves."""

    def loss(params: Any, scales: Any, batch: Any) -> Array:
        params, batch = jax.tree.map(to_bfloat16, (params, batch))
        return module.apply({"params": params, **scales}, batch)

    def step(params: Any, opt_state: Any, scales: Any, batch: Any) -> tuple:
        grad = functools.partial(jax.value_and_grad, argnums=(0, 1))
        value, (grads, new_scales) = grad(loss)(params, scales, batch)
        params, opt_state, finite = checked_update(optimizer, params, opt_state, grads)
        scales = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), new_scales, scales
        )
        return params, opt_state, scales, value

    return step
