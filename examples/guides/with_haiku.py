"""Haiku: transform_with_state, with batch normalization."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adamw(3e-3)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@hk.without_apply_rng
@hk.transform_with_state
def network(x):
    x = hk.Linear(32)(x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
    return hk.Linear(10)(jax.nn.relu(x))


@mpx.autocast(dtype=jnp.float16)
def loss(params, state, images, labels):
    logits, state = network.apply(params, state, images)
    return jnp.mean(cross_entropy(logits, labels)), state


@jax.jit
def step(params, state, opt_state, scaling, images, labels):
    gradient = mpx.value_and_grad(loss, scaling, has_aux=True)
    result = gradient(params, state, images, labels)
    state = mpx.select_tree(result.finite, result.aux, state)
    params, opt_state, scaling = mpx.optimizer_step(
        params, optimizer, opt_state, result
    )
    return params, state, opt_state, scaling, result.value


images = jax.random.normal(jax.random.key(1), (128, 64))
labels = jnp.argmax(images[:, :10], axis=-1)
params, state = jax.jit(network.init)(jax.random.key(0), images)
opt_state = optimizer.init(params)
scaling = mpx.init_scaling(loss, params, state, images, labels)

losses = []
for _ in range(20):
    *train, value = step(params, state, opt_state, scaling, images, labels)
    params, state, opt_state, scaling = train
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, skipped {scaling.skipped}")
assert losses[-1] < 0.7 * losses[0]
