"""Derivatives: straight through the round trip, none through what is stored.

And none of the derivative rules of quantized products, which say so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from mpx._quantize import quantized_product
from mpx.quantization import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    TensorQuantizer,
    quantize,
    quantize_dequantize,
)
from tests import helpers
from tests.quantize import (
    linear_cases as linear,
    test_linear_convolution as convolution,
    test_linear_ragged as ragged,
)
from tests.quantize.cases import KINDS, QUANTIZERS
from tests.registries import TRANSFORMS

X, T = (
    np.random.default_rng(seed).standard_normal((128, 128)).astype(np.float32)
    for seed in range(2)
)
each_quantizer = pytest.mark.parametrize("name", KINDS)


@each_quantizer
def test_the_derivative_is_that_of_the_identity(name: str):
    quantizer, _ = QUANTIZERS[name]
    x, t = jnp.asarray(X), jnp.asarray(T)

    @jax.jit
    def all_of_them(x, t):
        f = lambda x: quantize_dequantize(x, quantizer)  # noqa: E731
        value, tangent = jax.jvp(f, (x,), (t,))
        pulled, back = jax.vjp(f, x)
        expected = quantize(x, quantizer).dequantize()
        return value, tangent, pulled, back(t)[0], expected

    value, tangent, pulled, cotangent, expected = all_of_them(x, t)
    helpers.assert_same_bits((tangent, cotangent), (t, t))
    helpers.assert_same_bits((value, pulled), (expected, expected))


def test_the_chain_rule_sees_the_quantized_value():
    """d/dx of y(x)^2 is 2 y, and the second derivative that of y^2 with y' = 1."""
    g = lambda x: quantize_dequantize(x, TensorQuantizer(), scale=1.0)  # noqa: E731
    f = lambda x: g(x) ** 2  # noqa: E731
    assert float(g(jnp.float32(1.3))) == 1.25
    assert float(jax.grad(f)(jnp.float32(1.3))) == 2.5
    assert float(jax.grad(jax.grad(f))(jnp.float32(1.3))) == 2.0
    assert float(jax.grad(f)(jnp.float32(1000.0))) == 2 * 448.0  # saturated, too


@pytest.mark.parametrize("dtype", helpers.WIDE)
def test_gradients_have_the_dtype_of_the_array(dtype: str):
    f = lambda x: quantize_dequantize(x, MXFP8Quantizer()).sum()  # noqa: E731
    grad = jax.jit(jax.grad(f))(jnp.ones((2, 32), dtype))
    helpers.assert_same_bits(grad, jnp.ones((2, 32), dtype))


def test_the_scale_and_the_key_get_no_gradient():
    quantizer = TensorQuantizer(stochastic_rounding=True)

    def f(x, scale, key):
        return quantize_dequantize(x, quantizer, scale=scale, key=key).sum()

    x, key = jnp.ones(4), jax.random.key(0)
    grads = jax.jit(jax.grad(f, argnums=(0, 1)))(x, jnp.float32(3.0), key)
    helpers.assert_same_bits(grads, (jnp.ones(4), jnp.float32(0)))


def test_it_goes_through_vmap_scan_and_remat():
    rounded = functools.partial(quantize_dequantize, quantizer=MXFP8Quantizer())
    f = lambda x: (rounded(x) ** 2).sum()  # noqa: E731

    @jax.jit
    def all_of_them(x):
        grads = [jax.grad(transform(f))(x) for transform in TRANSFORMS.values()]
        return 2 * rounded(x), *grads, jax.vmap(jax.grad(f))(x)

    expected, *grads = all_of_them(jnp.asarray(X))
    for grad in grads:
        helpers.assert_same_bits(grad, expected)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_quantize_refuses_to_be_differentiated(transform):
    f = lambda x: quantize(x, MXFP8Quantizer()).dequantize().sum()  # noqa: E731
    x = jnp.ones((2, 32))
    assert jax.jit(jax.vmap(f))(x).tolist() == [32.0, 32.0]  # no derivative asked for
    match = "no derivative.*`mpx.quantization.quantize_dequantize`"
    with pytest.raises(TypeError, match=match):
        jax.eval_shape(transform(f), x)
    stopped = jax.jit(transform(lambda x: x.sum() * f(jax.lax.stop_gradient(x))))(x)
    helpers.assert_same_bits(stopped, jnp.full((2, 32), 64.0))


def test_a_quantized_array_is_a_constant_to_derivatives():
    q = jax.jit(lambda x: quantize(x, NVFP4Quantizer()))(jnp.ones((2, 32)))

    def f(inverse_scale, x):
        leaves, tree = jax.tree.flatten(q)
        leaves[2] = inverse_scale
        return (jax.tree.unflatten(tree, leaves).dequantize() * x).sum()

    assert q.tensor_inverse_scale is not None
    grads = jax.jit(jax.grad(f, (0, 1)))(q.tensor_inverse_scale, jnp.ones((2, 32)))
    helpers.assert_same_bits(grads, (jnp.float32(0), jax.jit(lambda: q.dequantize())()))


# --- Products, which are traced here and not compiled ---------------------------------

W, ROWS = jnp.ones((32, 32)), jnp.ones((16, 32))


def layer_of(recipe_name: str = "current"):
    recipe = linear.RECIPES[recipe_name]
    product, scales = linear.matrix_product(recipe.recipe), linear.scales_of(recipe)
    return lambda w, x: jnp.tanh(linear.linear_product(product, x, w, scales))


def loss_of(layer):
    return lambda w, x: jnp.mean(layer(w, x) ** 2)


