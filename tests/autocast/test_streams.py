"""What is stored on TPUs by default: streams of plain blocks, and islands in loops."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from .counting import equations, relative_error

ROWS, WIDTH = 8, 16
TPU, GPU = "tpu v5e", "h100"


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def plain(w, x, key):
    return x + jax.nn.silu(normed(x) @ w) @ w


def with_bias(w, x, key):
    return x + normed(x) @ w + jnp.broadcast_to(w[0], x.shape)


def with_dropout(w, x, key):
    return x + eqx.nn.Dropout(0.1)(normed(x) @ w, key=key)


def small_step(w, x, key):
    return x + 0.01 * (jnp.tanh(x) @ w)


def small_step_in_a_function(w, x, key):
    return x + jax.jit(lambda y: 0.01 * y)(jnp.tanh(x) @ w)


def of_a_layer_scale(w, x, key):
    return x + jnp.broadcast_to(w[0], x.shape) * (normed(x) @ w)


def gated(w, x, key):
    return x + jax.nn.sigmoid(x @ w) * (normed(x) @ w)


HALF = [plain, with_bias, with_dropout]
FULL = [small_step, small_step_in_a_function, of_a_layer_scale, gated]


def weights(layers, key=0):
    shape = (layers, WIDTH, WIDTH)
    return jax.random.normal(jax.random.key(key), shape) / (WIDTH * layers) ** 0.5


def inputs(key=1):
    return jax.random.normal(jax.random.key(key), (ROWS, WIDTH))


def unrolled(block, ws, x):
    x = x @ ws[0]
    for i, w in enumerate(ws):
        x = block(w, x, jax.random.key(i))
    return jnp.sum(jnp.sin(normed(x) @ ws[0]))


def scanned(block, ws, x):
    x, _ = jax.lax.scan(
        lambda x, w: (block(w, x, jax.random.key(0)), None), x @ ws[0], ws
    )
    return jnp.sum(jnp.sin(normed(x) @ ws[0]))


def dtype_of_sums(func, *args):
    """The dtypes of the sums that blocks return, apart from the first and last."""
    found = equations(jax.make_jaxpr(func)(*args))
    sums = [e.outvars[0].aval for e, _ in found if e.primitive.name == "add"]
    return {x.dtype.name for x in sums if x.shape == (ROWS, WIDTH)}


@pytest.mark.parametrize("model", [unrolled, scanned])
@pytest.mark.parametrize("block", [*HALF, *FULL])
def test_streams_of_plain_blocks_are_half_on_a_tpu_alone(block, model):
    loss = functools.partial(model, block)
    args = weights(3), inputs()
    on_tpu, on_gpu, float16 = (
        dtype_of_sums(mpx.autocast(loss, dtype, target=target, residuals="fast"), *args)
        for dtype, target in (("bfloat16", TPU), ("bfloat16", GPU), ("float16", TPU))
    )
    assert ("bfloat16" in on_tpu) == (block in HALF)
    assert on_gpu == float16 == {"float32"}


@pytest.mark.parametrize(
    ("word", "blocks"),
    [("full", []), ("blocks", HALF), ("half", [*HALF, *FULL])],
)
@pytest.mark.parametrize("target", [TPU, GPU])
def test_the_word_says_which_streams_are_half(word, blocks, target):
    for block in (*HALF, small_step, of_a_layer_scale):
        loss = functools.partial(unrolled, block)
        cast = mpx.autocast(loss, residual_stream=word, target=target)
        found = dtype_of_sums(cast, weights(3), inputs())
        assert ("bfloat16" in found) == (block in blocks), (block, found)


def test_a_rule_for_sums_comes_before_the_order_of_a_bias():
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="add"))
    loss = functools.partial(unrolled, with_bias)
    cast = mpx.autocast(loss, target=TPU, rules=rules)
    assert dtype_of_sums(cast, weights(3), inputs()) == {"float32"}


def gradient_error(loss, *args, **options):
    exact = jax.jit(jax.grad(loss))(*args)
    cast = mpx.autocast(loss, **options)
    return relative_error(jax.jit(jax.grad(cast))(*args), exact)


def test_a_small_step_is_not_lost():
    """In half precision each of 300 steps of a hundredth would be rounded away."""
    loss, args = functools.partial(scanned, small_step), (17 * weights(300), inputs())
    assert gradient_error(loss, *args, target=TPU) < 1e-2
    assert gradient_error(loss, *args, target=TPU, residual_stream="half") > 3e-2


@pytest.mark.parametrize("layers", [10, 300])
def test_a_half_stream_is_as_near_as_the_naive_cast(layers):
    loss, args = functools.partial(scanned, plain), (weights(layers), inputs())
    exact = jax.jit(jax.grad(loss))(*args)

    def naive(w, x):
        return loss(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    theirs = relative_error(jax.jit(jax.grad(naive))(*args), exact)
    ours = gradient_error(loss, *args, target=TPU)
    assert gradient_error(loss, *args, target=GPU) < ours < 1.05 * theirs


def test_a_bias_is_added_before_the_stream_is_rounded():
    """Each addend is less than half of the last place of one, their sum is more."""
    addend = 0.75 * 2.0**-8

    def stream(w, bias, x):
        x = x @ jnp.eye(4)
        x = x + x @ w + jnp.broadcast_to(bias, x.shape)
        return (128 * (x - 1)) @ jnp.eye(4)

    args = addend * jnp.eye(4), jnp.full(4, addend, jnp.float32), jnp.ones((2, 4))
    found = mpx.autocast(stream, target=TPU)(*args)
    np.testing.assert_array_equal(found, np.ones((2, 4)))


def test_islands_are_recomputed_in_loops_only_on_a_tpu():
    def islands(model, **options):
        cast = mpx.autocast(functools.partial(model, plain), **options)
        program = jax.make_jaxpr(cast)(weights(3), inputs())
        return [e for e, _ in equations(program) if "remat" in e.primitive.name]

    assert not islands(unrolled, target=TPU)
    assert islands(scanned, target=TPU)
    assert islands(unrolled, target=GPU)
    assert islands(unrolled, target=TPU, residuals="small")
    assert islands(scanned, target=GPU, residuals="loops")
    assert not islands(scanned, target=TPU, residuals="fast")


@pytest.mark.parametrize("block", HALF)
def test_values_are_the_same_under_all_residuals(block):
    loss, args = functools.partial(unrolled, block), (weights(4), inputs())
    found = [
        np.asarray(mpx.autocast(loss, target=TPU, residuals=r)(*args))
        for r in ("small", "loops", "fast")
    ]
    assert found[0] == found[1] == found[2]
