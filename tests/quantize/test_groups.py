"""Blocks along rows of which groups have their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx._quantize._formats._blocks import alone
from mpx._quantize._formats._target import CPU
from mpx._quantize._products._contraction import quantized_in_groups
from mpx._quantize._products._lowering import numbers_and_scale
from mpx._quantize._products._operands import Copies
from mpx.quantization import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Role,
    quantize,
)
from tests.collectives import partitioned
from tests.helpers import slow_but

QUANTIZERS = {
    "1x128": BlockQuantizer(),
    "128x128": BlockQuantizer(block_dimensions=2),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4 rotated": NVFP4Quantizer(hadamard=True),
}
RECIPES = {
    "float8 blocks": mpx.Float8BlockScaling(),
    "square": mpx.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "mxfp8": mpx.MXFP8BlockScaling(),
    "nvfp4": mpx.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
SIZES = [
    [5, 11, 6, 20, 3, 9, 5, 5, 100, 36],
    [1] * 10,  # and rows in no group
    [0, 0, 37, 0, 1, 0, 130, 0, 0, 15],
    [0] * 9 + [200],
]
ROWS, COLUMNS = 250, 128


def rows_of(sizes, ratio: float = 30.0) -> np.ndarray:
    """Normal rows; smaller ones of every second group, and zeros in no group."""
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    group = np.repeat(np.arange(len(sizes)), sizes)
    small = np.pad(group % 2 == 1, (0, ROWS - len(group)))
    x[len(group) :] = 0
    return np.where(small[:, None], x / ratio, x).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def read(quantizer, x, sizes):
    """What products see of rows in groups, as numbers times the scale of the array."""

    def in_blocks(x):
        x = jnp.pad(x, ((0, -x.shape[0] % quantizer.block), (0, 0)))
        return quantize(x, quantizer, axis=0)

    y = quantized_in_groups(in_blocks, x, jnp.asarray(sizes), quantizer.block)
    numbers, scale = y._factors(rotated=False)
    return (numbers if scale is None else numbers * scale)[: x.shape[0]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", slow_but(["mxfp8", "nvfp4 rotated"], QUANTIZERS))
def test_no_group_sees_another_one(name: str, sizes):
    """Each is rounded as if there were zeros instead of all others."""
    quantizer, x = QUANTIZERS[name], rows_of(sizes)
    found, ends = np.asarray(read(quantizer, x, np.array(sizes))), np.cumsum(sizes)
    for size, end in zip(sizes, ends, strict=True):
        here = slice(end - size, end)
        only = np.zeros_like(x)
        only[here] = x[here]
        alone = np.asarray(read(quantizer, only, np.array([ROWS])))[here]
        if quantizer.format.bits == 4:  # one scale of all groups on top
            error = np.linalg.norm(found[here] - x[here])
            assert error <= 0.15 * np.linalg.norm(x[here])
        else:
            np.testing.assert_array_equal(found[here], alone)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_groups_of_whole_blocks_change_no_bit(name: str):
    sizes = np.array([128, 0, 384, 128])
    x = np.random.default_rng(0).standard_normal((640, COLUMNS)).astype(np.float32)
    found = read(QUANTIZERS[name], x, sizes)
    np.testing.assert_array_equal(found, read(QUANTIZERS[name], x, np.array([640])))


def test_whole_blocks_get_the_noise_that_they_had():
    x = jnp.asarray(rows_of([ROWS]))
    of = mpx.NVFP4BlockScaling(), Role.GRADIENT, np.dtype("float32"), CPU, alone

    def second(sizes):
        copies = Copies(*of, (-1, -2), jnp.int32(3), sizes=jnp.asarray(sizes))
        _, second = copies.both(x)
        return numbers_and_scale(second)

    found, expected = second([16, 64, 0, 160]), second([ROWS])
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_is_not_finite_shows(name: str, value: float):
    sizes = SIZES[0]
    for row in (4, 5, 199):
        x = rows_of(sizes)
        x[row, 3] = value
        assert not np.isfinite(read(QUANTIZERS[name], x, np.array(sizes))[row, 3])


def gradient_of(recipe):
    def loss(w, x, sizes):
        return jnp.mean((lax.ragged_dot(x, w["experts"], sizes) @ w["out"]) ** 2)

    half = mpx.autocast(loss, recipe=recipe)
    return lambda w, x, s: mpx.grad(half, mpx.NoLossScaling())(w, x, s).grads


@pytest.mark.parametrize("recipe_name", slow_but(["nvfp4"], RECIPES))
def test_gradients_of_experts_beside_larger_ones(recipe_name: str):
    keys = jax.random.split(jax.random.key(0), 2)
    w = {
        "experts": jax.random.normal(keys[0], (10, COLUMNS, 32)) / 11,
        "out": jax.random.normal(keys[1], (32, 8)) / 6,
    }
    run, sizes = jax.jit(gradient_of(RECIPES[recipe_name])), jnp.asarray(SIZES[0])
    exact, errors = jax.jit(gradient_of(None)), {}
    for ratio in (1.0, 1000.0):
        x = jnp.asarray(rows_of(SIZES[0], ratio))
        grads, right = (f(w, x, sizes)["experts"] for f in (run, exact))
        norms = [jnp.linalg.norm(g, axis=(1, 2)) for g in (grads - right, right)]
        errors[ratio] = np.asarray(norms[0] / norms[1])
    assert np.all(errors[1000.0] < 1.5 * errors[1.0].max())
    assert errors[1.0].max() < (0.35 if recipe_name == "nvfp4" else 0.1)


@pytest.mark.parametrize("recipe_name", slow_but(["nvfp4"], RECIPES))
def test_no_device_gathers_the_rows(recipe_name: str):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole, pieces = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    like = jax.ShapeDtypeStruct
    w = {
        "experts": like((4, 64, 128), "float32", sharding=whole),
        "out": like((128, 8), "float32", sharding=whole),
    }
    x = like((8192, 64), "float32", sharding=pieces)
    sizes = like((4,), "int32", sharding=whole)
    run = gradient_of(RECIPES[recipe_name])
    sent = partitioned(run, w, x, sizes, devices=8, out_shardings=whole)
    assert {m.kind for m in sent} == {"all-reduce"}
    # Gradients of weights, and a block of each group.
    assert max(m.bytes for m in sent) <= 4 * 4 * 64 * 128


def test_bytes_that_are_kept():
    """Of 8 bits only scales are added, of 4 bits a block for each group."""
    sizes, x = jnp.asarray(SIZES[0]), jnp.zeros((4096, COLUMNS))
    for name, quantizer in QUANTIZERS.items():
        in_blocks = functools.partial(quantize, quantizer=quantizer, axis=0)
        form = functools.partial(quantized_in_groups, in_blocks, block=quantizer.block)
        kept = jax.tree.leaves(jax.eval_shape(form, x, sizes))
        kept = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
        rows = quantizer.block / 2 if "nvfp4" in name else 0
        scales = {"1x128": 4, "128x128": 4 / 128}.get(name, 1)
        added = 9 * COLUMNS * (rows + scales)
        assert kept <= in_blocks(x).nbytes + added + 64
