"""Layers, cells and functions of Haiku."""

import haiku as hk
import jax
import jax.numpy as jnp

from rigs.sweep.cases.table import Table

_TABLE = Table("haiku", hk)
_NORMS = "plain cancelling near zero"


def _same(a):
    return a


def _image(a):
    return a.reshape(2, 8, 8, 8)


def _volume(a):
    return a.reshape(2, 4, 4, 4, 8)


def _sequence(a):
    return a.reshape(4, 16, 16)


def _layer(name, make, kinds, shape=_same, variant="", apply=None):
    apply = apply or (lambda module, a: module(a))
    transformed = hk.transform_with_state(lambda a: apply(make(), shape(a)))

    def call(params, a):
        results, state = transformed.apply(*params, jax.random.key(0), a)
        return results, state

    _TABLE.call(name, call, kinds, init=transformed.init, variant=variant)


_layer("Linear", lambda: hk.Linear(8), "plain cancelling near")
_layer("Bias", lambda: hk.Bias(), "cancelling")
_layer("LayerNorm", lambda: hk.LayerNorm(-1, True, True), _NORMS)
_layer("RMSNorm", lambda: hk.RMSNorm(-1), _NORMS)
_layer("GroupNorm", lambda: hk.GroupNorm(4), _NORMS, _image)
_layer("InstanceNorm", lambda: hk.InstanceNorm(True, True), _NORMS, _image)
_layer(
    "BatchNorm",
    lambda: hk.BatchNorm(True, True, 0.9),
    _NORMS,
    apply=lambda module, a: module(a, is_training=True),
)
_layer(
    "ExponentialMovingAverage", lambda: hk.ExponentialMovingAverage(0.999), "cancelling"
)
_layer("Sequential", lambda: hk.Sequential([hk.Linear(16), jnp.tanh]), "plain")
_layer("Flatten", lambda: hk.Flatten(), "integers")
_layer("Reshape", lambda: hk.Reshape((4, 4)), "integers")
_layer("BatchApply", lambda: hk.BatchApply(hk.Linear(8)), "plain", _sequence)
_layer(
    "MultiHeadAttention",
    lambda: hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling()),
    "plain near cancelling",
    _sequence,
    apply=lambda m, a: m(a, a, a),
)
_layer(
    "Embed",
    lambda: hk.Embed(4, 16),
    "reads",
    apply=lambda m, a: m(jnp.zeros(4096, int)) * a[:1],
)
_layer("SpectralNorm", lambda: hk.SpectralNorm(), "plain near")
_layer("Conv1D", lambda: hk.Conv1D(4, 3), "plain near", _sequence)
_layer("Conv2D", lambda: hk.Conv2D(4, 3), "plain near cancelling", _image)
_layer("Conv3D", lambda: hk.Conv3D(4, 3), "plain", _volume)
_layer("ConvND", lambda: hk.ConvND(2, 4, 3), "plain", _image)
_layer("Conv1DTranspose", lambda: hk.Conv1DTranspose(4, 3), "plain", _sequence)
_layer("Conv2DTranspose", lambda: hk.Conv2DTranspose(4, 3), "plain", _image)
_layer("Conv3DTranspose", lambda: hk.Conv3DTranspose(4, 3), "plain", _volume)
_layer("ConvNDTranspose", lambda: hk.ConvNDTranspose(2, 4, 3), "plain", _image)
_layer("DepthwiseConv1D", lambda: hk.DepthwiseConv1D(1, 3), "plain", _sequence)
_layer("DepthwiseConv2D", lambda: hk.DepthwiseConv2D(1, 3), "plain near", _image)
_layer("DepthwiseConv2D", lambda: hk.DepthwiseConv2D(1, 1), "cancelling", _image, "one")
_layer("DepthwiseConv3D", lambda: hk.DepthwiseConv3D(1, 3), "plain", _volume)
_layer(
    "SeparableDepthwiseConv2D",
    lambda: hk.SeparableDepthwiseConv2D(1, 3),
    "plain",
    _image,
)
for _pool in (hk.AvgPool, hk.MaxPool):
    _layer(
        _pool.__name__,
        lambda c=_pool: c((3, 3, 1), (1, 1, 1), "SAME"),
        "ties cancelling",
        _image,
    )
