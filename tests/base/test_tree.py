"""`all_finite` and `select_tree`."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx._base.tree import WeightsByPath, path_text

from ..helpers import EIGHT_BITS, OTHER_LEAVES, WIDE, assert_same_bits
from ..registries import TRANSFORMS

# A few, since JAX compiles for each.
SHAPES = st.sampled_from([(), (0,), (3,), (2, 0, 3), (4, 5), (1, 2, 3)])
BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize(
    "tree",
    [{}, None, (), [{}, None], {"a": jnp.ones((0,))}, "text", jax.random.key(0)],
    ids=str,
)
def test_nothing_to_look_at_is_finite(tree):
    flag = mpx.all_finite(tree)
    assert flag.shape == () and flag.dtype == bool and bool(flag)


@pytest.mark.parametrize("kind", OTHER_LEAVES)
def test_leaves_that_are_finite(kind):
    assert bool(mpx.all_finite([OTHER_LEAVES[kind](), jnp.ones(2)]))
    assert not bool(mpx.all_finite([OTHER_LEAVES[kind](), jnp.array(jnp.nan)]))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", [*WIDE, "float64", "complex64"])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_one_bad_number_is_found(make, dtype, value):
    x = np.ones((3, 4))
    x[1, 2] = value
    array = make(x.astype("float32" if make is jnp.asarray else "float64"))
    array = array.astype(
        "float32" if make is jnp.asarray and dtype == "float64" else dtype
    )
    assert not bool(mpx.all_finite({"a": jnp.ones(2), "b": [array]}))
    assert bool(mpx.all_finite(make(np.ones(2, np.float32)).astype(array.dtype)))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_nan_in_8_bits_is_found(dtype):
    assert not bool(mpx.all_finite(jnp.array([1.0, jnp.nan]).astype(dtype)))
    assert bool(mpx.all_finite(jnp.array([1.0, 2.0]).astype(dtype)))


@pytest.mark.parametrize("value", [*BAD, complex(0, np.inf), complex(np.nan, 0)])
def test_python_numbers_are_looked_at(value):
    assert not bool(mpx.all_finite({"lr": value}))
    assert bool(mpx.all_finite({"lr": 1.0, "c": 1j}))


@hypothesis.given(
    hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)),
    hnp.arrays(np.float16, (3,), elements=st.floats(width=16)),
)
def test_all_finite_is_numpys(a, b):
    expected = np.isfinite(a).all() and np.isfinite(b).all()
    assert bool(mpx.all_finite({"a": jnp.asarray(a), "b": b})) == expected


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_all_finite_in_every_transform(transform):
    f = TRANSFORMS[transform](lambda x: mpx.all_finite({"x": x, "y": 1.0}))
    assert bool(f(jnp.ones(3)))
    assert not bool(f(jnp.array([1.0, jnp.inf, 0.0])))


def _trees():
    a = {
        "w": jnp.array([jnp.nan, -0.0, 1.0]),
        "n": jnp.arange(2),
        "key": jax.random.key(1),
        "h": jnp.ones((0,), jnp.float16),
        "f8": jnp.ones(2, jnp.float8_e4m3fn),
        "s": "text",
        "f": abs,
        "none": None,
        "c": jnp.array([1j]),
    }
    b = {
        **a,
        "w": jnp.array([2.0, 0.0, jnp.inf]),
        "n": jnp.arange(2) + 5,
        "key": jax.random.key(2),
        "f8": jnp.zeros(2, jnp.float8_e4m3fn),
    }
    return a, b


@pytest.mark.parametrize("make", [bool, np.bool_, jnp.asarray, np.asarray])
@pytest.mark.parametrize("pred", [True, False])
def test_the_chosen_tree_comes_back_bit_for_bit(pred, make):
    a, b = _trees()
    assert_same_bits(mpx.select_tree(make(pred), a, b), a if pred else b)


def test_select_under_jit_and_vmap():
    a, b = jnp.array([jnp.nan, 1.0]), jnp.array([-0.0, 2.0])
    preds = jnp.array([True, False])
    out = jax.jit(jax.vmap(mpx.select_tree))(preds, a, b)
    np.testing.assert_array_equal(out, np.array([np.nan, 2.0], np.float32))


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ({"a": 1, "b": {"a": 2}}, {"[0].mu['a']": [1], "[0].mu['b']['a']": [2, 1]}),
        # A part of the weights, such as the fast ones of `optax.lookahead`.
        ({"x": {"a": 1}, "y": {"a": 2}}, {"[0].mu['a']": [1, 2], "[0].mu['b']": []}),
        (7, {"[0].mu": [7], "[0].count": [7]}),
    ],
)
def test_an_array_belongs_to_the_weight_with_the_longest_path(weights, found):
    """`mpx.forecast` took the first weight whose path is an end, `['a']`."""
    known = WeightsByPath(jax.tree_util.tree_leaves_with_path(weights))
    keys = {"[0]": jax.tree_util.SequenceKey(0)}
    keys |= {f".{x}": jax.tree_util.GetAttrKey(x) for x in ("mu", "count")}
    keys |= {f"[{x!r}]": jax.tree_util.DictKey(x) for x in "ab"}
    for text, wanted in found.items():
        parts = text.replace("[", " [").replace(".", " .").split()
        path = tuple(keys[part] for part in parts)
        assert path_text(path) == text
        assert [weight for _, weight in known.of(path)] == wanted
