"""Optax: clipping, schedules, MultiSteps, an average of weights, apply_if_finite."""

import jax
import jax.numpy as jnp
import optax

import mpx

images = jax.random.normal(jax.random.key(1), (128, 64))
targets = images[:, :4]
weights = jax.random.normal(jax.random.key(0), (64, 4)) / 8


@mpx.autocast(dtype=jnp.float16)
def loss(weights, images, targets):
    return jnp.mean((images @ weights - targets) ** 2)


# Gradients are unscaled float32 ones: clipping needs nothing special. A skipped step
# does not reach the optimizer: schedules and MultiSteps count applied steps only.
optimizer = optax.MultiSteps(
    optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-2, 5, 20)),
    ),
    every_k_schedule=2,
)
average = optax.ema(0.9, debias=True)


@jax.jit
def step(weights, opt_state, ema_state, scaling, images, targets):
    result = mpx.value_and_grad(loss, scaling)(weights, images, targets)
    new = mpx.optimizer_step(weights, optimizer, opt_state, result)
    weights, opt_state, scaling = new
    mean, new = average.update(weights, ema_state)
    ema_state = mpx.select_tree(result.finite, new, ema_state)
    return weights, opt_state, ema_state, scaling, mean, result.value


state = weights, optimizer.init(weights), average.init(weights)
scaling = mpx.init_scaling(loss, weights, images, targets)
first = loss(weights, images, targets)
for number in range(20):
    batch = images.at[0].set(jnp.inf) if number == 3 else images
    *state, scaling, mean, value = step(*state, scaling, batch, targets)
weights, opt_state, _ = state
assert scaling.skipped == 1 and scaling.bad_losses == 1
assert int(opt_state.gradient_step) == 19 // 2  # the bad batch was not one of them
first = loss(jax.random.normal(jax.random.key(0), (64, 4)) / 8, images, targets)
print(
    f"loss {first:.2f} to {value:.2f}, of the average {loss(mean, images, targets):.2f}"
)
assert value < first and loss(mean, images, targets) < first

# In the loop of others: `skip_nonfinite` leaves weights and state bit for bit.
# `optax.apply_if_finite` applies a bad one after so many in a row.
guarded = mpx.skip_nonfinite(optimizer)
updates, _ = guarded.update(jnp.full((64, 4), jnp.nan), guarded.init(weights), weights)
assert (optax.apply_updates(weights, updates) == weights).all()
