"""Logits in `mpx.compare`: the KL divergence of each token."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
import mpx.nnx

WORDS, WIDTH, LENGTH = 16, 8, 6
compare = functools.partial(mpx.compare, floor=False)


def oracle(a, b):
    """The divergence in float64, by its definition."""
    logs = [x - np.logaddexp.reduce(x, -1, keepdims=True) for x in np.float64([a, b])]
    p = np.exp(logs[0])
    with np.errstate(invalid="ignore"):
        return np.where(p == 0, 0, p * (logs[0] - logs[1])).sum(-1)


def of_arrays(a, b):
    """Two functions that only return arrays, as the comparison sees them."""
    return compare(lambda x: x["a"] * 1, lambda x: x["b"] * 1)({"a": a, "b": b})


@pytest.mark.parametrize("noise", [0, 1e-4, 1e-2, 1.0, 30.0])
def test_it_is_that_of_float64_however_close_the_logits_are(noise):
    a, error = np.random.default_rng(0).normal(size=(2, 3, 5, 64)).astype("float32")
    b = a + np.float32(noise) * error
    found = of_arrays(2 * a, 2 * b)
    assert found.kl.shape == (3, 5) and found.kl.dtype == np.float32
    np.testing.assert_allclose(found.kl, oracle(2 * a, 2 * b), rtol=5e-3, atol=0)
    assert noise > 0 or not found.kl.any()
    assert found.losses == found.gradients == ()
    assert found.records()["kl/max"] == found.kl.max()
    assert "\nKL per token: mean " in str(found) and "gradient" not in str(found)


def test_masks_infinities_and_nan():
    minus, nan = -jnp.inf, jnp.nan
    a = [[1, 2, minus], [1, 2, 3], [1, 2, minus], [1, nan, 1], [1, jnp.inf, 1]]
    b = [[2, 2, minus], [1, minus, 3], [1, 2, 3], [1, 1, 1], [1, 1, 1]]
    a, b = jnp.asarray(a), jnp.asarray(b)
    kl = of_arrays(a, b).kl
    assert kl[0] == pytest.approx(oracle([1, 2], [2, 2]), rel=1e-5)
    assert kl[1] == math.inf
    assert kl[2] == pytest.approx(oracle([1, 2, -1e9], [1, 2, 3]), rel=1e-5)
    assert np.isnan(kl[3:]).all() and np.isnan(of_arrays(b, a).kl[3:]).all()
    # Products with p = 0: far less likely than float32 can say, and impossible.
    far = of_arrays(jnp.array([[0.0, -200.0]] * 2), jnp.array([[0.0, 0], [0, minus]]))
    assert far.kl[0] == pytest.approx(math.log(2)) and far.kl[1] == math.inf
    half = mpx.cast_function(lambda x: x * 1, "float16")  # 7e4 is infinite in it
    assert np.isnan(compare(lambda x: x * 1, half)(jnp.array([[7e4, 0.0]])).kl).all()


@functools.cache
def weights():
    draw = np.random.default_rng(0).normal
    shapes = {"table": (WORDS, WIDTH), "mix": (WIDTH, WIDTH), "up": (WIDTH, WIDTH)}
    return {k: jnp.float32(draw(size=shape) / 2) for k, shape in shapes.items()}


TOKENS = jnp.arange(3 * LENGTH).reshape(3, LENGTH) * 7 % WORDS


def batched(w, tokens):
    x = w["table"][tokens] @ w["mix"]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), x.dtype))
    x = jnp.tanh(causal @ x @ w["up"])
    return x @ w["table"].T


def one_by_one(w, tokens):
    """The same policy with a cache: the sum of what came before."""

    def step(cache, token):
        cache = cache + w["table"][token] @ w["mix"]
        return cache, jnp.tanh(cache @ w["up"]) @ w["table"].T

    cache = jnp.zeros((len(tokens), WIDTH), w["mix"].dtype)
    return jnp.moveaxis(jax.lax.scan(step, cache, tokens.T)[1], 0, 1)


def loss(w, tokens):
    logits = batched(w, tokens)
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0]), {"logits": logits}


def test_programs_without_a_common_layer_and_logits_in_aux():
    found = compare(batched, one_by_one)(weights(), TOKENS)
    assert found.kl.shape == TOKENS.shape and 0 <= found.kl.max() < 1e-10
    plain, cached = (mpx.autocast(f, "float16") for f in (batched, one_by_one))
    half = compare(batched, cached)(weights(), TOKENS)
    assert 1e-8 < half.kl.max() < 1e-4
    with_aux = compare(loss, mpx.autocast(loss, "float16"), has_aux=True)
    found = with_aux(weights(), TOKENS)
    alone = compare(batched, plain)(weights(), TOKENS)
    np.testing.assert_allclose(found.kl, alone.kl, rtol=0.3)
    assert found.gradients and len(found.losses) == 2 and "loss" in str(found)


def test_shapes_that_differ_and_a_loss_beside_logits_are_errors():
    shorter = lambda w, tokens: batched(w, tokens)[:, 1:]  # noqa: E731
    said = r"equal shapes.*got float32\[3,6,16\] of `batched` and float32\[3,5,16\]"
    with pytest.raises(ValueError, match=said):
        compare(batched, shorter)(weights(), TOKENS)
    with pytest.raises(ValueError, match="and None of `<lambda>`. Return the array"):
        compare(batched, lambda *x: loss(*x)[0])(weights(), TOKENS)
    for of, policy in ((batched, "bfloat16"), (lambda *x: batched(*x)[0, 0], None)):
        with pytest.raises(ValueError, match="must return a scalar loss"):
            compare(of, of, policy=policy)(weights(), TOKENS)


@pytest.mark.slow
def test_delayed_scaling_has_the_scales_of_the_run():
    recipe = mpx.DelayedScaling()
    func = mpx.autocast(loss, recipe=recipe)
    first = mpx.init_scaling(func, weights(), TOKENS)
    gradient = mpx.filter_value_and_grad(func, first, has_aux=True)
    run = gradient(weights(), TOKENS).scaling
    plain, cached = (mpx.autocast(f, recipe=recipe) for f in (batched, one_by_one))
    predicted = mpx.inference(plain, run)(weights(), TOKENS)
    found = compare(batched, plain, run)(weights(), TOKENS)
    expected = oracle(batched(weights(), TOKENS), predicted)
    np.testing.assert_allclose(found.kl, expected, rtol=1e-2, atol=1e-9)
    assert found.name == "batched in bfloat16 with DelayedScaling"
    # The reference with its recipe, and the decoder with the scales of the training.
    found = compare(mpx.inference(plain, run), cached, run)(weights(), TOKENS)
    assert found.kl.max() < 1e-2
    with pytest.warns(UserWarning, match="its scales are 1"):
        compare(batched, plain)(weights(), TOKENS)


@pytest.mark.third_party
def test_logits_of_nnx_objects():
    net, x = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    call = lambda model, x: model(x)  # noqa: E731
    found = mpx.nnx.compare(call, mpx.autocast(call), floor=False)(net, x)
    assert found.kl.shape == (2,) and found.kl.max() < 1e-3
