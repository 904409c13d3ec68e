"""What the functions keep for the backward pass, array by array."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import mpx
import mpx.nn

from ..helpers import HALF
from .cases import FUNCTIONS, WHERE, kept_arrays

ROWS, COLUMNS = 4, 8
in_half = pytest.mark.parametrize("dtype", HALF)


def big_and_small(kept):
    """The arrays of the input's size, and the others."""
    size = ROWS * COLUMNS
    big = [x for x in kept if len(x[1]) == 2 and x[1][0] * x[1][1] == size]
    return big, [x for x in kept if x not in big]


@in_half
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_one_half_array_and_float32_rows(name, dtype):
    case = FUNCTIONS[name]
    mine, other = case.pair(axis=-1)
    x = jnp.ones((ROWS, COLUMNS), dtype)
    big, small = big_and_small(kept_arrays(mine, x))
    expected = 0 if name == "mean" else 1
    assert big == [(dtype, (ROWS, COLUMNS))] * expected
    assert small == [("float32", (ROWS, 1))] * case.rows
    # And casting, which is what one would write, keeps float32: the test can fail.
    if name != "mean":
        by_cast = kept_arrays(mpx.cast_function(other, "float32", dtype), x)
        assert ("float32", (ROWS, COLUMNS)) in by_cast
        forced = kept_arrays(mpx.force_full_precision(other, dtype), x)
        assert ("float32", (ROWS, COLUMNS)) not in forced


@in_half
@pytest.mark.parametrize("name", [n for n, c in FUNCTIONS.items() if c.with_where])
def test_masks_are_kept_as_they_are(name, dtype):
    mine, _ = FUNCTIONS[name].pair(axis=-1, where=WHERE[None])
    big, _ = big_and_small(kept_arrays(mine, jnp.ones((ROWS, COLUMNS), dtype)))
    assert {x[0] for x in big} <= {dtype, "bool"}


@pytest.mark.parametrize("transform", ["jit", "vmap", "remat", "scan"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip((name for name in FUNCTIONS if name != "mean"), itertools.cycle(HALF))],
)
def test_no_transform_makes_it_keep_float32(name, dtype, transform):
    mine, _ = FUNCTIONS[name].pair(axis=-1)
    x = jnp.ones((3, ROWS, COLUMNS), dtype)
    func = {
        "jit": jax.jit(mine),
        "vmap": jax.vmap(mine),
        "remat": jax.checkpoint(mine),
        "scan": lambda x: jax.lax.scan(lambda c, x: (c, mine(x)), 0, x)[1],
    }[transform]
    kept = kept_arrays(func, x)
    big = [x for x in kept if x[1] == (3, ROWS, COLUMNS)]
    assert big == [(dtype, (3, ROWS, COLUMNS))]


@in_half
def test_norms_with_parameters(dtype):
    x = jnp.ones((ROWS, COLUMNS), dtype)
    w = jnp.ones(COLUMNS)
    big, small = big_and_small(kept_arrays(mpx.nn.layer_norm, x, w, w))
    assert big == [(dtype, x.shape)]
    assert set(small) == {("float32", (ROWS, 1)), ("float32", w.shape)}


@pytest.mark.parametrize(("dtype", "smoothing"), [("float16", 0.0), ("bfloat16", 0.1)])
def test_cross_entropy(dtype, smoothing):
    logits = jnp.ones((ROWS, COLUMNS), dtype)
    rows = [("float32", (ROWS, 1))] * 2
    labels = jnp.zeros(ROWS, jnp.int32)

    def loss(x, labels):
        return mpx.nn.cross_entropy(x, labels, label_smoothing=smoothing)

    kept = kept_arrays(lambda x: loss(x, labels), logits)
    assert kept == sorted([(dtype, logits.shape), ("int32", (ROWS,)), *rows])
    kept = kept_arrays(loss, logits, jax.nn.one_hot(labels, COLUMNS, dtype=dtype))
    assert kept == sorted([(dtype, logits.shape)] * 2 + rows)


def test_half_probabilities_of_float32_scores():
    softmax = lambda x: mpx.nn.softmax(x, dtype="bfloat16")  # noqa: E731
    kept = kept_arrays(softmax, jnp.ones((ROWS, COLUMNS)))
    assert kept == [("bfloat16", (ROWS, COLUMNS))]
