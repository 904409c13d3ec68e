"""What delayed scaling learns from a product: amaxes in the place of a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.quantize.linear_cases import (
    LAYOUTS,
    RECIPES,
    data,
    linear_product,
    product_of,
    result_and_gradients,
)

LAYOUT = LAYOUTS["weight first"]
DELAYED = product_of(RECIPES["delayed"], LAYOUT)
ONES = jnp.ones(3)


def amaxes_of(left, right, g, scales=ONES) -> np.ndarray:
    return np.asarray(result_and_gradients(DELAYED, left, right, g, scales)[3])


def test_amaxes_are_those_of_input_weight_and_gradient():
    weight, x, g = data(LAYOUT)
    exact = [np.abs(array).max() for array in (x, weight, g)]
    np.testing.assert_array_equal(amaxes_of(weight, x, g), exact)
    # They are what came, not what the scales made of it.
    np.testing.assert_array_equal(amaxes_of(weight, x, g, 1e-6 * ONES), exact)


def with_one(x, value: float) -> np.ndarray:
    x = np.array(x)
    x[1, 2, 3] = value
    return x


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(value: float):
    weight, x, g = data(LAYOUT)
    usual = amaxes_of(weight, x, g)
    bad = amaxes_of(weight, with_one(x, value), g)
    np.testing.assert_array_equal(bad, [abs(value), usual[1], usual[2]])
    bad = amaxes_of(weight, x, with_one(g, value))
    np.testing.assert_array_equal(bad, [usual[0], usual[1], abs(value)])


def test_amaxes_go_into_the_state_as_they_come():
    weight, x, g = data(LAYOUT)
    recipe = mpx.DelayedScaling(margin=1)
    amaxes = amaxes_of(weight, x, g)
    states = [recipe.init() for _ in mpx.quantization.Role]
    states = [
        recipe.update(state, jnp.asarray(amax), role)
        for state, amax, role in zip(states, amaxes, mpx.quantization.Role, strict=True)
    ]
    largest = [448.0, 448.0, 57344.0]
    for state, amax, top in zip(states, amaxes, largest, strict=True):
        assert state.scale == np.float32(np.float32(top) / amax) / 2


def test_a_scale_of_zero_starts_warm_with_the_margin_of_the_recipe():
    left, right, g = data(LAYOUT)
    recipe = mpx.DelayedScaling(margin=2, warm_start=True)
    roomy = RECIPES["delayed"].__class__(recipe, ())
    product = product_of(roomy, LAYOUT)
    amaxes = amaxes_of(left, right, g)
    scales = jnp.array([448.0, 448.0, 57344.0]) / amaxes / 4
    warm = result_and_gradients(product, left, right, g, jnp.zeros(3))
    given = result_and_gradients(product, left, right, g, scales)
    jax.tree.map(np.testing.assert_array_equal, warm, given)
    # Nothing to learn from: a scale of 1.
    zero = jnp.zeros_like(right)
    warm = result_and_gradients(product, left, zero, g, jnp.zeros(3))
    assert not warm[0].any() and np.isfinite(warm[1]).all()


def test_only_a_warm_start_lets_quantizing_wait_for_the_amax():
    """An array is read once more for that."""

    def reduces(recipe):
        product = product_of(RECIPES["delayed"].__class__(recipe, ()), LAYOUT)

        def results(left, right, g, scales):
            return result_and_gradients(product, left, right, g, scales)[:3]

        compiled = jax.jit(results).lower(*data(LAYOUT), jnp.ones(3)).compile()
        return " reduce(" in compiled.as_text()

    assert reduces(mpx.DelayedScaling(warm_start=True))
    assert not reduces(mpx.DelayedScaling())


def test_a_scale_of_zero_without_a_warm_start_is_one():
    left, right, g = data(LAYOUT)
    product = product_of(RECIPES["delayed"], LAYOUT)
    found = result_and_gradients(product, left, right, g, jnp.zeros(3))
    expected = result_and_gradients(product, left, right, g, jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_each_slot_of_a_scan_gets_its_own_amaxes():
    weight, x, _ = data(LAYOUTS["matrices"])
    square = jnp.eye(40) * 0.5
    product = product_of(RECIPES["delayed"], LAYOUTS["matrices"])

    @jax.jit
    def run(x, scales):
        def layer(x, scales):
            return linear_product(product, x, square, scales), None

        return jax.lax.scan(layer, x, scales)[0].sum()

    found = jax.grad(run, argnums=1)(weight, jnp.zeros((4, 3)))
    amax = np.abs(weight).max()
    expected = [[amax / 2**i, 0.5, 0.5 ** (3 - i)] for i in range(4)]
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_vmap_inside_is_refused_and_outside_is_not_needed():
    weight, x, g = data(LAYOUT)
    product = product_of(RECIPES["delayed"], LAYOUTS["matrices"])

    def loss(x, weight, scales):
        return linear_product(product, x, weight.T, scales).sum()

    def mapped(x, weight, scales):
        return jax.vmap(loss, (0, None, None))(x, weight, scales).sum()

    with pytest.raises(ValueError, match=r"3 examples.*mpx.autocast\(jax.vmap\(f\)\)"):
        jax.eval_shape(jax.grad(mapped), x, weight, ONES)
    with pytest.raises(ValueError, match="outside vmap"):
        jax.eval_shape(mapped, x, weight, ONES)
    # One slot for each element is what an ensemble has.
    x, weight = np.asarray(x), np.asarray(weight)
    ensemble = jax.jit(jax.vmap(jax.grad(loss, argnums=2)))
    found = ensemble(x, np.stack([weight] * 3), np.ones((3, 3), np.float32))
    expected = [np.abs(x).max((1, 2)), [np.abs(weight).max()] * 3, [1.0] * 3]
    np.testing.assert_array_equal(found, np.stack(expected, 1))