def scanned(layer, wrap=lambda f: f):
    def loss(w, x):
        body = wrap(lambda x, _: (layer(w, x), None))
        return jax.lax.scan(body, x, None, length=3)[0].sum()

    return loss


def with_own_rule(f):
    """A function whose derivative rule is that of the function."""
    own = jax.custom_vjp(lambda w, x: f(w, x))
    own.defvjp(lambda *args: jax.vjp(f, *args), lambda pullback, g: pullback(g))
    return own


def sharded(f):
    return jax.shard_map(
        lambda w, x: jax.lax.pmean(f(w, x), "data"),
        mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )


def descended(f):
    """Steps against the gradient, in a loop that is not differentiated."""
    body = lambda w, _: (w - jax.grad(f)(w, ROWS), None)  # noqa: E731
    return lambda w, x: jax.lax.scan(body, w, None, length=2)[0]


grad = functools.partial(jax.grad, argnums=(0, 1))
LAYER = layer_of()
LOSS = loss_of(LAYER)
# Programs of first derivatives.
ONCE = {
    "jit": grad(jax.jit(LOSS)),
    "checkpoint": grad(jax.checkpoint(LOSS)),
    "policy": grad(jax.checkpoint(LOSS, policy=jax.checkpoint_policies.dots_saveable)),
    "scan": grad(scanned(LAYER)),
    "scan of checkpoint": grad(scanned(LAYER, jax.checkpoint)),
    "vmap of grad": lambda w, x: jax.vmap(grad(LOSS), (None, 0))(w, x[:, None]),
    "grad of vmap": grad(lambda w, x: jax.vmap(LOSS, (None, 0))(w, x[:, None]).sum()),
    "vmap of scan": lambda w, x: jax.vmap(grad(scanned(LAYER)), (None, 0))(w, x[None]),
    "cond": grad(lambda w, x: jax.lax.cond(x.sum() > 0, LOSS, LOSS, w, x)),
    "while": lambda w, x: jax.lax.while_loop(
        lambda x: x.sum() < 3, lambda x: x - grad(LOSS)(w, x)[1], x
    ),
    "shard_map": grad(sharded(LOSS)),
    "derivative rule": grad(with_own_rule(LOSS)),
    "checkpoint of a derivative rule": grad(jax.checkpoint(with_own_rule(LOSS))),
    "vjp": lambda w, x: jax.vjp(LOSS, w, x)[1](1.0),
    "linearize": lambda w, x: jax.linear_transpose(jax.linearize(LOSS, w, x)[1], w, x)(
        1.0
    ),
    "descent": descended(LOSS),
    "a derivative by something else": lambda w, x: jax.grad(
        lambda a: grad(lambda w, x: LOSS(w, x) + a * (w**2).sum())(w, x)[0].sum()
    )(1.0),
}


@pytest.mark.parametrize("name", ONCE)
def test_first_derivatives_are_taken_in_any_program(name: str):
    assert jax.make_jaxpr(ONCE[name])(W, ROWS).eqns


def penalty(f):
    return lambda w, x: (jax.grad(f, 1)(w, x) ** 2).sum()


def of_the_gradient(f):
    """Neither operand has a tangent, only the gradient."""
    scaled = lambda a, w, x: jax.grad(lambda w: a * f(w, x))(w).sum()  # noqa: E731
    return lambda w, x: jax.grad(scaled)(1.0, w, x)


def refuse_second_derivatives(f, *args):
    match = r"no second derivative.*Put `mpx\.autocast.*around"
    with pytest.raises(TypeError, match=match):
        jax.make_jaxpr(f)(*args)


TWICE = {
    "jvp of grad": lambda f: lambda *args: jax.jvp(grad(f), args, args),
    "jvp of jit of grad": lambda f: lambda *args: jax.jvp(jax.jit(grad(f)), args, args),
    "hessian": lambda f: lambda w, x: jax.hessian(lambda a: f(a * w, x))(1.0),
    "penalty": lambda f: jax.grad(penalty(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(penalty(f))),
    "step": lambda f: jax.grad(lambda w, x: f(w - jax.grad(f)(w, x), x)),
    "of the gradient": of_the_gradient,
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_of_products_are_refused(name: str):
    refuse_second_derivatives(TWICE[name](LOSS), W, ROWS)


@pytest.mark.parametrize("name", [name for name in linear.RECIPES if name != "current"])
def test_second_derivatives_of_every_recipe_are_refused(name: str):
    refuse_second_derivatives(jax.grad(penalty(loss_of(layer_of(name)))), W, ROWS)


def _convolved(w, x):
    return jnp.sum(linear.linear_product(convolution.product_of(), x, w) ** 2)


def _by_experts(w, x):
    sizes = jnp.asarray(ragged.SIZES)
    return jnp.sum(quantized_product(ragged.product_of(), (x, w, sizes)) ** 2)


@functools.partial(mpx.autocast, recipe=mpx.Float8CurrentScaling(fp8_dpa=True))
def _attention(w, x):
    """Products of data with data, too."""
    query, value = x @ w, x @ w.T
    return jnp.mean(jax.nn.softmax(query @ query.T) @ value)


@pytest.mark.parametrize(
    ("f", "arrays"),
    [
        (_convolved, convolution.arrays),
        (_by_experts, ragged.arrays),
        (_attention, lambda: (ROWS, W, None)),
    ],
)
def test_second_derivatives_of_other_products_are_refused(f, arrays):
    x, w, _ = arrays()
    wrap = jax.checkpoint if f is not _attention else lambda f: f
    assert jax.make_jaxpr(grad(wrap(f)))(w, x).eqns
    refuse_second_derivatives(jax.grad(penalty(f)), w, x)
