"""Layers against those of Equinox and JAX, with the same weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx.nn

from ..helpers import HALF, WIDE, slow_but, unchecked_annotations
from .cases import kept_arrays, relative_error

# Of values and gradients against float32, relative to the largest number.
TOLERANCE = {"float16": 8e-3, "bfloat16": 6e-2, "float32": 3e-6}
HIDDEN, HEADS, LENGTH = 16, 4, 6


def gradients(func, *args):
    """Value and gradients of a function, weighted so that no part cancels."""

    def loss(args):
        out = func(*args)
        y = out.astype(jnp.float32)
        weights = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y * weights), out

    grads, out = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(args)
    return [out, *jax.tree.leaves(grads)]


def assert_close(found, expected, tolerance):
    """Each relative to its largest number, gradients to the largest of them all.

    The gradient of a bias of the keys is 0, and what comes out is noise.
    """
    assert [a.shape for a in found] == [b.shape for b in expected]
    assert relative_error(found[0], expected[0]) <= tolerance
    flat = [
        np.concatenate([np.float64(x).ravel() for x in xs[1:]])
        for xs in (found, expected)
    ]
    assert relative_error(*flat) <= tolerance


def call(layer, x, **options):
    return layer(x, **options)


def assert_same(mine, other, *args, dtype="float32", call=call, other_call=None):
    """Values and gradients of a layer in a dtype, and of another one in float32."""
    found = gradients(call, *mpx.cast_tree((mine, *args), dtype))
    assert all(a.dtype == dtype for a in found)
    expected = gradients(other_call or call, other, *args)
    assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "use_bias"), [("float32", True), ("float16", False), ("bfloat16", True)]
)
def test_linear_is_equinox_linear(dtype, use_bias, getkey):
    mine, other = (
        m.Linear(4, 3, use_bias=use_bias, key=getkey()) for m in (mpx.nn, eqx.nn)
    )
    parameters = lambda m: (m.weight, m.bias)  # noqa: E731
    is_leaf = lambda x: x is None  # noqa: E731
    other = eqx.tree_at(parameters, other, parameters(mine), is_leaf=is_leaf)
    x = jax.random.normal(getkey(), (5, 4))
    assert_same(mine, other, x, dtype=dtype, other_call=lambda m, x: jax.vmap(m)(x))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("LayerNorm", (8,), "float32"),
        ("LayerNorm", (3, 8), "float16"),
        ("RMSNorm", (8,), "bfloat16"),
        ("RMSNorm", (3, 8), "float32"),
    ],
)
def test_norms_are_those_of_equinox(name, dtype, shape, getkey):
    options = {} if name == "LayerNorm" else {"use_bias": False}
    mine, other = (getattr(m, name)(shape, **options) for m in (mpx.nn, eqx.nn))
    weight = jax.random.normal(getkey(), shape)
    mine, other = (eqx.tree_at(lambda m: m.weight, m, weight) for m in (mine, other))
    x = jax.random.normal(getkey(), (5, 3, 8))
    each = jax.vmap if len(shape) == 2 else lambda f: jax.vmap(jax.vmap(f))
    assert_same(mine, other, x, dtype=dtype, other_call=lambda m, x: each(m)(x))


class JaxAttention(mpx.nn.MultiheadAttention):
    def _attend(self, x, rate):
        is_causal = self.self_attention_mask_type == "causal"
        return jax.nn.dot_product_attention(
            x.query, x.key, x.value, bias=x.bias, mask=x.mask, is_causal=is_causal
        )


@pytest.fixture
def x(getkey):
    return jax.random.normal(getkey(), (2, LENGTH, HIDDEN))


def attention_pair(key, **options):
    """The attention of `mpx.nn` and the same through JAX's."""
    kinds = mpx.nn.MultiheadAttention, JaxAttention
    return [kind(HIDDEN, HEADS, key=key, **options) for kind in kinds]


OPTIONS = {
    "plain": {},
    "grouped": {"num_gqa_groups": 2, "self_attention_mask_type": "causal"},
    "one group": {"num_gqa_groups": 1, "use_bias": False},
}


@pytest.mark.third_party  # JAX's attention promotes
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        [("plain", "float32"), ("grouped", "bfloat16")],
        [("plain", "float32"), ("grouped", "bfloat16"), ("one group", "float16")],
    ),
)
def test_attention_is_jax_attention(name, dtype, x, getkey):
    assert_same(*attention_pair(getkey(), **OPTIONS[name]), x, dtype=dtype)


