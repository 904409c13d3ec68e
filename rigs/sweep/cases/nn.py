"""Functions of `jax.nn`."""

import jax

from rigs.sweep.cases.table import Table

_TABLE = Table("nn", jax.nn)
_add, _call = _TABLE.add, _TABLE.call

_add("celu elu selu gelu silu swish mish", "plain near cancelling")
_add("leaky_relu relu squareplus softplus", "plain cancelling zero")
_add("relu6 hard_sigmoid hard_silu hard_swish hard_tanh", "plain near ties")
_add("log_sigmoid sigmoid tanh soft_sign sparse_plus", "plain near wide")
_add("sparse_sigmoid", "plain ties")
_call("log1mexp", lambda a: jax.nn.log1mexp(a), "plain near", domain="positive")
_add("identity", "cancelling")
_call("gelu", lambda a: jax.nn.gelu(a, approximate=False), "plain near")
_call("sigmoid", lambda a: jax.nn.sigmoid(a + 6), "plain ties")
_call("sigmoid", lambda a: 1 - jax.nn.sigmoid(a + 6), "plain")
_add("glu", "plain cancelling near")
_add("softmax log_softmax", "plain cancelling ties one long")
_add("logsumexp logmeanexp", "plain cancelling one long", axis=-1)
_add("standardize", "plain cancelling near zero")
_call("one_hot", lambda a: jax.nn.one_hot(a, 1300), "integers")
_call(
    "dot_product_attention",
    lambda q, k, v: jax.nn.dot_product_attention(
        *(t.reshape(4, 16, 2, 8) for t in (q, k, v))
    ),
    "plain near cancelling",
    arity=3,
)
_call(
    "dot_product_attention",
    lambda q, k, v: jax.nn.dot_product_attention(
        *(t.reshape(4, 16, 2, 8) for t in (q, k, v)), is_causal=True
    ),
    "plain ties",
    arity=3,
    variant="causal",
)
_call("softmax", lambda a: jax.nn.softmax(a, where=a > 99.9), "cancelling")
_call(
    "softmax",
    lambda a, b: jax.nn.softmax(a / 0.07, -1) * b,
    "plain near",
    arity=2,
    variant="temperature",
)

CASES = _TABLE.cases
