"""Layers against those of Equinox and JAX, with the same weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
import mpx.nn

from ..helpers import HALF, WIDE, slow_but
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


@pytest.mark.parametrize(
    ("dtype", "use_bias"), [("float32", True), ("float16", False), ("bfloat16", True)]
)
def test_linear_is_equinox_linear(dtype, use_bias, getkey):
    mine = mpx.nn.Linear(4, 3, use_bias=use_bias, key=getkey())
    other = eqx.nn.Linear(4, 3, use_bias=use_bias, key=getkey())
    other = eqx.tree_at(
        lambda m: (m.weight, m.bias),
        other,
        (mine.weight, mine.bias),
        is_leaf=lambda x: x is None,
    )
    x = jax.random.normal(getkey(), (5, 4))
    found = gradients(lambda m, x: m(x), *mpx.cast_tree((mine, x), dtype))
    expected = gradients(lambda m, x: jax.vmap(m)(x), other, x)
    assert all(a.dtype == dtype for a in found)
    assert_close(found, expected, TOLERANCE[dtype])


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
    call = jax.vmap if len(shape) == 2 else lambda f: jax.vmap(jax.vmap(f))
    found = gradients(lambda m, x: m(x), *mpx.cast_tree((mine, x), dtype))
    expected = gradients(lambda m, x: call(m)(x), other, x)
    assert_close(found, expected, TOLERANCE[dtype])


class JaxAttention(mpx.nn.MultiheadAttention):
    """The same layer around JAX's attention."""

    def _attend(self, x, rate):
        is_causal = self.self_attention_mask_type == "causal"
        return jax.nn.dot_product_attention(
            x.query, x.key, x.value, bias=x.bias, mask=x.mask, is_causal=is_causal
        )


def attention_pair(key, dtype, **options):
    """The attention of `mpx.nn` and the same through JAX's."""
    mine, other = (
        kind(HIDDEN, HEADS, key=key, **options)
        for kind in (mpx.nn.MultiheadAttention, JaxAttention)
    )
    return mpx.cast_tree(mine, dtype), other


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
def test_attention_is_jax_attention(name, dtype, getkey):
    mine, other = attention_pair(getkey(), dtype, **OPTIONS[name])
    x = jax.random.normal(getkey(), (2, LENGTH, HIDDEN))
    found = gradients(lambda m, x: m(x), mine, x.astype(dtype))
    expected = gradients(lambda m, x: m(x), other, x)
    assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "shape",
    [
        (1, HEADS, 1, LENGTH),
        pytest.param((LENGTH, LENGTH), marks=pytest.mark.slow),
        pytest.param((2, LENGTH, LENGTH), marks=pytest.mark.slow),
    ],
)
def test_masks(shape, getkey):
    options = {"num_gqa_groups": 2, "self_attention_mask_type": "causal"}
    mine, other = attention_pair(getkey(), "float32", **options)
    x = jax.random.normal(getkey(), (2, LENGTH, HIDDEN))
    mask = jax.random.bernoulli(getkey(), 0.7, shape).at[..., 0].set(True)
    found = gradients(lambda m, x: m(x, mask=mask), mine, x)
    expected = gradients(lambda m, x: m(x, mask=mask), other, x)
    assert_close(found, expected, TOLERANCE["float32"])


@pytest.mark.third_party  # JAX's attention promotes
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((LENGTH, LENGTH), "float32", marks=pytest.mark.slow),
        ((1, HEADS, LENGTH, LENGTH), "bfloat16"),
    ],
)
def test_a_bias_of_the_scores(shape, dtype, getkey):
    options = {"num_gqa_groups": 2, "self_attention_mask_type": "causal"}
    mine, other = attention_pair(getkey(), dtype, **options)
    x = jax.random.normal(getkey(), (2, LENGTH, HIDDEN))
    bias = jax.random.normal(getkey(), shape)
    found = gradients(lambda m, x, b: m(x, bias=b), mine, x.astype(dtype), bias)
    expected = gradients(lambda m, x, b: m(x, bias=b), other, x, bias)
    assert found[-1].dtype == jnp.float32 and np.abs(expected[-1]).max() > 0.01
    assert_close(found, expected, TOLERANCE[dtype])
    assert relative_error(found[-1], expected[-1]) <= 2 * TOLERANCE[dtype]
    layer = mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, key=getkey())
    call = jax.jit(lambda m, x, b: (m(x, bias=b) != m(x)).any())
    assert call(layer, x, bias)


GATED = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu, "reglu": jax.nn.relu}


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        [("swiglu", "bfloat16")],
        [("swiglu", "bfloat16"), ("geglu", "float32"), ("reglu", "float16")],
    ),
)
def test_gated_perceptrons(name, dtype, getkey):
    layer = mpx.nn.TransformerLayer(
        HIDDEN, 32, HEADS, activation=GATED[name], gated_mlp=True, key=getkey()
    )
    x = jax.random.normal(getkey(), (2, LENGTH, HIDDEN))

    def expected(layer, x):
        h = x + layer.attention(layer.attention_norm(x))
        n = layer.mlp_norm(h)
        w1, v, w2 = (
            lambda y, part=part: y @ part.weight.T + part.bias.reshape(1, 1, -1)
            for part in (layer.mlp_in, layer.mlp_gate, layer.mlp_out)
        )
        return h + w2(GATED[name](w1(n)) * v(n))

    found = gradients(lambda m, x: m(x), *mpx.cast_tree((layer, x), dtype))
    assert_close(found, gradients(expected, layer, x), TOLERANCE[dtype])
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
    names = ("query", "key", "value", "output")
    other = eqx.tree_at(
        lambda m: [getattr(m, f"{n}_proj").weight for n in names],
        other,
        [getattr(mine, n).weight for n in names],
    )
    x = jax.random.normal(getkey(), (LENGTH, HIDDEN))
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    half, call = (
        mpx.cast_tree(mine, dtype),
        eqx.filter_jit(lambda m, *x, **o: m(*x, **o)),
    )
    found, expected = (
        call(half, x.astype(dtype), mask=mask),
        call(other, *[x] * 3, mask=mask),
    )
    assert relative_error(found, expected) <= TOLERANCE[dtype]


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
    mine, other = attention_pair(getkey(), "float32")
    x, y = (jax.random.normal(getkey(), (2, n, HIDDEN)) for n in (3, 5))
    mask = jnp.arange(15).reshape(3, 5) % 4 != 1
    call = lambda m, x, y: m(x, y, mask=mask)  # noqa: E731
    assert_close(gradients(call, mine, x, y), gradients(call, other, x, y), 3e-6)


