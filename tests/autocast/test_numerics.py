"""Numbers that autocast must reach on unmodified blocks, and in sums over many uses.

Two blocks of Flax Linen's own layers, of AUTOCAST's sizes: one of a Vision Transformer
(batch 8, 197 tokens, width 384), and one of a GPT with a loss over 4096 tokens. Errors
are relative, by the global norm, against float32.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx

from .counting import count_casts, count_products, equations, relative_error

STREAMS = ("full", "half")


class Block(nn.Module):
    """A transformer block without a thought of precision."""

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
    """One block on bytes, with a tied embedding."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(256, 384, embedding_init=nn.initializers.normal(0.02))
        x = Block(is_causal=True)(embed(tokens))
        return embed.attend(nn.LayerNorm()(x))


@functools.cache
def vit():
    """Loss, weights and batch."""
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
    """The errors of the loss and of the gradient."""
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
    half = ("bfloat16", "bfloat16")
    assert count_products(cast, *args) == {half: 9}
    assert count_products(jax.grad(cast), *args) == {half: 3 * 9}


@pytest.mark.third_party
@pytest.mark.parametrize(("stream", "streams"), [("full", 3), ("half", 1)])
def test_a_block_keeps_nothing_but_its_stream_in_float32(stream, streams):
    loss, weights, tokens = gpt()
    cast = mpx.autocast(loss, residual_stream=stream, residuals="small")
    pulled = jax.eval_shape(lambda w: jax.vjp(lambda w: cast(w, tokens), w)[1], weights)
    found = [x for x in jax.tree.leaves(pulled) if x.dtype == np.float32]
    large = [x.shape for x in found if x.size >= 16 * 256 * 64]
    # In half precision the last one: its gradient is what the head reads.
    assert large == streams * [(16, 256, 384)]


@pytest.mark.slow
@pytest.mark.third_party
@pytest.mark.parametrize(("stream", "bound"), [("full", 4e-3), ("half", 7e-3)])
def test_gradient_of_a_vit_block(stream, bound):
    loss_error, gradient_error = errors(vit, residual_stream=stream)
    assert loss_error <= 2e-4
    assert gradient_error <= bound


@pytest.mark.slow
@pytest.mark.third_party
@pytest.mark.parametrize("stream", STREAMS)
def test_loss_and_gradient_of_a_gpt_block(stream):
    loss_error, gradient_error = errors(gpt, residual_stream=stream)
    assert loss_error <= 3e-5
    assert gradient_error <= 1.15e-2


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
    jaxpr = jax.make_jaxpr(cast)(p, jnp.zeros(16, jnp.int32))
    (add,) = [
        e
        for e, _ in equations(jaxpr)
        if e.primitive.name == "add" and e.outvars[0].aval.ndim == 2
    ]
    assert {str(v.aval.dtype) for v in (*add.invars, *add.outvars)} == {dtype}


# How a loss is differentiated: each must add the gradients of all uses in float32.
ORDERS = {
    "inside": lambda loss: jax.grad(mpx.autocast(loss)),
    "outside": lambda loss: mpx.autocast(jax.grad(loss)),
}
# Between 0 and 1: in bfloat16 a sum of 4096 of them would stop at 256.
WEIGHT, INPUTS = jnp.full((8, 4), 0.5), (4096, 2, 8)


def in_a_scan(w, xs):
    return jnp.sum(lax.scan(lambda c, x: (c + x @ w, None), jnp.zeros((2, 4)), xs)[0])


def in_a_remat(w, xs):
    step = jax.checkpoint(lambda c, x: (c + x @ w, None))
    return jnp.sum(lax.scan(step, jnp.zeros((2, 4)), xs)[0])


def in_a_jit(w, xs):
    step = jax.jit(lambda c, x: (c + x @ w, None))
    return jnp.sum(lax.scan(step, jnp.zeros((2, 4)), xs)[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("loss", [in_a_scan, in_a_remat, in_a_jit])
def test_gradient_of_a_weight_held_over_4096_steps(loss, order):
    xs = np.random.default_rng(0).random(INPUTS, np.float32)
    expected = np.broadcast_to(np.sum(xs, (0, 1))[:, None], WEIGHT.shape)
    grads = jax.jit(ORDERS[order](loss))(WEIGHT, xs)
    assert grads.dtype == np.float32
    assert relative_error(grads, expected) <= 1e-4


def unrolled(w, xs):
    return sum(jnp.sum(x @ w) for x in xs)


def unrolled_by_calls(w, xs):
    layer = jax.jit(lambda w, x: jnp.sum(x @ w))
    return sum(layer(w, x) for x in xs)


@pytest.mark.parametrize(
    ("loss", "order"), [(unrolled, "outside"), (unrolled_by_calls, "inside")]
)
def test_gradient_of_a_weight_used_64_times(loss, order):
    xs = np.random.default_rng(0).random((64, *INPUTS[1:]), np.float32)
    expected = np.broadcast_to(np.sum(xs, (0, 1))[:, None], WEIGHT.shape)
    grads = jax.jit(ORDERS[order](loss))(WEIGHT, list(xs))
    assert grads.dtype == np.float32
    # Inputs are rounded once; sums in bfloat16 would be off by ten times as much.
    assert relative_error(grads, expected) <= 6e-4


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
