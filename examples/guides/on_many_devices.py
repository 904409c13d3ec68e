"""Many devices: weights divided over them (FSDP), gathered in half precision."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

optimizer = optax.adamw(3e-3)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
divided = NamedSharding(mesh, P("data"))


@mpx.autocast(dtype=jnp.bfloat16)
def loss(weights, images, targets):
    hidden = jax.nn.relu(images @ weights["first"])
    return jnp.mean((hidden @ weights["last"] - targets) ** 2)


@jax.jit
def step(weights, opt_state, scaling, images, targets):
    result = mpx.value_and_grad(loss, scaling)(weights, images, targets)
    state = mpx.optimizer_step(weights, optimizer, opt_state, result)
    return state, result.value


keys = jax.random.split(jax.random.key(0))
weights = {
    "first": jax.random.normal(keys[0], (64, 32)) / 8,
    "last": jax.random.normal(keys[1], (32, 16)) / 6,
}
images = jax.random.normal(jax.random.key(1), (64, 64))
# Weights, moments and batch lie on all devices; JAX divides the computation. One
# device that overflows skips the step on all of them.
weights, images, targets = jax.device_put((weights, images, images[:, :16]), divided)
opt_state = mpx.init_optimizer(optimizer, weights)
scaling = mpx.init_scaling(loss, weights, images, targets)

losses = []
for _ in range(20):
    (weights, opt_state, scaling), value = step(
        weights, opt_state, scaling, images, targets
    )
    losses.append(float(value))
print(f"{jax.device_count()} devices: loss {losses[0]:.2f} to {losses[-1]:.2f}")
assert losses[-1] < 0.9 * losses[0]
assert weights["first"].sharding.is_equivalent_to(divided, 2)