class TestDropout:
    def layer(self, **options):
        return mpx.nn.TransformerLayer(
            HIDDEN,
            32,
            HEADS,
            attention_dropout=0.5,
            hidden_dropout=0.25,
            key=jax.random.key(0),
            **options,
        )

    def test_it_needs_a_key_and_inference_none(self, getkey):
        layer, x = self.layer(), jax.random.normal(getkey(), (LENGTH, HIDDEN))
        with pytest.raises(ValueError, match="needs a `key` for dropout"):
            layer(x)
        with pytest.raises(ValueError, match="MultiheadAttention` needs a `key`"):
            layer.attention(x)
        plain = mpx.nn.TransformerLayer(HIDDEN, 32, HEADS, key=jax.random.key(0))
        np.testing.assert_array_equal(layer(x, inference=True), plain(x))

    def test_keys_decide(self, getkey):
        layer, x = self.layer(), jax.random.normal(getkey(), (LENGTH, HIDDEN))
        a, b = getkey(), getkey()
        np.testing.assert_array_equal(layer(x, key=a), layer(x, key=a))
        assert (layer(x, key=a) != layer(x, key=b)).any()

    @pytest.mark.parametrize("dtype", WIDE)
    def test_rate_and_scale(self, dtype, getkey):
        from mpx.nn._recomputed import dropout

        x = jnp.ones(20_000, dtype)
        key = getkey()
        y, pullback = jax.vjp(lambda x: dropout(x, 0.25, key), x)
        assert y.dtype == dtype and set(np.unique(y.astype("float32"))) == {
            0.0,
            float(jnp.asarray(1 / 0.75, dtype)),
        }
        assert abs(float((y != 0).mean()) - 0.75) < 0.02
        np.testing.assert_array_equal(pullback(x)[0], y)


def call_linear(x):
    return mpx.nn.Linear(4, 3, key=jax.random.key(0))(x)


def attention(**options):
    options = {"hidden_size": 8, "num_attention_heads": 4, **options}
    return mpx.nn.MultiheadAttention(**options, key=jax.random.key(0))


def transformer(**options):
    return mpx.nn.TransformerLayer(8, 16, 4, **options, key=jax.random.key(0))


X = np.ones((2, 3, 8), np.float32)
BAD = {
    "Linear size": (lambda: mpx.nn.Linear(0, 1, key=jax.random.key(0)), "positive"),
    "Linear input": (lambda: call_linear(jnp.ones(5)), "last axis of size 4"),
    "Linear scalar": (lambda: call_linear(jnp.ones(())), "last axis of size 4"),
    "norm size": (lambda: mpx.nn.LayerNorm((3, 0)), "must be a positive"),
    "norm input": (
        lambda: mpx.nn.RMSNorm(3)(jnp.ones(4)),
        r"last axes of shape \(3,\)",
    ),
    "heads": (lambda: attention(num_attention_heads=3), "must divide `hidden_size`"),
    "groups": (lambda: attention(num_gqa_groups=3), "divide `num_attention_heads`"),
    "no heads": (lambda: attention(num_attention_heads=0), "must be a positive"),
    "odd rotary": (
        lambda: attention(num_attention_heads=8, use_rotary_positions=True),
        "an even head size",
    ),
    "mask type": (lambda: attention(self_attention_mask_type="x"), "'causal'"),
    "implementation": (lambda: attention(implementation="x"), "None, 'xla' or"),
    "the kernel and dropout": (
        lambda: attention(implementation="cudnn", attention_dropout=0.1),
        "does not support dropout by a key",
    ),
    "rate": (lambda: attention(attention_dropout=1.0), "at least 0 and below 1"),
    "rate of layer": (
        lambda: transformer(hidden_dropout=-0.1),
        "at least 0 and below 1",
    ),
    "norm type": (lambda: transformer(layernorm_type="x"), "'layernorm' or"),
    "rank": (lambda: attention()(jnp.ones(8)), "sequences of shape"),
    "sequences": (lambda: attention()(jnp.asarray(X), jnp.ones((3, 8))), "equal"),
    "mask shape": (
        lambda: attention()(jnp.asarray(X), mask=jnp.ones((3, 4), bool)),
        r"must have the shape \(3, 3\), \(2, 3, 3\) or \(2, 4, 3, 3\)",
    ),
    "bias shape": (
        lambda: attention()(jnp.asarray(X), bias=jnp.ones((2, 4, 1, 2))),
        "`bias` of `mpx.nn.MultiheadAttention` must have the shape",
    ),
    "mask rank": (
        lambda: attention()(jnp.asarray(X), mask=jnp.ones(3, bool)),
        "`mask` of `mpx.nn.MultiheadAttention`",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    from ..helpers import unchecked_annotations

    call, match = BAD[name]
    with unchecked_annotations(), pytest.raises(ValueError, match=match):
        call()
