"""Haiku: its nets and recurrent cores, with and without state."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, mean_square, normal
from ..record import client

PACKAGE = "dm-haiku"


def classifier(key, forward, x, classes=8):
    """A loss of what a Haiku function with state gives for `x`."""
    import haiku as hk

    keys = jax.random.split(key)
    function = hk.transform_with_state(forward)
    params, state = function.init(keys[0], x)

    def loss(params, x, y, state, key):
        logits, state = function.apply(params, state, key, x)
        return cross_entropy(logits, y), (logits, state)

    y = labels(keys[1], *x.shape[:1], classes=classes)
    return loss, params, (x, y, state, jax.random.key_data(keys[0]))


@client(PACKAGE, linear=True)
def haiku_resnet(key):
    import haiku as hk

    def forward(x):
        net = hk.nets.ResNet(
            (1, 1, 1, 1),
            8,
            bottleneck=False,
            channels_per_group=(8, 16, 16, 32),
            use_projection=(False, True, True, True),
            initial_conv_config={"output_channels": 8},
        )
        return net(x, is_training=True)

    return classifier(key, forward, normal(key, 8, 32, 32, 3))


@client(PACKAGE, linear=True)
def haiku_mobilenet(key):
    import haiku as hk

    def forward(x):
        net = hk.nets.MobileNetV1(
            strides=(1, 2, 1), channels=(16, 32, 32), num_classes=8
        )
        return net(x, is_training=True)

    return classifier(key, forward, normal(key, 8, 16, 16, 3))


@client(PACKAGE, linear=True)
def haiku_vector_quantizer_ema(key):
    """A code book that moves by means, which is state."""
    import haiku as hk

    keys = jax.random.split(key)

    @hk.transform_with_state
    def function(x):
        quantizer = hk.nets.VectorQuantizerEMA(16, 32, 0.25, 0.99)
        found = quantizer(hk.nets.MLP([64, 16])(x), is_training=True)
        return hk.nets.MLP([64, 24])(found["quantize"]), found

    x = normal(keys[0], 32, 24)
    params, state = function.init(keys[1], x)

    def loss(params, x, state):
        (y, found), state = function.apply(params, state, None, x)
        value = mean_square(y - x) + found["loss"]
        return value, (y, found["encoding_indices"], state)

    return loss, params, (x, state)


@client(PACKAGE, linear=True)
def haiku_lstm(key):
    import haiku as hk

    def forward(x):
        core = hk.LSTM(32)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(16), time_major=False)
        return hk.Linear(8)(y[:, -1])

    return classifier(key, forward, normal(key, 16, 10, 12))


@client(PACKAGE, linear=True)
def haiku_attention(key):
    import haiku as hk

    def forward(x):
        y = hk.LayerNorm(-1, True, True)(x)
        y = hk.MultiHeadAttention(4, 8, w_init_scale=1.0, model_size=32)(y, y, y)
        y = hk.dropout(hk.next_rng_key(), 0.1, y)
        return hk.nets.MLP([64, 8])(jnp.mean(x + y, axis=1))

    return classifier(key, forward, normal(key, 8, 12, 32))
