"""Functions moved to another precision."""

import collections
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import HALF, WIDE, assert_same_bits
from ..registries import TRANSFORMS

Pair = collections.namedtuple("Pair", ["left", "right"])


def _dtypes(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree) if hasattr(x, "dtype")}


@pytest.mark.parametrize("return_dtype", [None, *WIDE])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("of", WIDE)
def test_inputs_and_outputs_are_cast(of, dtype, return_dtype):
    seen = []

    def f(x, *, y):
        seen.append(_dtypes((x, y)))
        return x + y["b"]

    wrapped = mpx.cast_function(f, dtype, return_dtype)
    out = wrapped(jnp.ones(2, of), y={"b": jnp.ones(2, of)})
    assert seen == [{dtype}]
    assert out.dtype == jnp.dtype(return_dtype or dtype)


BUILD = {
    "dict": lambda x: {"a": x, "b": [x]},
    "list": lambda x: [x, x],
    "tuple": lambda x: (x, None),
    "named tuple": lambda x: Pair(x, x),
    "array": lambda x: x,
}


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_every_kind_of_result_is_cast(build):
    out = mpx.cast_function(build, "float32", "float16")(jnp.ones(2))
    assert _dtypes(out) == {"float16"}
    assert jax.tree.structure(out) == jax.tree.structure(build(1.0))


def test_what_is_no_float_passes():
    def f(x, n, s, flag=True):
        assert flag is True
        return x * n.astype(x.dtype), n, s

    out, n, s = mpx.cast_function(f, "float16")(jnp.ones(2), jnp.arange(2), "text")
    assert out.dtype == np.float16 and n.dtype == np.int32 and s == "text"


def test_a_layer_is_cast_with_its_inputs(getkey):
    layer = eqx.nn.Linear(3, 2, key=getkey())
    x = jnp.ones(3)
    out = mpx.cast_function(layer, "float16")(x)
    half = mpx.cast_to_float16(layer)(x.astype(jnp.float16))
    assert_same_bits(out, half)
    assert layer.weight.dtype == np.float32


@pytest.mark.parametrize("half", HALF)
def test_force_full_precision_returns_half_of_the_call(half):
    f = mpx.force_full_precision(jnp.sum)
    with mpx.half_precision(half):
        assert f(jnp.ones(2, half)).dtype == jnp.dtype(half)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_critical_sum_is_exact(transform, half):
    x = jnp.ones(5000, half)  # adding ones stops at 2048 or 256
    f = mpx.force_full_precision(jnp.sum, jnp.float32)
    assert TRANSFORMS[transform](f)(x) == 5000.0


def test_as_a_decorator():
    @mpx.force_full_precision
    def bare(x):
        """Adds up."""
        assert x.dtype == np.float32
        return x.sum()

    @mpx.force_full_precision(return_dtype="float32")
    def with_dtype(x):
        assert x.dtype == np.float32
        return x.sum()

    @functools.partial(mpx.cast_function, dtype="bf16", return_dtype="f32")
    def low(x):
        assert x.dtype == jnp.bfloat16
        return x.sum()

    x = jnp.ones(2, jnp.float16)
    assert bare.__name__ == "bare" and bare.__doc__ == "Adds up."
    assert bare(x).dtype == np.float16
    assert with_dtype(x).dtype == low(x).dtype == np.float32


def test_a_closed_over_array_is_not_cast():
    weight = jnp.ones(2, jnp.float16)
    out = mpx.cast_function(lambda x: (x, weight), "float32")(jnp.ones(2))
    assert out[1].dtype == np.float32  # a result is, whatever it came from
    assert weight.dtype == np.float16


@pytest.mark.parametrize("dtype", HALF)
def test_no_casts_where_none_are_needed(dtype):
    f = mpx.cast_function(lambda x: x * x, dtype)
    x = jnp.ones(2, dtype)
    assert str(jax.make_jaxpr(f)(x)) == str(jax.make_jaxpr(lambda x: x * x)(x))


def test_an_unknown_dtype_of_force_full_precision_is_refused_at_once():
    with pytest.raises(ValueError, match="needs a dtype; got"):
        mpx.force_full_precision(jnp.sum, "fp32")
