"""Equinox: BatchNorm's state and dropout under autocast, in float16."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adamw(3e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def make_model(key):
    first, last = jax.random.split(key)
    layers = [
        eqx.nn.Linear(64, 32, key=first),
        eqx.nn.BatchNorm(32, axis_name="batch", mode="batch"),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Dropout(0.1),
        eqx.nn.Linear(32, 10, key=last),
    ]
    return eqx.nn.Sequential(layers)


@mpx.autocast(dtype=jnp.float16)  # the model does not know of it
def loss(model, state, images, labels, key):
    def call(image, key):
        return model(image, state, key=key)

    keys = jax.random.split(key, len(images))
    batched = jax.vmap(call, axis_name="batch", out_axes=(0, None))
    logits, state = batched(images, keys)
    return jnp.mean(cross_entropy(logits, labels)), state


@eqx.filter_jit
def step(model, state, opt_state, scaling, *batch):
    gradient = mpx.filter_value_and_grad(loss, scaling, has_aux=True)
    result = gradient(model, state, *batch)
    # The statistics of a step that overflowed are not finite: keep the old ones.
    state = mpx.select_tree(result.finite, result.aux, state)
    model, opt_state, scaling = mpx.optimizer_step(model, optimizer, opt_state, result)
    return model, state, opt_state, scaling, result.value


model, state = eqx.nn.make_with_state(make_model)(jax.random.key(0))
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
images = jax.random.normal(jax.random.key(1), (128, 64))
labels = jnp.argmax(images[:, :10], axis=-1)
scaling = mpx.init_scaling(loss, model, state, images, labels, jax.random.key(2))

losses = []
for key in jax.random.split(jax.random.key(3), 20):
    *train, value = step(model, state, opt_state, scaling, images, labels, key)
    model, state, opt_state, scaling = train
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, skipped {scaling.skipped}")
assert losses[-1] < 0.7 * losses[0]
