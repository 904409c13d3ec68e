"""Stochastic rounding of gradients in NVFP4, whose noise is made of the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._quantize._formats._rounding import Noise, noise_from, noise_of_hash
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
def test_noise_is_of_the_numbers_and_their_places(dtype: str):
    x = G.astype(jnp.dtype(dtype)).astype("float32")
    turned = x.copy()
    turned[3, 3] *= -1
    noise = jax.jit(noise_from, static_argnums=1)

    def bits(x, salt: int = 0):
        return tuple(int(half) for half in jax.tree.leaves(noise(x, salt)))

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
    eager = jax.tree.leaves(noise_from(jnp.asarray(x), 0))
    assert tuple(map(int, eager)) == keys["itself"]


def draws_of(hashes, steps, shape=(64, 128)):
    """Draws by hash and step: [hashes, steps, *shape]."""

    def draw(total, step):
        return noise_of_hash(total, shape, 0, step).uniform(shape)

    hashes, steps = (jnp.asarray(x, jnp.uint32) for x in (hashes, steps))
    by_step = jax.vmap(draw, (None, 0))
    return np.asarray(jax.vmap(by_step, (0, None))(hashes, steps))


# Sums of gradients and numbers of steps that follow one another are the worst keys.
DRAWS = draws_of([0, 1, 2, 2**31, 2**32 - 1], [0, 1, 2, 3, 10**6])


def test_draws_are_uniform():
    flat = DRAWS.ravel()
    assert flat.min() >= 0 and flat.max() < 1
    for parts in (2, 16, 256):
        found = np.bincount((flat * parts).astype(int), minlength=parts)
        wanted = flat.size / parts
        # Chi-squared, which has the variance 2 (parts - 1).
        distance = ((found - wanted) ** 2 / wanted).sum() - (parts - 1)
        assert abs(distance) < 5 * np.sqrt(2 * (parts - 1))
    # All 23 bits, and none leans to a side.
    bits = (flat * 2**23).astype(int)
    for one in range(23):
        assert abs(((bits >> one) & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(flat.size)


def test_draws_know_nothing_of_one_another():
    """Neither along an axis, nor those of two gradients, nor those of two steps."""
    centred = DRAWS - 0.5
    pairs = {
        "columns": (centred[..., 1:], centred[..., :-1]),
        "rows": (centred[..., 1:, :], centred[..., :-1, :]),
        "halves": (centred[..., 64:], centred[..., :64]),
        "hashes": (centred[1:], centred[:-1]),
        "steps": (centred[:, 1:], centred[:, :-1]),
    }
    for name, (one, other) in pairs.items():
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 5 / np.sqrt(one.size), name


def test_a_step_draws_anew_and_an_equal_one_the_same():
    first = draws_of([7], [3])
    np.testing.assert_array_equal(first, draws_of([7], [3]))
    assert (first != draws_of([7], [4])).mean() > 0.999
    assert (first != draws_of([8], [3])).mean() > 0.999
    nobody_knows = noise_of_hash(jnp.uint32(7), (4, 4), 0, None)
    assert isinstance(nobody_knows, Noise)
