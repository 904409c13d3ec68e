"""Plain JAX: a dictionary of weights, blocks in a scan, each in jax.checkpoint."""

import jax
import jax.numpy as jnp
import optax

import mpx

WIDTH, BLOCKS = 32, 3
optimizer = optax.adamw(3e-3)


def init(key):
    keys = jax.random.split(key, 3)
    shapes = {"in": (64, WIDTH), "blocks": (BLOCKS, WIDTH, WIDTH), "out": (WIDTH, 10)}
    return {
        name: jax.random.normal(key, shape) * shape[-2] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@jax.checkpoint
def block(x, weight):
    normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(normed @ weight), None


@mpx.autocast(dtype=jnp.bfloat16)  # goes into the scan and into jax.checkpoint
def loss(weights, images, labels):
    x, _ = jax.lax.scan(block, images @ weights["in"], weights["blocks"])
    logits = x @ weights["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


@jax.jit
def step(weights, opt_state, scaling, images, labels):
    result = mpx.value_and_grad(loss, scaling)(weights, images, labels)
    weights, opt_state, scaling = mpx.optimizer_step(
        weights, optimizer, opt_state, result
    )
    return weights, opt_state, scaling, result.value


weights = init(jax.random.key(0))
opt_state = optimizer.init(weights)
images = jax.random.normal(jax.random.key(1), (128, 64))
labels = jnp.argmax(images[:, :10], axis=-1)
scaling = mpx.init_scaling(loss, weights, images, labels)

report = mpx.explain(jax.grad(loss))(weights, images, labels)
assert report.totals.half_flops_share > 0.8
losses = []
for _ in range(20):
    weights, opt_state, scaling, value = step(
        weights, opt_state, scaling, images, labels
    )
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, skipped {scaling.skipped}")
assert losses[-1] < 0.7 * losses[0]
