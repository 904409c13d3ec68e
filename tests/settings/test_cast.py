"""Casting of trees: which leaves, to which bits, through every transform."""

import functools
import itertools
import os
import warnings

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpx

from ..helpers import (
    EIGHT_BITS,
    FLOAT_LEAVES,
    HALF,
    OTHER_LEAVES,
    WIDE,
    all_codes,
    assert_same_bits,
    is_same_array,
)
from ..registries import TRANSFORMS


@pytest.mark.parametrize("to", WIDE)
@pytest.mark.parametrize("of", [*WIDE, "float64"])
@pytest.mark.parametrize("kind", FLOAT_LEAVES)
def test_float_leaves_are_cast_and_keep_kind_and_shape(kind, of, to):
    if of == "float64" and kind.startswith("jax"):
        with jax.enable_x64(True):
            leaf = FLOAT_LEAVES[kind](of)
    else:
        leaf = FLOAT_LEAVES[kind](of)
    out = mpx.cast_tree(leaf, to)
    assert out.dtype == jnp.dtype(to)
    assert out.shape == leaf.shape
    for base in (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct):
        assert isinstance(out, base) == isinstance(leaf, base)
    assert (out is leaf) == (of == to)


@pytest.mark.parametrize("kind", OTHER_LEAVES)
@pytest.mark.parametrize("to", [*WIDE, *EIGHT_BITS])
def test_other_leaves_are_the_same_object(kind, to):
    leaf = OTHER_LEAVES[kind]()
    out = mpx.cast_tree({"x": [leaf, None]}, to)
    assert out["x"][0] is leaf and out["x"][1] is None


@pytest.mark.parametrize("tree", [None, (), {}, [], {"a": {}}])
def test_empty_trees_stay(tree):
    assert mpx.cast_to_half_precision(tree) == tree


@pytest.mark.parametrize("to", WIDE)
def test_named_functions_are_cast_tree_and_twice_is_once(to, getkey):
    tree = {"w": jax.random.normal(getkey(), (8,)), "n": 3}
    once = mpx.cast_tree(tree, to)
    assert_same_bits(getattr(mpx, f"cast_to_{to}")(tree), once)
    assert mpx.cast_tree(once, to)["w"] is once["w"]


def test_half_and_full():
    x = jnp.ones(2)
    for name in HALF:
        with mpx.half_precision(name):
            half = mpx.cast_to_half_precision(x)
            assert half.dtype == jnp.dtype(name)
            assert mpx.cast_tree(x, "half").dtype == jnp.dtype(name)
            assert mpx.cast_to_full_precision(half).dtype == np.float32


@pytest.mark.parametrize("to", HALF)
def test_a_struct_keeps_its_sharding(to):
    mesh = jax.sharding.Mesh(jax.devices(), "d")
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    struct = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    assert mpx.cast_tree(struct, to).sharding == sharding


@pytest.mark.parametrize(
    ("transform", "to"),
    [
        *itertools.product(TRANSFORMS, HALF),
        *zip(itertools.cycle(TRANSFORMS), EIGHT_BITS, strict=False),
    ],
)
def test_every_transform_gives_the_bits_of_eager(transform, to):
    x = jnp.array([0.0, -0.0, 1 / 3, -1e5, 3e38, 1e-8, jnp.inf, -jnp.inf, jnp.nan])
    cast = functools.partial(mpx.cast_tree, dtype=to)
    assert_same_bits(TRANSFORMS[transform](cast)(x), cast(x))


def test_jit_passes_through_what_is_no_array():
    @jax.jit
    def f(x):
        tree = mpx.cast_to_float16({"x": x, "s": "text", "f": abs, "n": None})
        assert tree["s"] == "text" and tree["f"] is abs and tree["n"] is None
        return tree["x"]

    assert f(jnp.ones(2)).dtype == np.float16


# A few, since JAX compiles for each.
SHAPES = st.sampled_from([(), (0,), (3,), (2, 0, 3), (4, 5), (1, 2, 3)])


@hypothesis.given(
    hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)), st.sampled_from(HALF)
)
def test_values_are_numpys(x, to):
    # Subnormal results differ by machine (XLA may flush them); they are tried below.
    tiny = float(ml_dtypes.finfo(to).smallest_normal)
    x = np.where((np.abs(x) < tiny) & (x != 0), np.float32(1), x)
    with np.errstate(over="ignore"):
        expected = x.astype(jnp.dtype(to))
    for leaf in (x, jnp.asarray(x)):
        out = np.asarray(mpx.cast_tree(leaf, to))
        np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
        number = ~np.isnan(expected)
        assert is_same_array(out[number], expected[number])


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("to", HALF)
def test_subnormal_halves_are_kept(to):
    codes = all_codes(to)
    codes = codes[np.isfinite(codes)]
    assert is_same_array(mpx.cast_tree(codes.astype(np.float32), to), codes)
    if to == "float16":  # those of bfloat16 are subnormal in float32, too
        wide = jnp.asarray(codes).astype(jnp.float32)
        assert is_same_array(mpx.cast_tree(wide, to), codes)


