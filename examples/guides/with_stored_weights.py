"""Weights in 8 bits that products read, with float32 copies in the optimizer."""

import jax
import jax.numpy as jnp
import optax

import mpx

keys = jax.random.split(jax.random.key(0), 2)
weights = [jax.random.normal(key, (256, 256)) / 16 for key in keys]
stored = mpx.quantization.quantize_weights(weights)
assert stored[0].nbytes < 0.26 * weights[0].nbytes
assert isinstance(stored[0], mpx.quantization.StoredWeight)

optimizer = mpx.master_weights(optax.adam(1e-3))
opt_state = optimizer.init(stored, weights)  # masters start from all digits


@mpx.autocast(recipe=mpx.DelayedScaling())
def loss(weights, x):
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - x) ** 2)


@jax.jit
def step(stored, opt_state, scaling, x):
    result = mpx.filter_value_and_grad(loss, scaling)(stored, x)
    new = mpx.optimizer_step(stored, optimizer, opt_state, result)
    return *new, result.value


x = jax.random.normal(jax.random.key(1), (32, 256))
report = mpx.explain(loss)(stored, x)
assert any("stored weight is read" in o.reason for o in report.operations)
scaling = mpx.init_scaling(loss, stored, x)
losses = []
for _ in range(10):
    stored, opt_state, scaling, value = step(stored, opt_state, scaling, x)
    losses.append(float(value))
assert losses[-1] < losses[0]
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
