"""A run changes its recipe: NVFP4, delayed scaling, NVFP4 again, and bfloat16."""

import functools

import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adamw(3e-3)


def loss(weights, images, targets):
    hidden = jax.nn.relu(images @ weights["first"])
    hidden = jax.nn.relu(hidden @ weights["middle"])
    return jnp.mean((hidden @ weights["last"] - targets) ** 2)


PROGRAMS = {
    "NVFP4": mpx.autocast(loss, recipe=mpx.NVFP4BlockScaling()),
    "FP8": mpx.autocast(loss, recipe=mpx.DelayedScaling(warm_start=True)),
    "bfloat16": mpx.autocast(loss),
}


@functools.partial(jax.jit, static_argnums=0)
def step(name, state, *batch):
    weights, opt_state, scaling = state
    result = mpx.value_and_grad(PROGRAMS[name], scaling)(weights, *batch)
    return mpx.optimizer_step(weights, optimizer, opt_state, result), result.value


def changed(scaling, name):
    return mpx.init_scaling(PROGRAMS[name], weights, *batch).with_state(scaling)


keys = jax.random.split(jax.random.key(0), 4)
shapes = {"first": (64, 64), "middle": (64, 64), "last": (64, 16)}
pairs = zip(shapes.items(), keys, strict=False)
weights = {name: jax.random.normal(key, s) / 8 for (name, s), key in pairs}
images = jax.random.normal(keys[3], (128, 64))
batch = images, images[:, :16]

# The slots of all from the start: each program is compiled once, also for a way back.
scaling = mpx.NoLossScaling()
for name in ("FP8", "NVFP4"):
    scaling = changed(scaling, name)
state = weights, optimizer.init(weights), scaling
for name in ("NVFP4", "FP8", "NVFP4", "bfloat16"):
    state = *state[:2], changed(state[2], name)
    for _ in range(10):
        state, value = step(name, state, *batch)
    print(f"loss {value:.3f} after step {state[2].steps} in {name}")

assert int(state[2].steps) == 40 and step._cache_size() == 3
