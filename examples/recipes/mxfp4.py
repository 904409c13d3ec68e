"""MXFP4: E2M1 in blocks of 32, with the scales of the OCP MX specification."""

import dataclasses

import jax
import jax.numpy as jnp

import mpx
from mpx.quantization import Quantizer


@dataclasses.dataclass(frozen=True)
class OCP(Quantizer):
    """Scales are 2^(floor(log2 amax) - 2), so values above 6 saturate."""

    def range_of(self, blocks, amax):
        _, exponent = jnp.frexp(amax)  # amax is 0.5 to 1, times 2^exponent
        return jnp.where(amax < jnp.inf, jnp.ldexp(0.75, exponent), amax)


def qfactory(role, leg):
    return OCP(mpx.Format.E2M1, block_dimensions=1, block=32, scales="e8m0")


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


recipe = mpx.CustomRecipe(qfactory)
keys = jax.random.split(jax.random.key(0), 3)
weights = [jax.random.normal(k, (128, 128)) / 8 for k in keys[:2]]
x = jax.random.normal(keys[2], (64, 128))
step = jax.jit(jax.value_and_grad(mpx.autocast(loss, recipe=recipe)))
first, _ = step(weights, x)
for _ in range(20):
    value, grads = step(weights, x)
    weights = [w - 5 * g for w, g in zip(weights, grads, strict=True)]
print(f"loss {first:.3f}, after 20 steps {value:.3f}")
