"""Orbax: save, restore and resume, bit for bit, with the state of mpx."""

import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import mpx

optimizer = optax.adamw(3e-3)


@mpx.autocast(recipe=mpx.DelayedScaling(amax_history_len=4))
def loss(weights, images, targets):
    hidden = jax.nn.relu(images @ weights["first"])
    return jnp.mean((hidden @ weights["last"] - targets) ** 2)


@jax.jit
def step(state, images, targets):
    weights, opt_state, scaling = state
    result = mpx.value_and_grad(loss, scaling)(weights, images, targets)
    return mpx.optimizer_step(weights, optimizer, opt_state, result), result.value


def initial_state():
    keys = jax.random.split(jax.random.key(0))
    weights = {
        "first": jax.random.normal(keys[0], (64, 32)) / 8,
        "last": jax.random.normal(keys[1], (32, 16)) / 6,
    }
    scaling = mpx.init_scaling(loss, weights, images, targets)
    return weights, optimizer.init(weights), scaling


images = jax.random.normal(jax.random.key(1), (32, 64))
targets = images[:, :16]
state = initial_state()
for _ in range(4):
    state, value = step(state, images, targets)

with tempfile.TemporaryDirectory() as folder:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(4, args=ocp.args.StandardSave(mpx.guard(state)))
    with ocp.CheckpointManager(folder) as manager:  # in another process
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, initial_state())
        restored = manager.restore(4, args=ocp.args.StandardRestore(shapes))

state, value = step(state, images, targets)
resumed, again = step(restored, images, targets)
same = jax.tree.map(lambda a, b: bool((a == b).all()), state, resumed)
assert all(jax.tree.leaves(same)) and value == again
print(f"loss {value:.3f} after step 5, and {again:.3f} resumed from step 4")
