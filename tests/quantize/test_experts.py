"""Stacks of experts: one scale each, and scales of rows, in every way they are written.

Experts differ in size by a thousand, so that a scale of all is that of the largest.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

EXPERTS, ROWS, DEPTH, WIDTH = 3, 16, 24, 8
SIZES = np.array([9, 0, 21, 16], np.int32)  # of groups; two rows are in none
FACTORS = np.float32([1, 1e3, 1e-3])[:, None, None]
keys = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(keys[0], (EXPERTS, ROWS, DEPTH)) * FACTORS
W = jax.random.normal(keys[1], (EXPERTS, DEPTH, WIDTH)) / FACTORS
G = jax.random.normal(keys[2], (EXPERTS, ROWS, WIDTH)) * FACTORS[::-1]

EACH = {
    "current": (mpx.Float8CurrentScaling(one_scale_per_matrix=True), None),
    "rows": (mpx.Float8RowwiseScaling(), None),
    "int8": (mpx.Int8CurrentScaling(), None),
}
EACH["current"] = EACH["current"][0], mpx.Float8CurrentScaling()


def result_and_gradients(f, recipe, x, w, g, target="cpu"):
    """Of a product that is quantized although it is the last one."""
    rules = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="*dot*"))
    options = {"recipe": recipe, "rules": rules, "target": target}
    f = mpx.autocast(f, "float32", weights=1, **options)

    @jax.jit
    def run(x, w, g):
        y, backward = jax.vjp(f, x, w)
        return y, *backward(g)

    return run(x, w, g)


def alone(x, w):
    return x @ w


WAYS = {
    "einsum": lambda x, w: jnp.einsum("erd,edf->erf", x, w),
    "vmap": jax.vmap(alone),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EACH)
def test_each_expert_is_computed_as_if_alone(name: str, way: str):
    recipe, of_one = EACH[name]
    found = result_and_gradients(WAYS[way], recipe, X, W, G)
    for e in range(EXPERTS):
        expected = result_and_gradients(alone, of_one or recipe, X[e], W[e], G[e])
        for one, other in zip(found, expected, strict=True):
            assert_close(one[e], other)


def assert_close(found, expected):
    error = np.abs(np.asarray(found) - np.asarray(expected)).max(initial=0)
    assert error <= 2e-6 * np.abs(np.asarray(expected)).max(initial=0)


def grouped():
    """Rows of four groups, one of them empty, and two rows of none."""
    key = jax.random.split(jax.random.key(1), 3)
    count = int(SIZES.sum()) + 2
    size = np.repeat(np.float32([1e3, 1, 1e-3, 1, 7e7]), [*SIZES, 2])[:, None]
    x = jax.random.normal(key[0], (count, DEPTH)) * size
    w = jax.random.normal(key[1], (len(SIZES), DEPTH, WIDTH))
    return x, w, jax.random.normal(key[2], (count, WIDTH)) * size


def ragged(x, w):
    return jax.lax.ragged_dot(x, w, SIZES)


def test_each_group_of_rows_has_a_scale():
    x, w, g = grouped()
    found = result_and_gradients(ragged, EACH["current"][0], x, w, g)
    start = 0
    for e, size in enumerate(SIZES):
        rows = slice(start, start := start + int(size))
        if not size:
            continue
        y, dx, dw = result_and_gradients(
            alone, mpx.Float8CurrentScaling(), x[rows], w[e], g[rows]
        )
        assert_close(found[0][rows], y)
        assert_close(found[1][rows], dx)
        assert_close(found[2][e], dw)


@pytest.mark.parametrize("name", EACH)
def test_a_small_group_is_not_rounded_away(name: str):
    """Of the experts, each one's gradient; a scale of all loses that of the third."""
    x, w, g = grouped()
    exact = jax.vjp(ragged, x, w)[1](g)[1]

    def errors(recipe):
        _, _, dw = result_and_gradients(ragged, recipe, x, w, g)
        norms = np.linalg.norm(dw - exact, axis=(1, 2))
        return norms[SIZES > 0] / np.linalg.norm(exact, axis=(1, 2))[SIZES > 0]

    assert errors(EACH[name][0]).max() < 0.1
    of_all = mpx.Int8CurrentScaling(one_scale=True)
    assert errors(of_all if name == "int8" else mpx.Float8CurrentScaling()).max() > 0.3


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_shows_in_its_group_only(name: str, bad: float):
    x, w, g = grouped()
    y, dx, dw = result_and_gradients(ragged, EACH[name][0], x.at[3, 5].set(bad), w, g)
    assert not np.isfinite(y[3]).any() and np.isfinite(y[SIZES[0] : -2]).all()
    assert np.isfinite(dx[SIZES[0] : -2]).all()
    assert not np.isfinite(dw[0]).all() and np.isfinite(dw[1:]).all()
