"""Keras 3 on JAX: a Keras model in a training loop of your own."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import jax.numpy as jnp
import keras
import optax

import mpx

optimizer = optax.adamw(3e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(32),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Activation("relu"),
        keras.layers.Dense(10),
    ]
)


@mpx.autocast(dtype=jnp.float16)
def loss(weights, state, images, labels):
    logits, state = model.stateless_call(weights, state, images, training=True)
    return jnp.mean(cross_entropy(logits, labels)), state


@jax.jit
def step(weights, state, opt_state, scaling, images, labels):
    gradient = mpx.value_and_grad(loss, scaling, has_aux=True)
    result = gradient(weights, state, images, labels)
    state = mpx.select_tree(result.finite, result.aux, state)
    weights, opt_state, scaling = mpx.optimizer_step(
        weights, optimizer, opt_state, result
    )
    return weights, state, opt_state, scaling, result.value


weights = [variable.value for variable in model.trainable_variables]
state = [variable.value for variable in model.non_trainable_variables]
opt_state = optimizer.init(weights)
images = jax.random.normal(jax.random.key(1), (128, 64))
labels = jnp.argmax(images[:, :10], axis=-1)
scaling = mpx.init_scaling(loss, weights, state, images, labels)
losses = []
for _ in range(20):
    *train, value = step(weights, state, opt_state, scaling, images, labels)
    weights, state, opt_state, scaling = train
    losses.append(float(value))
for variable, value in zip(model.trainable_variables, weights, strict=True):
    variable.assign(value)  # so that model.predict and model.save see them
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, skipped {scaling.skipped}")
assert losses[-1] < 0.7 * losses[0]
