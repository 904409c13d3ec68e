"""Strict mode: accidents are errors that name the line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.autocast import blocks


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


def float32_bias_of_half_weights(p, x):
    h = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return jnp.tanh(h + jnp.broadcast_to(p["b"], h.shape)) @ p["w"]


def computed_scalar(p, x):
    return jnp.tanh(x @ p["w"] / jnp.sqrt(jnp.max(p["b"]) + 4.0)) @ p["w"]


def computed_bias(p, x):
    h = x @ p["w"]
    return jnp.tanh(h + jnp.broadcast_to(jnp.exp(p["b"]), h.shape)) @ p["w"]


ACCIDENTS = {
    f.__name__: f
    for f in (
        numpy_scalar,
        numpy_scalar_of_half_weights,
        float32_bias_of_half_weights,
        computed_scalar,
        computed_bias,
    )
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_accidents_name_the_line(inputs, name):
    func = ACCIDENTS[name]
    first = func.__code__.co_firstlineno
    with jax.numpy_dtype_promotion("standard"):
        mpx.autocast(func)(*inputs)
        with pytest.raises(ValueError, match=r"makes a half precision") as caught:
            mpx.autocast(func, strict=True)(*inputs)
    message = str(caught.value)
    lines = [f"test_strict.py:{first + i}" for i in range(4)]
    assert any(line in message for line in lines), message


def test_an_accident_in_a_scan_under_jit(inputs):
    def func(p, x):
        step = lambda c, _: (computed_bias(p, c), None)  # noqa: E731
        return jax.jit(lambda x: jax.lax.scan(step, x, length=2)[0])(x)

    with pytest.raises(ValueError, match=r"`add` at .*test_strict.py.*bfloat16"):
        mpx.autocast(func, strict=True)(*inputs)


def bias(p, x):
    h = x @ p["w"]
    return jnp.tanh(h + jnp.broadcast_to(p["b"], h.shape)) @ p["w"]


def residual(p, x):
    return x + bias(p, x)


def softmax(p, x):
    return jax.nn.softmax(x @ p["w"] / 2.0) @ p["w"]


def norm(p, x):
    h = x @ p["w"]
    h = h - jnp.mean(h, -1, keepdims=True)
    return h @ p["w"]


def cast_on_purpose(p, x):
    h = (x @ p["w"]).astype(jnp.bfloat16)
    h = h.astype(jnp.float32)
    return jnp.tanh(h * p["b"][0]) @ p["w"]


@pytest.mark.parametrize("func", [bias, residual, softmax, norm, cast_on_purpose])
def test_what_is_meant_is_no_accident(inputs, func):
    mpx.autocast(func, strict=True)(*inputs)


def test_whole_blocks_are_no_accident():
    key = jax.random.key(0)
    args = blocks.vit_parameters(key, 48), jax.random.normal(key, (1, 4, 48))
    jax.eval_shape(mpx.autocast(blocks.vit_loss, strict=True), *args)
    params = blocks.gpt_parameters(key, 16, 48)
    tokens = jax.random.randint(key, (2, 5), 0, 16)
    jax.eval_shape(mpx.autocast(blocks.gpt_loss, strict=True), params, tokens)


def test_an_unknown_primitive_is_an_error(inputs):
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    unknown = Primitive("unheard_of")
    unknown.def_abstract_eval(lambda x: x)
    unknown.def_impl(lambda x: x)
    mlir.register_lowering(unknown, lambda ctx, x: [x])
    func = lambda p, x: unknown.bind(x @ p["w"])  # noqa: E731
    assert mpx.autocast(func)(*inputs).dtype == jnp.float32
    with pytest.raises(NotImplementedError, match="the primitive `unheard_of` at"):
        mpx.autocast(func, strict=True)(*inputs)
    rule = mpx.Rule(mpx.Precision.DECLARED, primitive="unheard_of")
    mpx.autocast(func, strict=True, rules=mpx.Rules(rule))(*inputs)
