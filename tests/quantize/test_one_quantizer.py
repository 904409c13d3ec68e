"""Every combination of a quantizer's options: errors, zeros, and what is not finite."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from mpx.quantization import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    TensorQuantizer,
    quantize,
)
from tests import helpers

E4M3, E5M2, E2M1, INT8 = (mpx.Format[name] for name in ("E4M3", "E5M2", "E2M1", "INT8"))
# The largest relative error of a number as large as the amax, without the scale's.
STEPS = {E4M3: 2**-4, E5M2: 2**-3, E2M1: 2**-2, INT8: 2**-8}
SCALES = ("float32", "power of two", "e8m0", "e4m3")
BLOCKS = ((0, 0), (1, 0), (2, 0), (1, 32), (2, 16))


def is_possible(format: mpx.Format, blocks: tuple[int, int], scales: str) -> bool:
    return blocks[0] > 0 or (format is not E2M1 and scales not in ("e8m0", "e4m3"))


COMBINATIONS = [
    Quantizer(format, *blocks, scales=scales)
    for format, blocks, scales in itertools.product(STEPS, BLOCKS, SCALES)
    if is_possible(format, blocks, scales)
]
X = np.random.default_rng(0).standard_normal((3, 32, 64)).astype(np.float32)
X *= np.exp2(np.arange(32) % 5)[:, None].astype(np.float32)
X[1, 16:, 32:] = 0  # whole blocks
each = pytest.mark.parametrize("quantizer", COMBINATIONS, ids=repr)


def groups(quantizer: Quantizer, x: np.ndarray) -> np.ndarray:
    """The numbers that share a scale, along the last axis."""
    dimensions, block = quantizer.block_dimensions, quantizer.block
    if not dimensions:
        return x.reshape(1, -1)
    rows, columns = (block or 32, block or 64) if dimensions == 2 else (1, block or 64)
    x = x.reshape(3, 32 // rows, rows, 64 // columns, columns)
    return x.swapaxes(2, 3).reshape(-1, rows * columns)


@each
def test_errors_are_those_of_the_format(quantizer: Quantizer):
    q = quantize(X, quantizer, axis=-1)
    found, x = (groups(quantizer, np.asarray(a)) for a in (q.dequantize(), X))
    amax = np.abs(x).max(axis=1, keepdims=True)
    # A scale that is rounded is up to twice as small; with one in E4M3, off by a
    # sixteenth, the largest numbers may saturate.
    room = 1.01 if quantizer.scales in ("float32", "e4m3") else 2.02
    limit = room * STEPS[quantizer.format] + (quantizer.scales == "e4m3") / 15
    assert (np.abs(found - x) <= limit * amax).all()
    assert (found[amax[:, 0] == 0] == 0).all()
    assert q.shape == X.shape and q.block == quantizer.block


@each
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows(quantizer: Quantizer, bad: float):
    x = X.copy()
    x[2, 3, 40] = bad
    found = np.asarray(jax.jit(lambda x: quantize(x, quantizer).dequantize())(x))
    is_bad = groups(quantizer, ~np.isfinite(x)).any(axis=1)
    seen = np.isnan(groups(quantizer, found))
    assert (
        np.isnan(found[2, 3, 40])
        and not seen[~is_bad].any()
        or (
            quantizer.scales == "e4m3" and seen.all()  # by the scale of the tensor
        )
    )
    if not quantizer.format.has_nan:
        assert seen[is_bad].all()


NAMED = {
    TensorQuantizer(E5M2): Quantizer(E5M2),
    BlockQuantizer(): Quantizer(block_dimensions=1, block=128, scales="power of two"),
    MXFP8Quantizer(): Quantizer(E4M3, 1, 32, scales="e8m0"),
    NVFP4Quantizer(2): Quantizer(E2M1, 2, 16, scales="e4m3"),
}


def test_the_four_kinds_are_values_of_one():
    for one, other in NAMED.items():
        assert one == other and hash(one) == hash(other)
        assert eval(repr(one).replace("<", "mpx.").replace(">", "")) == one


@pytest.mark.parametrize("format", [E4M3, INT8])
def test_a_constant_scale_reads_no_array(format: mpx.Format):
    quantizer = Quantizer(format, scale_from=16.0)
    x = jnp.array([1.0, -0.3, 0.0, 1e6])
    q = quantize(x, quantizer)
    helpers.assert_same_bits(q, quantize(x, Quantizer(format), scale=16.0))
    assert float(q.inverse_scale) == 1 / 16
    assert float(q.dequantize()[-1]) == format.largest / 16  # saturates
    for bad in (np.inf, np.nan):
        assert np.isnan(quantize(x.at[0].set(bad), quantizer).dequantize()[0])
    program = str(jax.make_jaxpr(lambda x: quantize(x, Quantizer(scale_from=2.0)))(x))
    assert "reduce_max" not in program


def test_integers_are_rounded_to_nearest_or_at_random():
    x = jnp.array([127.0, 0.5, 1.5, -2.5, 63.4])
    assert quantize(x, Quantizer(INT8)).payload.tolist() == [127, 0, 2, -2, 63]
    random = Quantizer(INT8, stochastic_rounding=True)
    keys = jax.random.split(jax.random.key(0), 2000)
    found = jax.vmap(lambda key: quantize(x, random, key=key).payload)(keys)
    mean = found.astype(jnp.float32).mean(axis=0)
    np.testing.assert_allclose(mean, x, atol=0.06)
    assert (jnp.abs(found.astype(jnp.float32) - x[None]) < 1).all()


def test_a_transform_may_precede_any_scale():
    outlier = X[0] / 100
    outlier[:, 3] = 8
    plain = Quantizer(INT8, 1)
    turned = dataclasses.replace(plain, hadamard=True)
    errors = [
        np.linalg.norm(quantize(outlier, one).dequantize() - outlier)
        for one in (plain, turned)
    ]
    assert errors[1] < 0.7 * errors[0]


@dataclasses.dataclass(frozen=True)
class Halved(Quantizer):
    """Maps half of the amax to the largest number, so that the rest saturates."""

    def range_of(self, blocks, amax):
        assert blocks.shape[:-1] == amax.shape
        return amax / 2


@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_subclass_chooses_what_becomes_the_largest_number(blocks: tuple[int, int]):
    found = quantize(X, Halved(E4M3, *blocks)).dequantize()
    x, found = (groups(Halved(E4M3, *blocks), np.asarray(a)) for a in (X, found))
    amax = np.abs(x).max(axis=1)
    np.testing.assert_allclose(np.abs(found).max(axis=1), amax / 2, rtol=1e-6)
    assert Halved() != Quantizer() and repr(Halved()).startswith("Halved(")
