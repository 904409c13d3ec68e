"""Evaluation: accuracy and logits under a recipe, with the scales of the run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
optimizer = optax.adamw(1e-2)
model = eqx.nn.MLP(16, 4, width_size=64, depth=2, key=jax.random.key(0))
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
images = jax.random.normal(jax.random.key(1), (64, 16))
labels = jnp.argmax(images[:, :4], axis=-1)
recipe = mpx.DelayedScaling(amax_history_len=8)  # or None, or another


def network(model, images):
    return jax.vmap(model)(images)


def plain_loss(model, images, labels):
    return jnp.mean(cross_entropy(network(model, images), labels))


loss = mpx.autocast(plain_loss, recipe=recipe)
predict = mpx.autocast(network, recipe=recipe)


@eqx.filter_jit
def step(model, opt_state, scaling, images, labels):
    result = mpx.filter_value_and_grad(loss, scaling)(model, images, labels)
    return mpx.optimizer_step(model, optimizer, opt_state, result)


@eqx.filter_jit
def evaluate(model, scaling, images, labels):
    logits = mpx.inference(predict, scaling)(model, images)
    return logits, jnp.mean(jnp.argmax(logits, axis=-1) == labels)


scaling = mpx.init_scaling(loss, model, images, labels)
for _ in range(20):
    model, opt_state, scaling = step(model, opt_state, scaling, images, labels)
logits, accuracy = evaluate(eqx.nn.inference_mode(model), scaling, images, labels)
value = mpx.inference(loss, scaling)(model, images, labels)
assert accuracy > 0.8 and logits.dtype == jnp.float32
assert jnp.isclose(jnp.mean(cross_entropy(logits, labels)), value, rtol=1e-6)

# The features of a layer, of one row: quantized as in the training.
features = mpx.autocast(lambda m, x: jax.vmap(m.layers[0])(x), recipe=recipe)
assert mpx.inference(features, scaling)(model, images[:1]).shape == (1, 64)
print(f"loss {value:.3f}, accuracy {accuracy:.2f}")
