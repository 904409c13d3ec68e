"""Master weights: a bfloat16 model that still moves by steps of 1e-4."""

import jax.numpy as jnp
import optax

import mpx


def fit(model, x):
    return jnp.mean((x @ model - 1) ** 2)


model = jnp.full((4,), 0.5, jnp.bfloat16)
optimizer = mpx.master_weights(optax.adam(1e-4))
opt_state = optimizer.init(model)
gradient = mpx.filter_value_and_grad(mpx.autocast(fit), mpx.NoLossScaling())
for _ in range(10):
    result = gradient(model, jnp.eye(4))
    model, opt_state, _ = mpx.optimizer_step(model, optimizer, opt_state, result)

assert opt_state.masters.dtype == jnp.float32 and model.dtype == jnp.bfloat16
assert (model == opt_state.masters.astype(jnp.bfloat16)).all()
assert jnp.allclose(opt_state.masters, 0.501, atol=1e-5)  # ten steps of 1e-4
print(f"loss {result.value:.4f}")
