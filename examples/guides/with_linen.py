"""Flax Linen: a TrainState with batch_stats, and what a skipped step must leave."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.training import train_state

import mpx

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(32)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dense(10)(linen.relu(x))


class TrainState(train_state.TrainState):
    batch_stats: Any
    scaling: Any  # mpx's state, which is saved and restored with the rest


@mpx.autocast(dtype=jnp.float16)
def loss(params, batch_stats, images, labels):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = Model().apply(variables, images, mutable=["batch_stats"])
    return jnp.mean(cross_entropy(logits, labels)), new["batch_stats"]


@jax.jit
def step(state, images, labels):
    gradient = mpx.value_and_grad(loss, state.scaling, has_aux=True)
    result = gradient(state.params, state.batch_stats, images, labels)
    new = state.apply_gradients(grads=result.grads, batch_stats=result.aux)
    # Parameters, statistics, the optimizer, and the step that schedules count.
    new = mpx.select_tree(result.finite, new, state)
    return new.replace(scaling=result.scaling), result.value


images = jax.random.normal(jax.random.key(1), (128, 64))
labels = jnp.argmax(images[:, :10], axis=-1)
variables = jax.jit(Model().init)(jax.random.key(0), images)
arguments = variables["params"], variables["batch_stats"], images, labels
variables["scaling"] = mpx.init_scaling(loss, *arguments)
state = TrainState.create(apply_fn=None, tx=optax.adamw(3e-3), **variables)

losses = []
for _ in range(20):
    state, value = step(state, images, labels)
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, skipped {state.scaling.skipped}")
assert losses[-1] < 0.7 * losses[0]
bad, _ = step(state, images.at[0].set(jnp.inf), labels)
assert bad.step == state.step and bad.scaling.skipped == state.scaling.skipped + 1
