"""Keras 3 on its JAX backend, through `stateless_call`."""

import os

import jax.numpy as jnp

from ..data import cross_entropy, labels, normal
from ..record import client


def load():
    """Keras with JAX under it."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    return keras


def classifier(key, model, x, classes=8):
    """A loss of a Keras model in training, whose other variables are state."""
    weights = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def loss(weights, x, y, others):
        logits, others = model.stateless_call(weights, others, x, training=True)
        return cross_entropy(logits, y), (logits, others)

    return loss, weights, (x, labels(key, x.shape[0], classes=classes), others)


@client(linear=True)
def keras_transformer(key):
    keras = load()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 32))
    y = keras.layers.LayerNormalization()(inputs)
    y = keras.layers.MultiHeadAttention(4, 8, dropout=0.0)(y, y, use_causal_mask=True)
    x = keras.layers.Add()([inputs, y])
    y = keras.layers.Dense(128, activation="gelu")(keras.layers.LayerNormalization()(x))
    x = keras.layers.Add()([x, keras.layers.Dense(32)(y)])
    outputs = keras.layers.Dense(8)(keras.layers.GlobalAveragePooling1D()(x))
    return classifier(key, keras.Model(inputs, outputs), normal(key, 8, 12, 32))


@client(linear=True)
def keras_lstm(key):
    keras = load()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((10, 12)),
            keras.layers.Bidirectional(keras.layers.LSTM(24, return_sequences=True)),
            keras.layers.GRU(16),
            keras.layers.Dense(8),
        ]
    )
    return classifier(key, model, normal(key, 16, 10, 12))


CHAOTIC = (
    "its gradient has no digits left in bfloat16: rounding weights and inputs and "
    "computing in float32 is off by 1.1 of its norm, since each batch normalization of "
    "the last blocks is over 8 numbers"
)


@client(
    linear=True,
    without=("mxfp8", "nvfp4"),
    faults=dict.fromkeys(("bfloat16", "current", "delayed"), CHAOTIC),
)
def keras_mobilenet(key):
    """One of `keras.applications`, small."""
    keras = load()
    keras.utils.set_random_seed(0)
    base = keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, weights=None, classes=8, classifier_activation=None
    )
    return classifier(key, base, jnp.tanh(normal(key, 8, 32, 32, 3)))
