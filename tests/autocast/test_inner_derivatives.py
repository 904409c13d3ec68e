"""Derivatives inside of a function under a recipe: a gradient step, a penalty."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import slow_but
from ..registries import RECIPES
from .counting import relative_error


def mlp(params, x, y):
    hidden = jnp.tanh(x @ params["first"])
    return jnp.mean((jnp.tanh(hidden @ params["second"]) - y) ** 2)


def after_a_step(params, x, y):
    grads = jax.grad(mlp)(params, x, y)
    return mlp(jax.tree.map(lambda p, g: p - 3 * g, params, grads), x, y)


def with_penalty(params, x, y):
    slope = jax.grad(mlp, 1)(params, x, y)
    return mlp(params, x, y) + 3e3 * jnp.mean(jnp.sum(slope**2, -1))


@pytest.fixture(scope="module")
def inputs():
    normal = np.random.default_rng(0).standard_normal
    params = {
        "first": jnp.asarray(normal((32, 64), np.float32) / 6),
        "second": jnp.asarray(normal((64, 32), np.float32) / 8),
    }
    return params, *map(jnp.asarray, normal((2, 32, 32), np.float32))


@functools.cache
def gradient_of(func):
    return jax.jit(jax.grad(func))


def trained(func, inputs):
    """The gradients of a few steps later, for the scales of recipes with a state."""
    scaling = mpx.init_scaling(func, *inputs)

    @jax.jit
    def step(scaling, *inputs):
        return mpx.filter_grad(func, scaling)(*inputs)

    for _ in range(3):
        result = step(scaling, *inputs)
        scaling = result.scaling
    return result.grads, scaling


@pytest.mark.parametrize(
    ("name", "outer"),
    [
        ("delayed", with_penalty),
        *slow_but(
            [("mxfp8", after_a_step)], [(name, after_a_step) for name in RECIPES]
        ),
    ],
)
def test_autocast_around_an_inner_derivative_gives_the_gradient(name, outer, inputs):
    exact, first = gradient_of(outer)(*inputs), gradient_of(mlp)(*inputs)
    func = mpx.autocast(outer, recipe=RECIPES[name])
    found, scaling = trained(func, inputs)
    error = relative_error(found, exact)
    assert error < (0.3 if name == "nvfp4" else 0.1)
    # Far nearer than what leaves the inner derivative out.
    assert error < relative_error(first, exact) / 2
    if name == "delayed":
        uses = list(scaling.scales_by_weight())
        assert "['second'] (64x32 transposed)" in uses
        scales = scaling.scales_by_weight()
        # Of another size than the data that the weight meets before.
        data, slope = scales["['second'] (64x32)"], scales[uses[-1]]
        assert slope[0] > 16 * data[0]


def test_the_inner_derivative_may_be_left_in_high_precision(inputs):
    def outer(params, x, y):
        with mpx.autocast(recipe=None):
            slope = jax.grad(mlp, 1)(params, x, y)
        return mlp(params, x, y) + 3e3 * jnp.mean(jnp.sum(slope**2, -1))

    func = mpx.autocast(outer, recipe=mpx.Float8CurrentScaling())
    found = jax.jit(jax.grad(func))(*inputs)
    assert relative_error(found, gradient_of(with_penalty)(*inputs)) < 0.1


def test_a_recipe_inside_of_a_derivative_that_is_differentiated_is_an_error(inputs):
    inner = mpx.autocast(mlp, recipe=mpx.Float8CurrentScaling())

    def outer(params, x, y):
        return jnp.sum(jax.grad(inner, 1)(params, x, y) ** 2)

    with pytest.raises(TypeError, match="no second derivative"):
        jax.make_jaxpr(jax.grad(outer))(*inputs)


def test_forces_are_a_derivative_by_data(inputs):
    """They come out of a function, and are no gradients of weights."""

    def forces(params, x, y):
        return -jax.grad(mlp, 1)(params, x, y)

    func = mpx.autocast(forces, recipe=mpx.Float8CurrentScaling())
    found, exact = jax.jit(lambda *args: (func(*args), forces(*args)))(*inputs)
    assert relative_error(found, exact) < 0.1


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad])
def test_gradients_of_weights_that_come_out_are_an_error(differentiate, inputs):
    func = mpx.autocast(differentiate(mlp), recipe=mpx.Float8CurrentScaling())
    with pytest.raises(ValueError, match="gradient of a weight.*other way round"):
        jax.eval_shape(func, *inputs)