# Among all codes are signalling NaNs, of which numpy warns when they are cast.
@np.errstate(invalid="ignore")
@pytest.mark.parametrize("lib", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("of", HALF)
@pytest.mark.parametrize("to", EIGHT_BITS)
def test_casts_to_8_bits_saturate_for_every_code(to, of, lib):
    codes = all_codes(of)
    cast = functools.partial(mpx.cast_tree, dtype=to)
    if lib is jnp.asarray and "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
        # The suite compiles without the fusion emitters, XLA:CPU's default; what then
        # casts to a `fnuz` format makes NaN of what rounds to zero from below.
        cast = jax.jit(cast, compiler_options={"xla_cpu_use_fusion_emitters": True})
    out = np.asarray(cast(lib(codes)))
    # Clip at the largest finite value, in float64, then ml_dtypes' rounding.
    largest = float(ml_dtypes.finfo(to).max)
    clipped = np.clip(codes.astype(np.float64), -largest, largest)
    expected = clipped.astype(jnp.dtype(to))
    is_nan, wide = np.isnan(codes.astype(np.float32)), out.astype(np.float32)
    assert np.all(np.isnan(wide[is_nan])) and np.all(np.isfinite(wide[~is_nan]))
    assert is_same_array(out[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("to", EIGHT_BITS)
@pytest.mark.parametrize("lib", [np.asarray, jnp.asarray])
def test_wide_values_saturate(to, lib):
    x = np.array([np.inf, 3e38, -3e38, -np.inf, 0.0], np.float32)
    largest = float(ml_dtypes.finfo(to).max)
    out = np.asarray(mpx.cast_tree(lib(x), to)).astype(np.float32)
    assert out.tolist() == [largest, largest, -largest, -largest, 0.0]


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_edges_of_float16(make):
    x = make(np.array([65519.0, 65520.0, -7e4, -0.0, np.nan, np.inf], np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = np.asarray(mpx.cast_to_float16(x))
    expected = np.array([65504, np.inf, -np.inf, -0.0, np.nan, np.inf], np.float16)
    np.testing.assert_array_equal(out, expected)
    assert np.signbit(out[3])


def test_float64_needs_x64():
    with jax.enable_x64(True):
        out = mpx.cast_tree({"a": jnp.ones(2, jnp.float16), "b": np.ones(2)}, "float64")
        assert out["a"].dtype == out["b"].dtype == np.float64
        assert mpx.cast_to_half_precision(out)["a"].dtype == np.float16


def test_keep_sees_paths_and_only_float_leaves():
    seen = []

    def keep(path, leaf):
        seen.append(path)
        return leaf.ndim == 0

    jax.tree_util.register_pytree_with_keys(
        Node := type("Node", (), {"__init__": lambda s, x: setattr(s, "layers", x)}),
        lambda n: (((jax.tree_util.GetAttrKey("layers"), n.layers),), None),
        lambda _, c: Node(*c),
    )
    tree = Node([{"w": 1}, jnp.ones(2), jnp.ones(()), jnp.arange(2)])
    out = mpx.cast_tree(tree, "float16", keep=keep)
    assert seen == ["layers[1]", "layers[2]"]
    assert out.layers[1].dtype == np.float16
    assert out.layers[2] is tree.layers[2]


def test_keep_everything_is_identity():
    tree = {"a": jnp.ones(2), "b": np.ones(2)}
    out = mpx.cast_to_half_precision(tree, keep=lambda path, leaf: True)
    assert out["a"] is tree["a"] and out["b"] is tree["b"]


def test_a_cast_that_does_nothing_leaves_no_trace():
    x = jnp.ones(2, jnp.float16)
    assert not jax.make_jaxpr(mpx.cast_to_float16)(x).eqns


def test_gradients_pass_through_a_cast():
    def f(x):
        return mpx.cast_to_full_precision(mpx.cast_to_half_precision(x) ** 2).sum()

    g = jax.grad(f)(jnp.array([1.0, 2.0]))
    assert g.dtype == np.float32 and g.tolist() == [2.0, 4.0]


@pytest.mark.usefixtures("checking_leaks")
def test_no_leaks():
    jax.jit(mpx.cast_to_half_precision)({"x": jnp.ones(3)})
