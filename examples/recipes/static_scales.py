"""Constant scales: values of unit variance are clipped and cast."""

import math

import jax
import jax.numpy as jnp

import mpx
from mpx.quantization import Quantizer, Role


def unit(role, leg):
    format = mpx.Format.E5M2 if role is Role.GRADIENT else mpx.Format.E4M3
    return Quantizer(format, scale_from=1.0)


def fixed_range(role, leg):  # "fixed,-224,224" of Qwix; of gradients the amax
    if role is Role.GRADIENT:
        return Quantizer(mpx.Format.E5M2)
    return Quantizer(mpx.Format.E4M3, scale_from=448 / 224)


def loss(weights, x):
    for w in weights:  # unit variance in, unit variance out
        x = jax.nn.gelu(x @ w / math.sqrt(len(w))) * 1.7
    return jnp.sum(jnp.mean(x, axis=1) ** 2)


*keys, key = jax.random.split(jax.random.key(0), 4)
weights = [jax.random.normal(k, (128, 128)) for k in keys]
x = jax.random.normal(key, (64, 128))
exact = jax.jit(jax.grad(loss))(weights, x)
for recipe in mpx.CustomRecipe(unit), mpx.CustomRecipe(fixed_range):
    in_fp8 = mpx.autocast(loss, recipe=recipe)
    grads = jax.jit(jax.grad(in_fp8))(weights, x)
    error = jnp.linalg.norm(grads[0] - exact[0]) / jnp.linalg.norm(exact[0])
    print(f"{recipe.qfactory.__name__}: gradient error {error:.3f}")
    assert error < 0.1
