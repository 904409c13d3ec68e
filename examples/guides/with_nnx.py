"""Flax NNX: BatchNorm and dropout, in place, as NNX has it."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpx.nnx

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


@mpx.autocast(dtype=jnp.float16)
def loss(model, images, labels):
    return jnp.mean(cross_entropy(model(images), labels))


@nnx.jit
def step(model, optimizer, scaling, images, labels):
    result = mpx.nnx.value_and_grad(loss, scaling)(model, images, labels)
    # A step that is not finite leaves parameters, statistics and the optimizer as
    # they were, its random streams included.
    mpx.nnx.update(optimizer, model, result.grads, result.finite)
    return result.scaling, result.value


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
images = jax.random.normal(jax.random.key(1), (128, 64))
labels = jnp.argmax(images[:, :10], axis=-1)
scaling = mpx.init_scaling(loss, model, images, labels)

losses = []
for _ in range(20):
    scaling, value = step(model, optimizer, scaling, images, labels)
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, skipped {scaling.skipped}")
assert losses[-1] < 0.7 * losses[0]
assert int(optimizer.step[...]) == 20 - int(scaling.skipped)
