"""Micro-batches: random keys, masks as weights, arrays without a batch axis."""

import jax
import jax.numpy as jnp
import optax

import mpx

optimizer = optax.adamw(1e-3)


@mpx.autocast(dtype=jnp.float16)
def loss(weights, batch, key):
    x, y = batch
    hidden = jax.nn.relu(x @ weights["first"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0)
    return jnp.mean((hidden @ weights["last"] - y) ** 2)


@jax.jit
def step(weights, opt_state, scaling, batch, key):
    gradient = mpx.value_and_grad(loss, scaling, accumulate=4)
    result = gradient(weights, batch, key)
    return *mpx.optimizer_step(weights, optimizer, opt_state, result), result.value


first, last = jax.random.normal(jax.random.key(0), (2, 16, 16)) / 4
weights = {"first": first, "last": last}
x = jax.random.normal(jax.random.key(1), (64, 16))
batch, key = (x, x), jax.random.key(2)
scaling = mpx.init_scaling(loss, weights, batch, key)
opt_state = optimizer.init(weights)
for i in range(3):
    key_of_step = jax.random.fold_in(key, i)
    weights, opt_state, scaling, value = step(
        weights, opt_state, scaling, batch, key_of_step
    )
assert scaling.steps == 3 and value.dtype == jnp.float32


def masked(weights, batch, table):
    x, mask = batch
    losses = jnp.mean((x @ weights["first"] - table) ** 2, axis=-1)
    return jnp.sum(losses * mask) / jnp.sum(mask)


how = mpx.Accumulation(
    4,
    whole=lambda path, leaf: path.startswith("args[2]"),  # `table`
    weight=lambda weights, batch, table: jnp.sum(batch[1]),  # tokens that count
)
batch, table = (x, jnp.arange(64) % 3 > 0), jnp.ones(16)
pieces = mpx.grad(masked, mpx.NoLossScaling(), accumulate=how, policy="float32")
at_once = mpx.grad(masked, mpx.NoLossScaling(), policy="float32")
grads = pieces(weights, batch, table).grads["first"]
assert jnp.allclose(grads, at_once(weights, batch, table).grads["first"], atol=1e-6)
print(f"loss {value:.3f}, skipped {scaling.skipped}")