_layer(
    "one_hot", lambda: lambda a: hk.one_hot(jnp.round(a).astype(int), 1300), "integers"
)
_TABLE.each(
    "avg_pool max_pool",
    lambda f, a: f(_image(a), (5, 5, 1), (1, 1, 1), "SAME"),
    "ties cancelling zero",
)


def _unroll(core, a):
    return hk.dynamic_unroll(core, a, core.initial_state(a.shape[1]))[0]


_layer("GRU", lambda: hk.GRU(16), "plain near cancelling", _sequence, apply=_unroll)
_layer(
    "GRU",
    lambda: hk.GRU(16, b_init=hk.initializers.Constant(6.0)),
    "plain near",
    _sequence,
    "memory",
    _unroll,
)
_layer("LSTM", lambda: hk.LSTM(16), "plain near cancelling", _sequence, apply=_unroll)
_layer("VanillaRNN", lambda: hk.VanillaRNN(16), "plain near", _sequence, apply=_unroll)
_layer(
    "DeepRNN",
    lambda: hk.DeepRNN([hk.GRU(16), jnp.tanh, hk.LSTM(8)]),
    "plain",
    _sequence,
    apply=_unroll,
)
_layer(
    "IdentityCore", lambda: hk.IdentityCore(), "cancelling", _sequence, apply=_unroll
)
_layer(
    "ResetCore",
    lambda: hk.ResetCore(hk.GRU(16)),
    "plain",
    _sequence,
    apply=lambda core, a: hk.dynamic_unroll(
        core, (a, jnp.zeros(a.shape[:2], bool)), core.initial_state(a.shape[1])
    )[0],
)
_layer(
    "deep_rnn_with_skip_connections",
    lambda: hk.deep_rnn_with_skip_connections([hk.GRU(8), hk.GRU(8)]),
    "plain",
    _sequence,
    apply=_unroll,
)
_layer(
    "static_unroll",
    lambda: hk.GRU(8),
    "plain near",
    _sequence,
    apply=lambda core, a: hk.static_unroll(core, a, core.initial_state(a.shape[1]))[0],
)
_layer(
    "dynamic_unroll",
    lambda: hk.LSTM(8),
    "plain",
    _sequence,
    apply=lambda core, a: hk.dynamic_unroll(
        core, a, core.initial_state(a.shape[1]), reverse=True
    )[0],
)
for _n, _shape in ((1, (4, 4, 8, 8)), (2, (4, 2, 4, 4, 8)), (3, (4, 2, 4, 2, 2, 8))):
    _layer(
        f"Conv{_n}DLSTM",
        lambda n=_n, s=_shape: getattr(hk, f"Conv{n}DLSTM")(s[2:-1], 4, 3),
        "plain near" if _n == 2 else "plain",
        lambda a, s=_shape: a.reshape(s),
        apply=_unroll,
    )
_layer("dropout", lambda: lambda a: hk.dropout(jax.random.key(0), 0.3, a), "cancelling")
_layer("expand_apply", lambda: hk.expand_apply(jax.nn.standardize), "cancelling")
_layer(
    "layer_stack",
    lambda: hk.layer_stack(3)(lambda a: a + jnp.tanh(hk.Linear(16)(a))),
    "plain near",
)
_layer("remat", lambda: hk.remat(lambda a: jax.nn.standardize(a)), "cancelling")
_layer(
    "scan",
    lambda: lambda a: hk.scan(lambda s, x: (0.99 * s + x,) * 2, a[0], a),
    "plain cancelling",
)
_layer("map", lambda: lambda a: hk.map(jnp.var, a), "cancelling")
_layer(
    "fori_loop",
    lambda: lambda a: hk.fori_loop(0, 8, lambda i, s: s * 0.999 + a, a),
    "cancelling",
)
_layer(
    "cond", lambda: lambda a: hk.cond(a[0, 0] > -10, jnp.var, jnp.mean, a), "cancelling"
)
_layer("switch", lambda: lambda a: hk.switch(1, [jnp.sum, jnp.var], a), "cancelling")
_layer("vmap", lambda: hk.vmap(jnp.var, split_rng=False), "cancelling")
_layer("grad", lambda: hk.grad(lambda a: jnp.sum(jnp.sin(a))), "cancelling")
_layer(
    "value_and_grad",
    lambda: hk.value_and_grad(lambda a: jnp.sum(jnp.log(a))),
    "cancelling",
)

CASES = _TABLE.cases
