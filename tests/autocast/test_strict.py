"""Strict mode: what mpx cannot enter is an error; arithmetic never is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import mpx

from . import blocks
from .counting import named, relative_error


@pytest.fixture
def inputs(getkey):
    return (
        {"w": jax.random.normal(getkey(), (4, 4)), "b": jnp.zeros(4)},
        jax.random.normal(getkey(), (2, 4)),
    )


def numpy_scalar(p, x):
    x = x.astype(jnp.bfloat16)
    return jnp.tanh(x * np.float32(2)) @ p["w"]


def numpy_scalar_of_half_weights(p, x):
    h = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return (h * np.float32(2)) @ p["w"]


def bias(p, x):
    h = x @ p["w"]
    return jnp.tanh(h + jnp.broadcast_to(p["b"], h.shape)) @ p["w"]


def norm(p, x):
    h = x @ p["w"]
    return (h - jnp.mean(h, -1, keepdims=True)) @ p["w"]


def cast_on_purpose(p, x):
    h = (x @ p["w"]).astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.tanh(h * p["b"][0]) @ p["w"]


def computed_scalar(p, x):
    return jnp.tanh(x @ p["w"] / jnp.sqrt(jnp.max(p["b"]) + 4.0)) @ p["w"]


def computed_bias(p, x):
    h = x @ p["w"]
    return jnp.tanh(h + jnp.broadcast_to(jnp.exp(p["b"]), h.shape)) @ p["w"]


def float32_bias_of_half_weights(p, x):
    h = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return jnp.tanh(h + jnp.broadcast_to(p["b"], h.shape)) @ p["w"]


@pytest.mark.parametrize(
    "func",
    [
        numpy_scalar,
        numpy_scalar_of_half_weights,
        bias,
        lambda p, x: x + bias(p, x),
        lambda p, x: jax.nn.softmax(x @ p["w"] / 2.0) @ p["w"],
        norm,
        cast_on_purpose,
        computed_scalar,
        computed_bias,
        float32_bias_of_half_weights,
    ],
)
def test_arithmetic_is_no_error(inputs, func):
    with jax.numpy_dtype_promotion("standard"):
        strict = mpx.autocast(func, strict=True)(*inputs)
        np.testing.assert_array_equal(strict, mpx.autocast(func)(*inputs))


def test_a_whole_block_is_no_error():
    key = jax.random.key(0)
    args = blocks.vit_parameters(key, 48), jax.random.normal(key, (1, 4, 48))
    jax.eval_shape(mpx.autocast(blocks.vit_loss, strict=True), *args)


def unknown_primitive(name, compute):
    unknown = Primitive(name)
    unknown.def_abstract_eval(lambda x, **params: x)
    unknown.def_impl(lambda x, **params: compute(x))
    lowering = mlir.lower_fun(unknown.impl, multiple_results=False)
    mlir.register_lowering(unknown, lowering)
    return unknown


def test_an_unknown_operation_computes_in_float32(inputs):
    unknown = unknown_primitive("unheard_of_square", jnp.square)
    func = lambda p, x: unknown.bind(x @ p["w"]) @ p["w"]  # noqa: E731
    cast = mpx.autocast(func, strict=True)
    (found,) = named("unheard_of_square", cast, *inputs)
    assert found.outvars[0].aval.dtype == jnp.float32
    assert relative_error(cast(*inputs), func(*inputs)) < 2e-2


def test_a_program_in_an_unknown_primitive_is_an_error(inputs):
    unknown = unknown_primitive("unheard_of", jnp.sin)

    def func(p, x):
        y = x @ p["w"]
        return unknown.bind(y, jaxpr=jax.make_jaxpr(jnp.sin)(y))

    assert mpx.autocast(func)(*inputs).dtype == jnp.float32
    with pytest.raises(NotImplementedError, match="unknown primitive `unheard_of` at"):
        mpx.autocast(func, strict=True)(*inputs)
    rule = mpx.Rule(mpx.Precision.DECLARED, primitive="unheard_of")
    mpx.autocast(func, strict=True, rules=mpx.Rules(rule))(*inputs)
