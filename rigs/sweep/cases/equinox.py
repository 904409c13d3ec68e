"""Layers and cells of Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp

from rigs.sweep.cases.table import Table

_TABLE = Table("equinox", eqx.nn)
_NORMS = "plain cancelling near zero"


def _same(a):
    return a


def _image(a):
    return a.reshape(2, 8, 8, 8)


def _sequence(a):
    return a.reshape(4, 16, 16)


def _layer(name, make, kinds, shape=_same, variant="", apply=None):
    apply = apply or (lambda module, a: jax.vmap(module)(a))

    def init(key, *arrays):
        return eqx.filter(make(key), eqx.is_inexact_array)

    def call(params, *arrays):
        static = eqx.filter(make(jax.random.key(0)), eqx.is_inexact_array, inverse=True)
        return apply(eqx.combine(params, static), *map(shape, arrays))

    _TABLE.call(name, call, kinds, init=init, variant=variant)


nn = eqx.nn
_layer("Linear", lambda k: nn.Linear(16, 8, key=k), "plain cancelling near")
_layer("MLP", lambda k: nn.MLP(16, 8, 16, 2, key=k), "plain near")
_layer(
    "Sequential",
    lambda k: nn.Sequential([nn.Linear(16, 16, key=k), nn.Lambda(jnp.tanh)]),
    "plain",
)
_layer("Lambda", lambda k: nn.Lambda(jax.nn.gelu), "near")
_layer("Identity", lambda k: nn.Identity(), "cancelling")
_layer("PReLU", lambda k: nn.PReLU(), "cancelling plain")
_layer("Dropout", lambda k: nn.Dropout(0.3, inference=True), "cancelling")
_layer("LayerNorm", lambda k: nn.LayerNorm(16), _NORMS)
_layer("RMSNorm", lambda k: nn.RMSNorm(16), _NORMS)
_layer("GroupNorm", lambda k: nn.GroupNorm(4, 8), _NORMS, _image)
_layer(
    "RotaryPositionalEmbedding",
    lambda k: nn.RotaryPositionalEmbedding(16),
    "plain cancelling",
    _sequence,
)
_layer(
    "RotaryPositionalEmbedding",
    lambda k: nn.RotaryPositionalEmbedding(2),
    "long",
    lambda a: a.reshape(2, 4096, 2),
)
_layer(
    "SpectralNorm",
    lambda k: (
        eqx.nn.make_with_state(nn.SpectralNorm)(
            nn.Linear(16, 8, key=k), "weight", key=k
        )[0].layer
    ),
    "plain",
)
_layer("WeightNorm", lambda k: nn.WeightNorm(nn.Linear(16, 8, key=k)), "plain near")
_layer(
    "MultiheadAttention",
    lambda k: nn.MultiheadAttention(2, 16, key=k),
    "plain near cancelling",
    _sequence,
    apply=lambda module, a: jax.vmap(lambda s: module(s, s, s))(a),
)


def _batch_norm(kinds, mode):
    def call(params, a):
        module, state = nn.make_with_state(nn.BatchNorm)(16, "batch", mode=mode)
        static = eqx.filter(module, eqx.is_inexact_array, inverse=True)
        module = eqx.combine(params, static)
        over_rows = jax.vmap(module, (0, None), (0, None), axis_name="batch")
        return over_rows(a, state)[0]

    def init(key, a):
        module = nn.make_with_state(nn.BatchNorm)(16, "batch", mode=mode)[0]
        return eqx.filter(module, eqx.is_inexact_array)

    _TABLE.call("BatchNorm", call, kinds, init=init, variant=mode)


_batch_norm(_NORMS, "batch")
_batch_norm("plain", "ema")

_SHAPES = {1: (8, 8, 16), 2: (2, 8, 8, 8), 3: (2, 8, 4, 4, 4)}
for _n, _shape in _SHAPES.items():
    _reshape = lambda a, s=_shape: a.reshape(s)  # noqa: E731
    _layer(
        f"Conv{_n}d", lambda k, n=_n: nn.Conv(n, 8, 4, 3, key=k), "plain near", _reshape
    )
    _layer(
        f"ConvTranspose{_n}d",
        lambda k, n=_n: nn.ConvTranspose(n, 8, 4, 3, key=k),
        "plain",
        _reshape,
    )
    for _pool in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
        _class = getattr(nn, f"{_pool}{_n}d")
        _options = {} if _pool.startswith("Adaptive") else {"padding": 1}
        _layer(
            f"{_pool}{_n}d",
            lambda k, c=_class, o=_options: c(3, **o),
            "ties cancelling",
            _reshape,
        )
_layer("Conv", lambda k: nn.Conv(2, 8, 8, 3, groups=8, key=k), "plain", _image, "deep")
_layer(
    "ConvTranspose", lambda k: nn.ConvTranspose(2, 8, 8, 3, 2, key=k), "plain", _image
)
_layer("Pool", lambda k: nn.Pool(0.0, jax.lax.add, 2, 2), "cancelling", _image)
_layer("AdaptivePool", lambda k: nn.AdaptivePool(3, 2, jnp.mean), "cancelling", _image)
_layer(
    "Embedding",
    lambda k: nn.Embedding(4, 16, key=k),
    "reads",
    apply=lambda module, a: jax.vmap(module)(jnp.zeros(4096, int)) * a[:1],
)


def _unroll(cell, a):
    state = (jnp.zeros(16),) * 2 if isinstance(cell, nn.LSTMCell) else jnp.zeros(16)

    def step(state, x):
        state = cell(x, state)
        return state, state

    return jax.vmap(lambda s: jax.lax.scan(step, state, s)[1])(a)


def _long_memory(cell, a):
    bias = cell.bias + 6 * (jnp.arange(48) // 16 == 1)
    return _unroll(eqx.tree_at(lambda c: c.bias, cell, bias), a)


_layer(
    "GRUCell",
    lambda k: nn.GRUCell(16, 16, key=k),
    "plain near cancelling",
    _sequence,
    apply=_unroll,
)
_layer(
    "GRUCell",
    lambda k: nn.GRUCell(16, 16, key=k),
    "plain near",
    _sequence,
    "memory",
    _long_memory,
)
_layer(
    "LSTMCell",
    lambda k: nn.LSTMCell(16, 16, key=k),
    "plain near cancelling",
    _sequence,
    apply=_unroll,
)

CASES = _TABLE.cases
