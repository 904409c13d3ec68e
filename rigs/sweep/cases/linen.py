"""Layers, cells and functions of Flax: `flax.linen` and `flax.nnx`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from rigs.sweep.cases.table import Table

_TABLE = Table("linen", nn)
_call = _TABLE.call


def _image(a):
    return a.reshape(2, 8, 8, 8)


def _same(a):
    return a


def _sequence(a):
    return a.reshape(4, 16, 16)


def _layer(name, module, kinds, shape=_same, arity=1, variant="", **options):
    def init(key, *arrays):
        keys = {"params": key, "dropout": key}
        return module.init(keys, *map(shape, arrays), **options)

    def call(variables, *arrays):
        rngs = {"dropout": jax.random.key(0)}
        results, state = module.apply(
            variables,
            *map(shape, arrays),
            **options,
            rngs=rngs,
            mutable=["batch_stats"],
        )
        return results, state

    _TABLE.call(name, call, kinds, arity=arity, init=init, variant=variant)


_NORMS = "plain cancelling near zero"
_layer("Dense", nn.Dense(8), "plain cancelling near")
_layer("DenseGeneral", nn.DenseGeneral((4, 4)), "plain near")
_layer("Einsum", nn.Einsum((16, 4), "bi,ij->bj"), "plain near")
_layer("LayerNorm", nn.LayerNorm(), _NORMS)
_layer("LayerNorm", nn.LayerNorm(use_fast_variance=False), _NORMS, variant="slow")
_layer("RMSNorm", nn.RMSNorm(), _NORMS)
_layer("GroupNorm", nn.GroupNorm(4), _NORMS, _image)
_layer("InstanceNorm", nn.InstanceNorm(), _NORMS, _image)
_layer("BatchNorm", nn.BatchNorm(False), _NORMS)
_layer("BatchNorm", nn.BatchNorm(True), "plain cancelling", variant="inference")
_layer("Conv", nn.Conv(8, (3, 3)), "plain near cancelling", _image)
_layer(
    "Conv", nn.Conv(8, (3, 3), feature_group_count=8), "plain", _image, variant="deep"
)
_layer("ConvTranspose", nn.ConvTranspose(8, (3, 3)), "plain near", _image)
_layer("ConvLocal", nn.ConvLocal(4, (3,)), "plain", _sequence)
_layer("PReLU", nn.PReLU(), "plain cancelling")
_layer("Dropout", nn.Dropout(0.3, deterministic=False), "plain cancelling")
_call(
    "BatchApply",
    lambda a: nn.BatchApply(jax.nn.standardize)(_sequence(a)),
    "cancelling",
)
_layer(
    "Sequential", nn.Sequential([nn.Dense(16), nn.relu, nn.LayerNorm()]), "plain near"
)
_ATTENTION = dict(num_heads=2, qkv_features=16)
for _name in ("MultiHeadAttention", "MultiHeadDotProductAttention", "SelfAttention"):
    _layer(_name, getattr(nn, _name)(**_ATTENTION), "plain near cancelling", _sequence)


class _Normed(nn.Module):
    kind: type[nn.Module]

    @nn.compact
    def __call__(self, a):
        extra = {"update_stats": False} if self.kind is nn.SpectralNorm else {}
        return self.kind(nn.Dense(8))(a, **extra)


_layer("WeightNorm", _Normed(nn.WeightNorm), "plain near")
_layer("SpectralNorm", _Normed(nn.SpectralNorm), "plain near")

for _name in "GRUCell LSTMCell OptimizedLSTMCell MGUCell SimpleCell".split():
    _cell = getattr(nn, _name)(16)
    _layer(_name, nn.RNN(_cell), "plain near cancelling", _sequence, variant="scan")
_layer("RNN", nn.RNN(nn.GRUCell(16), reverse=True), "plain", _sequence)
_layer(
    "Bidirectional",
    nn.Bidirectional(nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.GRUCell(8))),
    "plain near",
    _sequence,
)
_layer(
    "ConvLSTMCell",
    nn.RNN(nn.ConvLSTMCell(4, (3, 3))),
    "plain near",
    lambda a: a.reshape(2, 4, 4, 4, 8),
)


def _long_memory(variables, a):
    """Runs a GRU whose update gate has a bias of 6."""
    cell = variables["params"]["cell"]
    cell = cell | {"iz": cell["iz"] | {"bias": cell["iz"]["bias"] + 6}}
    return nn.RNN(nn.GRUCell(16)).apply({"params": {"cell": cell}}, _sequence(a))


_call(
    "GRUCell",
    _long_memory,
    "plain near",
    init=lambda key, a: nn.RNN(nn.GRUCell(16)).init(key, _sequence(a)),
    variant="memory",
)
_call(
    "Embed",
    lambda p, a: nn.Embed(4, 16).apply(p, jnp.zeros(4096, int)) * a[:1],
    "reads",
    init=lambda key, a: nn.Embed(4, 16).init(key, jnp.zeros(4, int)),
)
_call(
    "Embed",
    lambda p, a: nn.Embed(32, 16).apply(p, a, method=nn.Embed.attend),
    "plain near",
    init=lambda key, a: nn.Embed(32, 16).init(key, jnp.zeros(4, int)),
    variant="attend",
)
_TABLE.each(
    "avg_pool max_pool",
    lambda f, a: f(_image(a), (5, 5), padding="SAME"),
    "plain ties cancelling zero",
)
_call(
    "pool",
    lambda a: nn.pool(_image(a), -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID"),
    "ties",
)
_call(
    "dot_product_attention",
    lambda q, k, v: nn.dot_product_attention(
        *(t.reshape(4, 16, 2, 8) for t in (q, k, v))
    ),
    "plain near cancelling",
    arity=3,
)
_call(
    "dot_product_attention_weights",
    lambda q, k: nn.dot_product_attention_weights(
        *(t.reshape(4, 16, 2, 8) for t in (q, k))
    ),
    "plain near",
    arity=2,
)

_NNX = Table("nnx", nnx)


def _module(name, make, kinds, shape=_same):
    def init(key, a):
        return nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)[1]

    def call(state, a):
        graph, _, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        return nnx.merge(graph, state, rest)(shape(a))

    _NNX.call(name, call, kinds, init=init)


_module("Linear", lambda r: nnx.Linear(16, 8, rngs=r), "plain cancelling near")
_module("LinearGeneral", lambda r: nnx.LinearGeneral(16, (4, 4), rngs=r), "plain")
_module("Einsum", lambda r: nnx.Einsum("bi,ij->bj", (16, 4), rngs=r), "plain")
_module("LayerNorm", lambda r: nnx.LayerNorm(16, rngs=r), _NORMS)
_module("RMSNorm", lambda r: nnx.RMSNorm(16, rngs=r), _NORMS)
_module("GroupNorm", lambda r: nnx.GroupNorm(8, 4, rngs=r), _NORMS, _image)
_module("InstanceNorm", lambda r: nnx.InstanceNorm(8, rngs=r), _NORMS, _image)
_module("BatchNorm", lambda r: nnx.BatchNorm(16, rngs=r), _NORMS)
_module("Conv", lambda r: nnx.Conv(8, 8, (3, 3), rngs=r), "plain near", _image)
_module(
    "ConvTranspose", lambda r: nnx.ConvTranspose(8, 8, (3, 3), rngs=r), "plain", _image
)
_module("LoRA", lambda r: nnx.LoRA(16, 4, 8, rngs=r), "plain")
_module("LoRALinear", lambda r: nnx.LoRALinear(16, 8, lora_rank=4, rngs=r), "plain")
_module("PReLU", lambda r: nnx.PReLU(), "cancelling")
_module(
    "MultiHeadAttention",
    lambda r: nnx.MultiHeadAttention(2, 16, decode=False, rngs=r),
    "plain near cancelling",
    _sequence,
)
for _cell in (nnx.GRUCell, nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.SimpleCell):
    _module(
        _cell.__name__,
        lambda r, c=_cell: nnx.RNN(c(16, 16, rngs=r)),
        "plain near",
        _sequence,
    )

CASES = [*_TABLE.cases, *_NNX.cases]
