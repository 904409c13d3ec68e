"""Grain: batches stay as they come; mpx casts inside of the step."""

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx

optimizer = optax.adamw(3e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def example(index):
    image = np.random.default_rng(index).integers(0, 256, 64, dtype=np.uint8)
    return {"image": image, "label": np.int32(np.argmax(image[:10]))}


# Bytes over the bus, and float32 made on the device: nothing is cast to half precision
# on the host, which would round before the first operation has been seen.
batches = grain.MapDataset.range(512).seed(0).shuffle().map(example).repeat().batch(128)


@mpx.autocast(dtype=jnp.bfloat16)
def loss(weights, batch):
    images = batch["image"] / 128.0 - 1.0
    hidden = jax.nn.relu(images @ weights["first"])
    return jnp.mean(cross_entropy(hidden @ weights["last"], batch["label"]))


@jax.jit
def step(weights, opt_state, scaling, batch):
    result = mpx.value_and_grad(loss, scaling)(weights, batch)
    return mpx.optimizer_step(weights, optimizer, opt_state, result), result.value


keys = jax.random.split(jax.random.key(0))
weights = {
    "first": jax.random.normal(keys[0], (64, 32)) / 8,
    "last": jax.random.normal(keys[1], (32, 10)) / 6,
}
state = weights, optimizer.init(weights), mpx.init_scaling(loss, weights, batches[0])
losses = []
for _, batch in zip(range(40), batches, strict=False):
    state, value = step(*state, batch)
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
assert losses[-1] < 0.9 * losses[0]
