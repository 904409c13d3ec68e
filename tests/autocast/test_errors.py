"""What `mpx.autocast` says of wrong arguments, and JAX of a function in it."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpx
from tests.helpers import unchecked_annotations


def product(w, x):
    return x @ w


@pytest.fixture
def inputs(getkey):
    return jax.random.normal(getkey(), (8, 8)), jax.random.normal(getkey(), (4, 8))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mpx.autocast(jnp.float16), TypeError, "keywords only.*dtype=jnp.floa"),
        (lambda: mpx.autocast("bfloat16"), TypeError, "got the dtype bfloat16"),
        (lambda: mpx.autocast(3), TypeError, "needs a function; got int 3"),
        (lambda: mpx.autocast(product, jnp.int8), TypeError, "got int8"),
        (lambda: mpx.autocast(product, "float8_e4m3fn"), ValueError, "float8_e4m3fn"),
        (
            lambda: mpx.autocast(product, "half precision"),
            ValueError,
            "needs a dtype; got",
        ),
        (
            lambda: mpx.autocast(product, mpx.DelayedScaling()),
            TypeError,
            r"needs a dtype here.*func, recipe=mpx.DelayedScaling\(\)\)`",
        ),
        (
            lambda: mpx.autocast(product, mpx.DelayedScaling(margin=1)),
            TypeError,
            r"recipe=mpx.DelayedScaling\(\.\.\.\)",
        ),
        (
            lambda: mpx.autocast(product, mpx.MXFP8BlockScaling),
            TypeError,
            "recipe=mpx.MX",
        ),
        (
            lambda: mpx.autocast(mpx.DelayedScaling()),
            TypeError,
            "needs a function here",
        ),
        (
            lambda: mpx.autocast(product, recipe=mpx.DelayedScaling),
            TypeError,
            r"not its class.*Call it: `recipe=mpx.DelayedScaling\(\)`",
        ),
        (lambda: mpx.autocast(recipe=mpx.DelayedScaling), TypeError, "not its class"),
        (lambda: mpx.autocast(product, enabled="no"), TypeError, "`enabled`.*str 'no'"),
        (
            lambda: mpx.autocast(product, enabled=0),
            TypeError,
            "True or False; got int 0",
        ),
        (
            lambda: mpx.autocast(product, strict="yes"),
            TypeError,
            "`strict`.*True or Fa",
        ),
        (lambda: mpx.autocast(ambient="yes"), TypeError, "`ambient`.*True or False"),
    ],
)
def test_errors_say_what_to_do(call, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        call()


def decides(model, images, *, scale=1.0):
    if jnp.sum(images @ model["w"]) > 0:
        return jnp.sum(images) * scale
    return jnp.sum(images)


class Deciding(eqx.Module):
    weight: jax.Array

    def __call__(self, images):
        return images if jnp.sum(images @ self.weight) > 0 else -images


@pytest.mark.parametrize(
    "call",
    [
        lambda w, x: mpx.autocast(decides)({"w": w}, x),
        lambda w, x: jax.jit(mpx.autocast(decides))({"w": w}, x),
        lambda w, x: jax.grad(mpx.autocast(decides))({"w": w}, x),
        lambda w, x: mpx.autocast(functools.partial(decides, scale=2.0))({"w": w}, x),
        lambda w, x: mpx.filter_grad(mpx.autocast(decides), mpx.NoLossScaling())(
            {"w": w}, x
        ),
        lambda w, x: mpx.explain(mpx.autocast(decides))({"w": w}, x),
        lambda w, x: mpx.explain(decides)({"w": w}, x),
    ],
)
def test_an_error_of_tracing_names_the_function_of_the_user(call, inputs):
    """An `if` on a value: JAX says in which function, and on which arguments."""
    error = jax.errors.TracerBoolConversionError
    match = r"function decides at .*test_errors.py.* arguments model_w and images\."
    with pytest.raises(error, match=match):
        call(*inputs)


def test_an_error_of_tracing_names_the_method_of_a_layer(inputs):
    w, x = inputs
    match = r"function __call__ at .*test_errors.py.* arguments weight and images\."
    with pytest.raises(jax.errors.TracerBoolConversionError, match=match):
        mpx.autocast(Deciding(w))(x)


def test_an_error_of_tracing_names_what_takes_an_nnx_object():
    class Deciding(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, images):
            return images if jnp.sum(images @ self.weight[...]) > 0 else -images

    def apply(model, images):
        return model(images)

    model, x = Deciding(), jnp.ones((2, 4))
    error = jax.errors.TracerBoolConversionError
    with pytest.raises(error, match="function apply at .* model_weight and images"):
        mpx.autocast(apply)(model, x)
    with pytest.raises(error, match="function __call__ at .*test_errors"):
        mpx.autocast(model)(x)
