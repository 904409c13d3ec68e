"""Numbers that autocast must reach on unmodified blocks, and in sums over many uses.

Two blocks of Flax Linen's own layers, of AUTOCAST's sizes: one of a Vision Transformer
(batch 8, 197 tokens, width 384), and one of a GPT with a loss over 4096 tokens. Errors
are relative, by the global norm, against float32.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx

from .counting import (
    BF16,
    count_casts,
    count_products,
    kept_by,
    named,
    primitives,
    relative_error,
)

STREAMS = ("full", "half")


class Block(nn.Module):
    is_causal: bool = False

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0]) if self.is_causal else None
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=6)(y, mask=mask)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))


class Gpt(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(256, 384, embedding_init=nn.initializers.normal(0.02))
        x = Block(is_causal=True)(embed(tokens))
        return embed.attend(nn.LayerNorm()(x))


@functools.cache
def vit():
    key = jax.random.key(0)
    module, x = Block(), jax.random.normal(key, (8, 197, 384))
    return (
        lambda weights, x: jnp.mean(jnp.square(module.apply(weights, x))),
        jax.jit(module.init)(key, x),
        x,
    )


@functools.cache
def gpt():
    keys = jax.random.split(jax.random.key(0))
    module, tokens = Gpt(), jax.random.randint(keys[0], (16, 257), 0, 256)

    def loss(weights, tokens):
        logits = module.apply(weights, tokens[:, :-1])
        picked = jnp.take_along_axis(
            nn.log_softmax(logits), tokens[:, 1:, None], axis=-1
        )
        return -jnp.mean(picked)

    return loss, jax.jit(module.init)(keys[1], tokens[:, :-1]), tokens


@functools.cache
def in_float32(of):
    loss, *args = of()
    return jax.jit(jax.value_and_grad(loss))(*args)


def errors(of, **options):
    loss, *args = of()
    expected, expected_grads = in_float32(of)
    cast = mpx.autocast(loss, **options)
    value, grads = jax.jit(jax.value_and_grad(cast))(*args)
    assert value.dtype == np.float32
    return abs(value - expected) / abs(expected), relative_error(grads, expected_grads)


@pytest.mark.third_party
@pytest.mark.parametrize("stream", STREAMS)
def test_casts_and_products_of_a_block(stream):
    loss, *args = gpt()
    cast = mpx.autocast(loss, residual_stream=stream)
    assert count_casts(cast, *args) <= 29
    # Around a bias and gelu, which one loop computes, are casts that cost no memory.
    assert count_casts(jax.grad(cast), *args) <= 73
    assert count_products(cast, *args) == {BF16: 9}
    assert count_products(jax.grad(cast), *args) == {BF16: 3 * 9}


@pytest.mark.third_party
@pytest.mark.parametrize(("stream", "streams"), [("full", 3), ("half", 1)])
def test_a_block_keeps_nothing_but_its_stream_in_float32(stream, streams):
    loss, weights, tokens = gpt()
    cast = mpx.autocast(loss, residual_stream=stream, residuals="small")
    found = kept_by(lambda w: cast(w, tokens), weights)
    wide = [x for x in found if x.dtype == np.float32]
    large = [x.shape for x in wide if x.size >= 16 * 256 * 64]
    # In half precision the last one: its gradient is what the head reads.
    assert large == streams * [(16, 256, 384)]


@pytest.mark.slow
@pytest.mark.third_party
@pytest.mark.parametrize(
    ("of", "stream", "of_loss", "of_gradient"),
    [
        (vit, "full", 2e-4, 4e-3),
        (vit, "half", 2e-4, 7e-3),
        (gpt, "full", 3e-5, 1.15e-2),
        (gpt, "half", 3e-5, 1.15e-2),
    ],
)
def test_loss_and_gradient_of_a_block(of, stream, of_loss, of_gradient):
    loss_error, gradient_error = errors(of, residual_stream=stream)
    assert loss_error <= of_loss and gradient_error <= of_gradient


@pytest.mark.slow
@pytest.mark.third_party
def test_gradient_of_a_vit_block_in_float16():
    loss, *args = vit()
    _, expected = in_float32(vit)
    scaled = mpx.autocast(lambda *args: loss(*args) * 2.0**12, jnp.float16)
    grads = jax.jit(jax.grad(scaled))(*args)
    grads = jax.tree.map(lambda g: g / 2.0**12, grads)
    assert relative_error(grads, expected) <= 1e-3


@pytest.mark.parametrize("words", [8, 64])
@pytest.mark.parametrize(
    ("stream", "dtype"), [("full", "float32"), ("half", "bfloat16")]
)
def test_what_was_looked_up_begins_a_residual_stream(words, stream, dtype):
    """Also in a table of fewer rows than there are tokens, which is no broadcast."""

    def loss(p, tokens):
        x = p["table"][tokens]
        x = x + (x - jnp.mean(x, -1, keepdims=True)) @ p["w"]
        return jnp.sum((x - jnp.mean(x, -1, keepdims=True)) @ p["w"])

    p = {"table": jnp.ones((words, 4)), "w": jnp.ones((4, 4))}
    cast = mpx.autocast(loss, residual_stream=stream)
    adds = named("add", cast, p, jnp.zeros(16, jnp.int32))
    (add,) = [e for e in adds if e.outvars[0].aval.ndim == 2]
    assert {str(v.aval.dtype) for v in (*add.invars, *add.outvars)} == {dtype}


# How a loss is differentiated: each must add the gradients of all uses in float32.
ORDERS = {
    "inside": lambda loss: jax.grad(mpx.autocast(loss)),
    "outside": lambda loss: mpx.autocast(jax.grad(loss)),
}
# Between 0 and 1: in bfloat16 a sum of 4096 of them would stop at 256.
WEIGHT = jnp.full((8, 4), 0.5)


def in_a_scan(wrap):
    def loss(w, xs):
        step = wrap(lambda c, x: (c + x @ w, None))
        return jnp.sum(lax.scan(step, jnp.zeros((2, 4)), xs)[0])

    return loss


def unrolled(w, xs):
    return sum(jnp.sum(x @ w) for x in xs)


def unrolled_by_calls(w, xs):
    layer = jax.jit(lambda w, x: jnp.sum(x @ w))
    return sum(layer(w, x) for x in xs)


@pytest.mark.parametrize(
    ("loss", "order", "count", "bound"),
    [
        *(
            (in_a_scan(wrap), order, 4096, 1e-4)
            for order in ORDERS
            for wrap in (lambda f: f, jax.checkpoint, jax.jit)
        ),
        # Inputs are rounded once; sums in bfloat16 would be off by ten times as much.
        (unrolled, "outside", 64, 6e-4),
        (unrolled_by_calls, "inside", 64, 6e-4),
    ],
)
def test_gradient_of_a_weight_with_many_uses(loss, order, count, bound):
    xs = np.random.default_rng(0).random((count, 2, 8), np.float32)
    expected = np.broadcast_to(np.sum(xs, (0, 1))[:, None], WEIGHT.shape)
    grads = jax.jit(ORDERS[order](loss))(WEIGHT, xs if count == 4096 else list(xs))
    assert grads.dtype == np.float32
    assert relative_error(grads, expected) <= bound


def test_no_loss_scale_saves_what_underflows_forward_in_float16():
    def loss(w, x):
        return jnp.sum(jnp.log(1e-9 + jnp.square(x @ w) * 1e16))

    def grads(loss, scale=1.0):
        return mpx.filter_grad(loss, mpx.StaticLossScaling(scale))(w, x).grads

    w, x = jnp.full((4, 4), 1e-4), jnp.full((2, 4), 1e-5)
    exact = jax.grad(loss)(w, x)
    assert exact.all()
    for scale in (2.0**15, 2.0**24):
        assert not grads(mpx.autocast(loss, "float16"), scale).any()
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="dot_general"))
    for cure in (
        mpx.autocast(loss, "bfloat16"),
        mpx.autocast(loss, "float16", rules=rules),
    ):
        np.testing.assert_allclose(grads(cure), exact, rtol=0.02)


# --- What goes wrong in mixed precision, each as a program that would show it ---------


HALF = [jnp.float16, jnp.bfloat16]
half_dtypes = pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])


@half_dtypes
@pytest.mark.parametrize("fill", [float(jnp.finfo(jnp.float32).min), -1e9])
def test_a_fully_masked_softmax_is_uniform(getkey, dtype, fill):
    q = jax.random.normal(getkey(), (4, 8))

    def attend(q):
        scores = jnp.where(jnp.zeros((4, 4), bool), q @ q.T, fill)
        return jax.nn.softmax(scores) @ q

    got = mpx.autocast(attend, dtype)(q)
    assert relative_error(got, attend(q)) < 1e-2


@half_dtypes
@pytest.mark.parametrize("small", [1e-8, 1e-6])
def test_a_small_constant_is_not_lost(getkey, dtype, small):
    x = jax.random.normal(getkey(), (4, 8)) * 1e-6
    divide = lambda x: 1.0 / (jnp.abs(x @ jnp.zeros((8, 4))) + small)  # noqa: E731
    got = mpx.autocast(divide, dtype)(x)
    assert relative_error(got, divide(x)) < 1e-6


@half_dtypes
def test_no_product_mixes_dtypes_on_the_way_back(inputs, dtype):

    def loss(w, x):
        logits = jnp.matmul(x @ w, w, preferred_element_type=jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits))

    counts = count_products(jax.grad(mpx.autocast(loss, dtype)), *inputs)
    name = jnp.dtype(dtype).name
    assert counts == {(name, name): 6 - 1}  # the input's gradient is not asked for


@pytest.mark.slow
def test_a_computed_value_used_many_times_sums_its_gradients_in_groups():
    def count(w):
        wide = jnp.exp(w)  # computed in float32, then cast for each product
        return sum(jnp.sum(jnp.ones((1, 8)) @ wide) for _ in range(512))

    got = jax.jit(jax.grad(mpx.autocast(count)))(jnp.zeros((8, 1)))
    assert relative_error(got, np.full((8, 1), 512.0)) < 2e-4


@half_dtypes
def test_a_functional_update_stays_in_float32(inputs, dtype):

    def update(p, x):
        g = (x.T @ (x @ p)) * 1e-3
        return p - 1e-3 * g

    assert relative_error(mpx.autocast(update, dtype)(*inputs), update(*inputs)) < 1e-7


@pytest.mark.parametrize(
    ("update", "dtype"),
    [*zip(["set", "add", "multiply", "min", "max"], itertools.cycle(HALF))],
)
def test_scatters_work_in_half_precision(inputs, dtype, update):
    rows = jnp.array([0, 2, 4, 6])

    def scatter(w, x):
        y = x.astype(dtype) @ w.astype(dtype)  # so that the scatter itself is in half
        into = jnp.ones((8, 8), dtype)
        return getattr(into.at[rows], update)(y, unique_indices=True)

    gradient = jax.grad(lambda w, x: scatter(w, x).sum().astype("float32"))

    @jax.jit
    def results(w, x):
        funcs = scatter, gradient
        return [(mpx.autocast(f, dtype)(w, x), f(w, x)) for f in funcs]

    for got, expected in results(*inputs):
        assert got.dtype == expected.dtype
        assert relative_error(got, expected) < 2e-2


def test_products_that_give_float32_compile_whatever_their_layout():
    # A product of this shape and layout with a float32 result does not compile on CPUs.
    a, b = jnp.ones((8, 4)), jnp.ones((1, 8, 8))

    def product(a, b):
        y = jax.lax.dot_general(a, b, (((0,), (2,)), ((), ())))
        return jnp.exp(y), jnp.exp(y.transpose(2, 0, 1))

    got = jax.jit(mpx.autocast(product))(a, b)
    assert relative_error(got, product(a, b)) < 1e-5


def test_the_cube_of_gelu_does_not_overflow_in_float16():
    x = jnp.array([[50.0, -50.0, 1.0, 0.5]])
    gelu = lambda x: jax.nn.gelu(x @ jnp.eye(4))  # noqa: E731
    got = mpx.autocast(gelu, jnp.float16)(x)
    assert relative_error(got, gelu(x)) < 1e-3


@half_dtypes
@pytest.mark.parametrize("is_bias", [True, False])
def test_what_is_added_to_a_product_keeps_its_digits(dtype, is_bias):
    """In half precision 2048.25 is 2048."""

    def layer(p, x):
        added = p["b"] if is_bias else x / 4
        return p["w"] @ x + added - 2048.0

    p, x = {"w": jnp.eye(8) * 2048, "b": jnp.full(8, 0.25)}, jnp.ones(8)
    np.testing.assert_array_equal(mpx.autocast(layer, dtype)(p, x), p["b"])


def test_a_numpy_scalar_is_like_a_python_number(getkey):
    x = jax.random.normal(getkey(), (4, 4))
    found = []
    for number in (2.0, np.float32(2)):
        func = mpx.autocast(lambda x, n=number: jnp.tanh((x @ x) * n) @ x)
        assert count_products(func, x) == {BF16: 2}
        found.append(func(x))
    np.testing.assert_array_equal(*found)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    @functools.partial(mpx.autocast, dtype=jnp.float16)
    def loss(p, x):
        h = x @ p["w"]
        return jnp.sum(jnp.tanh(h + jnp.broadcast_to(p["b"], h.shape)) @ p["w"])

    args = {"w": jnp.ones((1, 1)), "b": jnp.zeros(1)}, jnp.zeros((4096, 1))
    assert float(jax.grad(loss)(*args)["b"][0]) == 4096.0
    assert "reduce_sum" in primitives(jax.grad(loss), *args)
