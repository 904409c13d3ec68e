"""MXFP8 with weights in blocks of 32 x 32: one copy serves w and its transpose."""

import jax
import jax.numpy as jnp

import mpx
from mpx.quantization import Leg, Quantizer, Role, quantize


def qfactory(role, leg):
    square = role is Role.WEIGHT
    return Quantizer(mpx.Format.E4M3, 2 if square else 1, 32, scales="e8m0")


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


recipe = mpx.CustomRecipe(qfactory)
keys = jax.random.split(jax.random.key(0), 3)
weights = [jax.random.normal(k, (128, 128)) / 8 for k in keys[:2]]
x = jax.random.normal(keys[2], (64, 128))
w = quantize(weights[0], recipe.quantizer(Role.WEIGHT, leg=Leg.FORWARD), axis=(0, 1))
back = recipe.quantizer(Role.WEIGHT, leg=Leg.DGRAD)
transposed = quantize(weights[0].T, back, axis=(0, 1))
assert (w.payload.T == transposed.payload).all()

on_b200 = mpx.autocast(loss, recipe=recipe, target="B200", strict=True)
report = mpx.explain(on_b200)(weights, x)
print(*{one.reason for one in report.operations if one.is_low}, sep="\n")
