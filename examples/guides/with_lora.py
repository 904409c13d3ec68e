"""LoRA: the frozen base is quantized, and has no gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx

SIZE, RANK = 256, 8


class Adapted(eqx.Module):
    base: jax.Array
    down: jax.Array
    up: jax.Array

    def __init__(self, key):
        base, down = jax.random.split(key)
        self.base = jax.random.normal(base, (SIZE, SIZE)) / 16
        self.down = jax.random.normal(down, (SIZE, RANK)) / 16
        self.up = jnp.zeros((RANK, SIZE))

    def __call__(self, x):
        return jnp.tanh(x @ self.base + (x @ self.down) @ self.up)


model = [Adapted(key) for key in jax.random.split(jax.random.key(0), 3)]
is_adapter = [
    eqx.tree_at(lambda m: (m.base, m.down, m.up), m, (False, True, True)) for m in model
]
adapters, base = eqx.partition(model, is_adapter)


def loss_fn(adapters, base, x):
    for layer in eqx.combine(adapters, base):
        x = layer(x)
    return jnp.mean(x**2)


x = jax.random.normal(jax.random.key(1), (32, SIZE))
loss = mpx.autocast(loss_fn, recipe=mpx.DelayedScaling(), weights=(0, 1))
scaling = mpx.init_scaling(loss, adapters, base, x)
result = mpx.filter_value_and_grad(loss, scaling)(adapters, base, x)
assert {use.parameter for use in scaling.quantized} == {"[1][0].base", "[1][1].base"}
assert result.grads[0].base is None and result.grads[0].up.shape == (RANK, SIZE)
print(f"loss {result.value:.4f}")
