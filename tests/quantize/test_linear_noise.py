"""Stochastic rounding of gradients in NVFP4, whose key is made of the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._noise import key_from
from tests.quantize.linear_cases import matrix_product, result_and_gradients

PRODUCT = matrix_product(mpx.NVFP4BlockScaling())
X, W, G = (
    np.random.default_rng(seed).standard_normal(shape, np.float32)
    for seed, shape in enumerate(((16, 32), (32, 48), (16, 48)))
)


def test_the_same_gradient_is_rounded_the_same_way_and_another_another_way():
    first = result_and_gradients(PRODUCT, X, W, G)
    again = result_and_gradients(PRODUCT, X, W, G)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    # The change is too small to be seen but for the draws.
    changed = G.copy()
    changed[0, 0] *= np.float32(1 + 1e-6)
    _, dx, dw, _ = map(np.asarray, result_and_gradients(PRODUCT, X, W, changed))
    first = [np.asarray(one) for one in first]
    assert (dx != first[1]).mean() > 0.5 and (dw != first[2]).mean() > 0.5
    assert (dx[1:] != first[1][1:]).any()


@pytest.mark.slow
def test_the_mean_over_many_gradients_is_close():
    count = 400
    near = G * (1 + 1e-6 * np.arange(count)).reshape(-1, 1, 1).astype(np.float32)
    many = jax.vmap(lambda g: result_and_gradients(PRODUCT, X, W, g)[1:3])
    nearest = mpx.NVFP4BlockScaling(disable_stochastic_rounding=True)
    plain = matrix_product(nearest)
    half = matrix_product(mpx.NVFP4BlockScaling(backward_override="dequantized"))

    def error(found, exact) -> float:
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    draws = [np.asarray(one) for one in many(near)]
    exact = result_and_gradients(half, X, W, G)[1]
    found = error(draws[0].mean(0), exact)
    once = error(draws[0][0], exact)
    # Without bias the error of a mean falls as 1 / sqrt(count); rounding to the
    # nearest has one that no mean removes.
    assert found < 0.1 * once
    assert found < 0.3 * error(result_and_gradients(plain, X, W, G)[1], exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_key_is_of_the_numbers_and_their_places(dtype: str):
    x = G.astype(jnp.dtype(dtype)).astype("float32")
    turned = x.copy()
    turned[3, 3] *= -1
    key = jax.jit(key_from, static_argnums=1)

    def bits(x, salt: int = 0):
        return tuple(np.asarray(jax.random.key_data(key(x, salt))).tolist())

    keys = {
        "itself": bits(x),
        "salt": bits(x, 1),
        "swapped": bits(x[::-1]),
        "reshaped": bits(x.reshape(48, 16)),
        "sign": bits(turned),
        "doubled": bits(2 * x),
        "zeros": bits(0 * x),
    }
    assert len({*keys.values()}) == len(keys)
    eager = np.asarray(jax.random.key_data(key_from(jnp.asarray(x), 0)))
    assert tuple(eager.tolist()) == keys["itself"]
