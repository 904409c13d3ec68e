"""Derivatives inside of a function under a recipe: a gradient step, a penalty."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest

import mpx
from tests.registries import RECIPES


def mlp(params, x, y):
    hidden = jnp.tanh(x @ params["first"])
    return jnp.mean((jnp.tanh(hidden @ params["second"]) - y) ** 2)


def after_a_step(params, x, y):
    """The loss after a step against its gradient."""
    grads = jax.grad(mlp)(params, x, y)
    return mlp(jax.tree.map(lambda p, g: p - 3 * g, params, grads), x, y)


def with_penalty(params, x, y):
    """The loss, and the size of its gradient by the input."""
    slope = jax.grad(mlp, 1)(params, x, y)
    return mlp(params, x, y) + 3e3 * jnp.mean(jnp.sum(slope**2, -1))


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "first": jax.random.normal(keys[0], (32, 64)) / 6,
        "second": jax.random.normal(keys[1], (64, 32)) / 8,
    }
    return params, *jax.random.normal(keys[2], (2, 32, 32))


def relative_error(found, exact) -> float:
    found, exact = (jax.flatten_util.ravel_pytree(tree)[0] for tree in (found, exact))
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


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
    [("delayed", with_penalty), *((name, after_a_step) for name in RECIPES)],
)
def test_autocast_around_an_inner_derivative_gives_the_gradient(name, outer, inputs):
    exact = jax.grad(outer)(*inputs)
    first = jax.grad(mlp)(*inputs)
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
    assert relative_error(found, jax.grad(with_penalty)(*inputs)) < 0.1


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
    found, exact = jax.jit(func)(*inputs), forces(*inputs)
    assert relative_error(found.astype(jnp.float32), exact) < 0.1


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad])
def test_gradients_of_weights_that_come_out_are_an_error(differentiate, inputs):
    func = mpx.autocast(differentiate(mlp), recipe=mpx.Float8CurrentScaling())
    with pytest.raises(ValueError, match="gradient of a weight.*other way round"):
        func(*inputs)
