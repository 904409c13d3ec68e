"""Derivatives: straight through the round trip, none through what is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import MXFP8Quantizer, NVFP4Quantizer, TensorQuantizer
from tests import helpers
from tests.quantize.cases import KINDS, QUANTIZERS
from tests.registries import TRANSFORMS

X = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
T = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float32)
each_quantizer = pytest.mark.parametrize("name", KINDS)


@each_quantizer
def test_the_derivative_is_that_of_the_identity(name: str):
    quantizer, _ = QUANTIZERS[name]
    x, t = jnp.asarray(X), jnp.asarray(T)

    @jax.jit
    def all_of_them(x, t):
        f = lambda x: mpx.quantization.quantize_dequantize(x, quantizer)  # noqa: E731
        value, tangent = jax.jvp(f, (x,), (t,))
        pulled, back = jax.vjp(f, x)
        expected = mpx.quantization.quantize(x, quantizer).dequantize()
        return value, tangent, pulled, back(t)[0], expected

    value, tangent, pulled, cotangent, expected = all_of_them(x, t)
    helpers.assert_same_bits((tangent, cotangent), (t, t))
    helpers.assert_same_bits((value, pulled), (expected, expected))


def test_the_chain_rule_sees_the_quantized_value():
    """d/dx of y(x)^2 is 2 y, and the second derivative that of y^2 with y' = 1."""
    quantizer = TensorQuantizer()
    f = lambda x: mpx.quantization.quantize_dequantize(x, quantizer, scale=1.0) ** 2  # noqa: E731
    y = mpx.quantization.quantize_dequantize(jnp.float32(1.3), quantizer, scale=1.0)
    assert float(y) == 1.25
    assert float(jax.grad(f)(jnp.float32(1.3))) == 2.5
    assert float(jax.grad(jax.grad(f))(jnp.float32(1.3))) == 2.0
    assert float(jax.grad(f)(jnp.float32(1000.0))) == 2 * 448.0  # saturated, too


@pytest.mark.parametrize("dtype", helpers.WIDE)
def test_gradients_have_the_dtype_of_the_array(dtype: str):
    def f(x):
        rounded = mpx.quantization.quantize_dequantize(x, MXFP8Quantizer())
        return rounded.sum()

    grad = jax.jit(jax.grad(f))(jnp.ones((2, 32), dtype))
    helpers.assert_same_bits(grad, jnp.ones((2, 32), dtype))


def test_the_scale_and_the_key_get_no_gradient():
    quantizer = TensorQuantizer(stochastic_rounding=True)

    def f(x, scale, key):
        return mpx.quantization.quantize_dequantize(
            x, quantizer, scale=scale, key=key
        ).sum()

    x, key = jnp.ones(4), jax.random.key(0)
    grads = jax.jit(jax.grad(f, argnums=(0, 1)))(x, jnp.float32(3.0), key)
    helpers.assert_same_bits(grads, (jnp.ones(4), jnp.float32(0)))


def test_it_goes_through_vmap_scan_and_remat():
    quantizer = MXFP8Quantizer()
    f = lambda x: (mpx.quantization.quantize_dequantize(x, quantizer) ** 2).sum()  # noqa: E731

    @jax.jit
    def all_of_them(x):
        grads = [jax.grad(transform(f))(x) for transform in TRANSFORMS.values()]
        expected = 2 * mpx.quantization.quantize_dequantize(x, quantizer)
        return expected, *grads, jax.vmap(jax.grad(f))(x)

    expected, *grads = all_of_them(jnp.asarray(X))
    for grad in grads:
        helpers.assert_same_bits(grad, expected)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, jax.vmap])
def test_quantize_refuses_to_be_differentiated(transform):
    def f(x):
        return mpx.quantization.quantize(x, MXFP8Quantizer()).dequantize().sum()

    x = jnp.ones((2, 32))
    if transform is jax.vmap:  # no derivative asked for
        assert jax.jit(transform(f))(x).tolist() == [32.0, 32.0]
        return
    with pytest.raises(
        TypeError, match="no derivative.*`mpx.quantization.quantize_dequantize`"
    ):
        jax.eval_shape(transform(f), x)
    stopped = jax.jit(transform(lambda x: x.sum() * f(jax.lax.stop_gradient(x))))(x)
    helpers.assert_same_bits(stopped, jnp.full((2, 32), 64.0))


def test_a_quantized_array_is_a_constant_to_derivatives():
    q = jax.jit(lambda x: mpx.quantization.quantize(x, NVFP4Quantizer()))(
        jnp.ones((2, 32))
    )

    def f(inverse_scale, x):
        leaves, tree = jax.tree.flatten(q)
        leaves[2] = inverse_scale
        return (jax.tree.unflatten(tree, leaves).dequantize() * x).sum()

    assert q.tensor_inverse_scale is not None
    gradient = jax.jit(jax.grad(f, argnums=(0, 1)))
    grads = gradient(q.tensor_inverse_scale, jnp.ones((2, 32)))
    helpers.assert_same_bits(grads, (jnp.float32(0), jax.jit(lambda: q.dequantize())()))