@pytest.mark.parametrize(
    "shape",
    [
        (1, HEADS, 1, LENGTH),
        pytest.param((LENGTH, LENGTH), marks=pytest.mark.slow),
        pytest.param((2, LENGTH, LENGTH), marks=pytest.mark.slow),
    ],
)
def test_masks_of_attention(shape, x, getkey):
    mask = jax.random.bernoulli(getkey(), 0.7, shape).at[..., 0].set(True)
    masked = lambda m, x: m(x, mask=mask)  # noqa: E731
    assert_same(*attention_pair(getkey(), **OPTIONS["grouped"]), x, call=masked)


@pytest.mark.third_party  # JAX's attention promotes
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((LENGTH, LENGTH), "float32", marks=pytest.mark.slow),
        ((1, HEADS, LENGTH, LENGTH), "bfloat16"),
    ],
)
def test_a_bias_of_the_scores(shape, dtype, x, getkey):
    mine, other = attention_pair(getkey(), **OPTIONS["grouped"])
    bias = jax.random.normal(getkey(), shape)
    biased = lambda m, x, b: m(x, bias=b)  # noqa: E731
    found = gradients(biased, *mpx.cast_tree((mine, x), dtype), bias)
    expected = gradients(biased, other, x, bias)
    assert found[-1].dtype == jnp.float32 and np.abs(expected[-1]).max() > 0.01
    assert_close(found, expected, TOLERANCE[dtype])
    assert relative_error(found[-1], expected[-1]) <= 2 * TOLERANCE[dtype]
    layer = mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, key=getkey())
    assert jax.jit(lambda m, x, b: (m(x, bias=b) != m(x)).any())(layer, x, bias)


GATED = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "reglu": jax.nn.relu}


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        [("swiglu", "bfloat16")],
        [("swiglu", "bfloat16"), ("geglu", "float32"), ("reglu", "float16")],
    ),
)
def test_gated_perceptrons(name, dtype, x, getkey):
    options = {"activation": GATED[name], "gated_mlp": True}
    layer = mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, **options, key=getkey())

    def expected(layer, x):
        h = x + layer.attention(layer.attention_norm(x))
        n = layer.mlp_norm(h)
        w1, v, w2 = (
            lambda y, part=part: y @ part.weight.T + part.bias.reshape(1, 1, -1)
            for part in (layer.mlp_in, layer.mlp_gate, layer.mlp_out)
        )
        return h + w2(GATED[name](w1(n)) * v(n))

    assert_same(layer, layer, x, dtype=dtype, other_call=expected)
    plain = mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, key=getkey())
    assert plain.mlp_gate is None


def test_a_gate_keeps_its_half_inputs():
    from mpx.nn._recomputed import activate

    x = jnp.ones((4, 8), jnp.bfloat16)
    kept = kept_arrays(lambda x, y: activate(jax.nn.silu, x, y), x, x)
    assert kept == [("bfloat16", (4, 8))] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_equinox_attention_with_the_same_weights(dtype, getkey):
    mine = mpx.nn.MultiheadAttention(HIDDEN, HEADS, use_bias=False, key=getkey())
    other = eqx.nn.MultiheadAttention(HEADS, HIDDEN, key=getkey())
    parts = [f"{name}_proj" for name in ("query", "key", "value", "output")]
    other = eqx.tree_at(
        lambda m: [getattr(m, part).weight for part in parts],
        other,
        [getattr(mine, part.removesuffix("_proj")).weight for part in parts],
    )
    x = jax.random.normal(getkey(), (LENGTH, HIDDEN))
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    run = eqx.filter_jit(lambda m, *x: m(*x, mask=mask))
    found = run(*mpx.cast_tree((mine, x), dtype))
    assert relative_error(found, run(other, x, x, x)) <= TOLERANCE[dtype]


def test_rotary_positions_are_those_of_equinox(getkey):
    mine = mpx.nn.MultiheadAttention(
        HIDDEN, 2, use_bias=False, use_rotary_positions=True, key=getkey()
    )
    rotary = eqx.nn.RotaryPositionalEmbedding(HIDDEN // 2)
    x = jax.random.normal(getkey(), (LENGTH, HIDDEN))

    def expected(x):
        q, k, v = (
            (x @ w.T).reshape(LENGTH, 2, -1)
            for w in (mine.query.weight, mine.key.weight, mine.value.weight)
        )
        q, k = (jax.vmap(rotary, 1, 1)(y) for y in (q, k))
        out = jax.nn.dot_product_attention(q, k, v)
        return out.reshape(LENGTH, HIDDEN) @ mine.output.weight.T

    assert_close(gradients(mine, x), gradients(expected, x), 3e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_rotary_positions_stay_exact_far_out(dtype):
    """Positions are float32: in half precision 2,049 is not even a number."""
    from mpx.nn._recomputed import rotate

    x = jnp.ones((1, 3000, 1, 2), dtype)
    exact = np.cos(2999.0) - np.sin(2999.0)
    assert abs(float(rotate(x, 10_000.0)[0, -1, 0, 0]) - exact) < 4e-3


def test_another_sequence(getkey):
    mine, other = attention_pair(getkey())
    x, y = (jax.random.normal(getkey(), (2, n, HIDDEN)) for n in (3, 5))
    mask = jnp.arange(15).reshape(3, 5) % 4 != 1
    assert_same(mine, other, x, y, call=lambda m, x, y: m(x, y, mask=mask))


def with_dropout():
    options = {"attention_dropout": 0.5, "hidden_dropout": 0.25}
    return mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, **options, key=jax.random.key(0))


def test_dropout_needs_a_key_and_inference_none(x):
    layer = with_dropout()
    with pytest.raises(ValueError, match="needs a `key` for dropout"):
        layer(x)
    with pytest.raises(ValueError, match="MultiheadAttention` needs a `key`"):
        layer.attention(x)
    plain = mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, key=jax.random.key(0))
    np.testing.assert_array_equal(layer(x, inference=True), plain(x))


