"""Two precisions compared: the loss on held-out data, from the same weights."""

import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adam(1e-2)
images = jax.random.normal(jax.random.key(1), (256, 32))
train, test = images[:192], images[192:]


def loss(weights, images):
    hidden = jnp.tanh(images @ weights["first"])
    return jnp.mean((hidden @ weights["last"] - images[:, :8]) ** 2)


def held_out(loss, key):
    keys = jax.random.split(key)
    weights = {
        "first": jax.random.normal(keys[0], (32, 32)) / 6,
        "last": jax.random.normal(keys[1], (32, 8)) / 6,
    }

    @jax.jit
    def step(weights, opt_state, scaling):
        result = mpx.value_and_grad(loss, scaling)(weights, train)
        return mpx.optimizer_step(weights, optimizer, opt_state, result)

    state = weights, optimizer.init(weights), mpx.init_scaling(loss, weights, train)
    for _ in range(50):
        state = step(*state)
    return mpx.inference(loss, state[2])(state[0], test)


full = mpx.autocast(loss, enabled=False)
eight = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling())
gaps = [
    float(held_out(eight, key) / held_out(full, key) - 1)
    for key in jax.random.split(jax.random.key(0), 2)
]
assert max(abs(gap) for gap in gaps) < 0.1
print("loss, relative to float32:", *(f"{gap:+.2%}" for gap in gaps))
