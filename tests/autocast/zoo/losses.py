"""The losses of Optax, on the output of one matrix product."""

import jax
import jax.numpy as jnp
import optax

from .program import OUTER, normal, program, weight

BATCH, FEATURES, CLASSES = 16, 12, 8


def on_logits(key, loss_of, *targets):
    """The program whose logits are a product, as a classifier's are."""
    keys = jax.random.split(key)
    x = normal(keys[0], BATCH, FEATURES)

    def loss(w, x, *targets):
        logits = x @ w
        return jnp.mean(loss_of(logits, *targets)), logits

    return loss, (2 * weight(keys[1], FEATURES, CLASSES), x, *targets)


@program(third_party=True)
def optax_cross_entropy(key):
    keys = jax.random.split(key)
    labels = jax.random.randint(keys[0], (BATCH,), 0, CLASSES)
    loss = optax.softmax_cross_entropy_with_integer_labels
    return on_logits(keys[1], loss, labels)


@program(third_party=True)
def optax_sigmoid(key):
    keys = jax.random.split(key)
    labels = normal(keys[0], BATCH, CLASSES) > 0
    loss = optax.sigmoid_binary_cross_entropy
    return on_logits(keys[1], loss, labels.astype(jnp.float32))


@program(OUTER, third_party=True)
def optax_ctc(key):
    keys = jax.random.split(key, 3)
    labels = jax.random.randint(keys[0], (2, 3), 1, CLASSES)

    def loss(w, x, labels):
        logits = x @ w
        paddings = jnp.zeros(logits.shape[:2]).at[1, -1].set(1.0)
        losses = optax.ctc_loss(logits, paddings, labels, jnp.zeros(labels.shape))
        return jnp.mean(losses), logits

    return loss, (
        2 * weight(keys[1], FEATURES, CLASSES),
        normal(keys[2], 2, 8, FEATURES),
        labels,
    )
