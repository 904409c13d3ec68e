"""`QuantizedArray` as a PyTree: transforms, pickle, abstract values, storage."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx.quantization import MXFP8Quantizer, NVFP4Quantizer, QuantizedArray, quantize
from tests import helpers
from tests.quantize.cases import DATA, KINDS, QUANTIZERS, SHAPE

each_quantizer = pytest.mark.parametrize(
    "name", ["tensor e4m3", "128x128", "nvfp4 1x16"]
)


def stack(name: str):
    x = DATA["normal"]().reshape(2, SHAPE[0] // 2, SHAPE[1])
    x = x * np.array([1, 64], np.float32)[:, None, None]
    return QUANTIZERS[name][0], jnp.asarray(x)


@functools.cache
def stacked(name: str) -> QuantizedArray:
    quantizer, x = stack(name)
    return jax.jit(jax.vmap(lambda x: quantize(x, quantizer)))(x)


dequantized = jax.jit(lambda q: q.dequantize())


@each_quantizer
def test_rows_of_a_vmap_are_quantized_on_their_own(name: str):
    quantizer, x = stack(name)
    mapped = stacked(name)
    assert mapped.shape == x.shape
    values = np.asarray(dequantized(mapped))

    @jax.jit
    def one(x):
        row = quantize(x, quantizer)
        return row, row.dequantize()

    for index in range(2):
        row, expected = one(np.asarray(x)[index])
        for ours, theirs in zip(*map(jax.tree.leaves, (mapped, row)), strict=True):
            assert helpers.is_same_array(np.asarray(ours)[index], theirs)
        assert helpers.is_same_array(values[index], expected)


@each_quantizer
def test_a_scan_takes_and_gives_quantized_arrays(name: str):
    mapped = stacked(name)

    body = lambda carry, q: (carry + 1, (q, q.dequantize()))  # noqa: E731
    _, (again, values) = jax.lax.scan(body, 0, mapped)
    helpers.assert_same_bits(again, mapped)
    helpers.assert_same_bits(values, dequantized(mapped))


@each_quantizer
def test_shapes_are_known_without_numbers(name: str):
    quantizer, x = stack(name)
    q = jax.jit(lambda x: quantize(x, quantizer))(x)
    abstract = jax.eval_shape(lambda x: quantize(x, quantizer), x)
    assert isinstance(abstract, QuantizedArray)
    assert jax.tree.structure(abstract) == jax.tree.structure(q)
    for a, b in zip(*map(jax.tree.leaves, (abstract, q)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert abstract.shape == q.shape == x.shape
    assert abstract.nbytes == q.nbytes
    assert (q.ndim, q.size) == (3, x.size)
    value = jax.eval_shape(lambda q: q.dequantize(), abstract)
    assert (value.shape, value.dtype) == (x.shape, x.dtype)


@each_quantizer
def test_pickle_and_copies_keep_every_bit(name: str):
    q = stacked(name)
    for again in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        helpers.assert_same_bits(again, q)
        helpers.assert_same_bits(dequantized(again), dequantized(q))


def test_bytes_are_those_of_the_formats():
    x = jnp.ones((256, 512), jnp.bfloat16)
    one, square = 32 / x.size, 32 / 128**2  # scales of float32
    bits = (8 + one, 8 + 32 / 128, 8 + square, 8 + 8 / 32)
    bits += (4 + 8 / 16 + one, 4 + 8 / 256 + one)
    for name, expected in zip(KINDS, bits, strict=True):
        q = jax.eval_shape(lambda x, by=QUANTIZERS[name][0]: quantize(x, by), x)
        assert q.nbytes == x.size * expected / 8
    nvfp4 = jax.jit(lambda x: quantize(x, NVFP4Quantizer()))(x)
    guard = 1  # one boolean
    assert nvfp4.nbytes + guard == sum(x.nbytes for x in jax.tree.leaves(nvfp4))
    assert (nvfp4.payload.dtype, nvfp4.payload.shape) == (jnp.uint8, (256, 256))
    assert nvfp4.nbytes <= 0.30 * x.nbytes


def test_it_is_immutable():
    q = jax.eval_shape(lambda x: quantize(x, NVFP4Quantizer()), jnp.ones(16))
    with pytest.raises(AttributeError, match="assign to field"):
        q.payload = q.payload


def test_a_jitted_function_is_compiled_once_for_equal_metadata():
    traced = []

    @jax.jit
    def f(q):
        traced.append(q)
        return q.dequantize()

    x = DATA["normal"]()[:12].reshape(3, 4, -1)
    run = jax.jit(quantize, static_argnums=1)
    for one in x:
        f(run(one, MXFP8Quantizer()))
    assert len(traced) == 1
    f(run(one, NVFP4Quantizer()))
    assert len(traced) == 2
