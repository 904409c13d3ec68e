"""Derivative rules of quantized products have no derivative, and say so.

Everything here is traced and nothing compiled.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from mpx._quantize import quantized_product
from tests.quantize import (
    test_linear_convolution as convolution,
    test_linear_ragged as ragged,
)
from tests.quantize.linear_cases import (
    RECIPES,
    linear_product,
    matrix_product,
    scales_of,
)

W, X = jnp.ones((32, 32)), jnp.ones((16, 32))


def linear(recipe_name: str = "current"):
    recipe = RECIPES[recipe_name]
    product = matrix_product(recipe.recipe)

    def layer(w, x):
        return jnp.tanh(linear_product(product, x, w, scales_of(recipe)))

    return layer


def loss_of(layer):
    return lambda w, x: jnp.mean(layer(w, x) ** 2)


def scanned(layer, wrap=lambda f: f):
    """The layer three times, one after the other."""

    def loss(w, x):
        body = wrap(lambda x, _: (layer(w, x), None))
        return jax.lax.scan(body, x, None, length=3)[0].sum()

    return loss


def with_own_rule(f):
    """A function whose derivative rule is that of the function."""

    @jax.custom_vjp
    def own(w, x):
        return f(w, x)

    own.defvjp(lambda *args: jax.vjp(f, *args), lambda pullback, g: pullback(g))
    return own


def sharded(f):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda w, x: jax.lax.pmean(f(w, x), "data"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )


def descended(f):
    """Steps against the gradient, in a loop that is not differentiated."""

    def body(w, _):
        return w - jax.grad(f)(w, X), None

    return lambda w, x: jax.lax.scan(body, w, None, length=2)[0]


grad = functools.partial(jax.grad, argnums=(0, 1))
LAYER = linear()
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
    assert jax.make_jaxpr(ONCE[name])(W, X).eqns


def penalty(f):
    return lambda w, x: (jax.grad(f, 1)(w, x) ** 2).sum()


TWICE = {
    "jvp of grad": lambda f, w, x: jax.jvp(grad(f), (w, x), (w, x)),
    "jvp of jit of grad": lambda f, w, x: jax.jvp(jax.jit(grad(f)), (w, x), (w, x)),
    "hessian": lambda f, w, x: jax.hessian(lambda a: f(a * w, x))(1.0),
    "penalty": lambda f, w, x: jax.grad(penalty(f))(w, x),
    "checkpoint": lambda f, w, x: jax.grad(jax.checkpoint(penalty(f)))(w, x),
    "step": lambda f, w, x: jax.grad(lambda w: f(w - jax.grad(f)(w, x), x))(w),
    # Neither operand has a tangent, only the gradient.
    "of the gradient": lambda f, w, x: jax.grad(
        lambda a: jax.grad(lambda w: a * f(w, x))(w).sum()
    )(1.0),
}
refused = functools.partial(
    pytest.raises, TypeError, match=r"no second derivative.*Put `mpx\.autocast.*around"
)


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_refused(name: str):
    with refused():
        jax.make_jaxpr(functools.partial(TWICE[name], LOSS))(W, X)


@pytest.mark.parametrize("recipe_name", [name for name in RECIPES if name != "current"])
def test_of_every_recipe(recipe_name: str):
    with refused():
        jax.make_jaxpr(jax.grad(penalty(loss_of(linear(recipe_name)))))(W, X)


def _convolved(w, x):
    product = convolution.product_of(mpx.Float8CurrentScaling())
    return jnp.sum(linear_product(product, x, w) ** 2)


def _by_experts(w, x):
    product = ragged.product_of(mpx.Float8CurrentScaling())
    sizes = jnp.asarray(ragged.SIZES)
    return jnp.sum(quantized_product(product, (x, w, sizes)) ** 2)


@pytest.mark.parametrize(
    ("f", "arrays"), [(_convolved, convolution.arrays), (_by_experts, ragged.arrays)]
)
def test_of_convolutions_and_experts(f, arrays):
    x, w, _ = arrays()
    assert jax.make_jaxpr(grad(jax.checkpoint(f)))(w, x).eqns
    with refused():
        jax.make_jaxpr(jax.grad(penalty(f)))(w, x)


def test_of_attention():
    """Products of data with data, too."""
    recipe = mpx.Float8CurrentScaling(fp8_dpa=True)

    @functools.partial(mpx.autocast, recipe=recipe)
    def attention(w, x):
        query, value = x @ w, x @ w.T
        return jnp.mean(jax.nn.softmax(query @ query.T) @ value)

    assert jax.make_jaxpr(grad(attention))(W, X).eqns
    with refused():
        jax.make_jaxpr(jax.grad(penalty(attention)))(W, X)