def test_keys_decide_dropout(x, getkey):
    layer, a, b = with_dropout(), getkey(), getkey()
    np.testing.assert_array_equal(layer(x, key=a), layer(x, key=a))
    assert (layer(x, key=a) != layer(x, key=b)).any()


@pytest.mark.parametrize("dtype", WIDE)
def test_rate_and_scale_of_dropout(dtype, getkey):
    from mpx.nn._recomputed import dropout

    x, key = jnp.ones(20_000, dtype), getkey()
    y, pullback = jax.vjp(lambda x: dropout(x, 0.25, key), x)
    kept = float(jnp.asarray(1 / 0.75, dtype))
    assert y.dtype == dtype and set(np.unique(y.astype("float32"))) == {0.0, kept}
    assert abs(float((y != 0).mean()) - 0.75) < 0.02
    np.testing.assert_array_equal(pullback(x)[0], y)


KEY = jax.random.key(0)


def call_linear(x):
    return mpx.nn.Linear(4, 3, key=KEY)(x)


def attention(hidden=8, heads=4, **options):
    return mpx.nn.MultiheadAttention(hidden, heads, **options, key=KEY)


def call_attention(*args, **options):
    return attention()(jnp.ones((2, 3, 8)), *args, **options)


def transformer(**options):
    return mpx.nn.TransformerLayer(8, 16, 4, **options, key=KEY)


def bad(match, call):
    return pytest.param(match, call, id=match)


MASK = "`mask` of `mpx.nn.MultiheadAttention`"
MASKS = r"must have the shape \(3, 3\), \(2, 3, 3\) or \(2, 4, 3, 3\)"
BIAS = "`bias` of `mpx.nn.MultiheadAttention` must have the shape"
RATE = "at least 0 and below 1"
CUDNN = {"implementation": "cudnn", "attention_dropout": 0.1}
ROTARY = {"heads": 8, "use_rotary_positions": True}


@pytest.mark.parametrize(
    ("match", "call"),
    [
        bad("positive", lambda: mpx.nn.Linear(0, 1, key=KEY)),
        bad("last axis of size 4", lambda: call_linear(jnp.ones(5))),
        bad("last axis of size 4", lambda: call_linear(jnp.ones(()))),
        bad("must be a positive", lambda: mpx.nn.LayerNorm((3, 0))),
        bad(r"last axes of shape \(3,\)", lambda: mpx.nn.RMSNorm(3)(jnp.ones(4))),
        bad("must divide `hidden_size`", lambda: attention(heads=3)),
        bad("divide `num_attention_heads`", lambda: attention(num_gqa_groups=3)),
        bad("must be a positive", lambda: attention(heads=0)),
        bad("an even head size", lambda: attention(**ROTARY)),
        bad("'causal'", lambda: attention(self_attention_mask_type="x")),
        bad("None, 'xla', 'cudnn' or", lambda: attention(implementation="x")),
        bad("does not support dropout by a key", lambda: attention(**CUDNN)),
        bad(RATE, lambda: attention(attention_dropout=1.0)),
        bad(RATE, lambda: transformer(hidden_dropout=-0.1)),
        bad("'layernorm' or", lambda: transformer(layernorm_type="x")),
        bad("sequences of shape", lambda: attention()(jnp.ones(8))),
        bad("equal", lambda: call_attention(jnp.ones((3, 8)))),
        bad(MASKS, lambda: call_attention(mask=jnp.ones((3, 4), bool))),
        bad(BIAS, lambda: call_attention(bias=jnp.ones((2, 4, 1, 2)))),
        bad(MASK, lambda: call_attention(mask=jnp.ones(3, bool))),
    ],
)
def test_bad_input_of_layers(match, call):
    with unchecked_annotations(), pytest.raises(ValueError, match=match):
        call()
