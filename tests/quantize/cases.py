"""Quantizers with their oracles, and the data that each of them is tried on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import mpx
from mpx.quantization import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedArray,
    Quantizer,
    TensorQuantizer,
)
from tests.reference import low_precision as reference

SHAPE = (256, 384)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What an oracle says: codes (-1: NaN), scales as stored, float32 factors."""

    codes: np.ndarray
    scales: np.ndarray
    tensor: Any
    factors: np.ndarray
    shape: tuple[int, int]


def _float32(bits, power_of_two, epsilon=0.0, shape=SHAPE):
    def oracle(x):
        codes, inverse = reference.quantize_scaled(
            x, bits, shape, power_of_two, epsilon
        )
        scales = inverse.reshape(()) if shape == SHAPE else inverse
        return Expected(codes, scales, None, inverse, shape)

    return oracle


def _mx(bits):
    def oracle(x):
        codes, shared = reference.quantize_mx(x, bits)
        factors = np.where(shared == 255, np.nan, 2.0 ** (shared - 127.0))
        return Expected(codes, shared, None, factors, (1, 32))

    return oracle


def _nvfp4(shape):
    def oracle(x):
        codes, shared, inverse = reference.quantize_nvfp4(x, shape)
        block = reference.decode(np.where(shared < 0, 0x7F, shared), reference.E4M3)
        factors = (block.astype(np.float32) * inverse).astype(np.float32)
        return Expected(codes, shared, inverse, factors, shape)

    return oracle


_E4M3, _E5M2 = reference.E4M3, reference.E5M2
_FORMAT = mpx.Format
# A new quantizer, or option, is covered by one line here.
QUANTIZERS: dict[str, tuple[Quantizer, Callable[[Any], Expected]]] = {
    "tensor e4m3": (TensorQuantizer(), _float32(_E4M3, False)),
    "tensor e5m2": (TensorQuantizer(_FORMAT.E5M2), _float32(_E5M2, False)),
    "tensor power of two": (
        TensorQuantizer(power_of_two_scales=True),
        _float32(_E4M3, True),
    ),
    "tensor epsilon": (TensorQuantizer(amax_epsilon=1e3), _float32(_E4M3, False, 1e3)),
    "1x128": (BlockQuantizer(), _float32(_E4M3, True, shape=(1, 128))),
    "1x128 e5m2 float32": (
        BlockQuantizer(_FORMAT.E5M2, power_of_two_scales=False, amax_epsilon=1e-3),
        _float32(_E5M2, False, 1e-3, shape=(1, 128)),
    ),
    "128x128": (
        BlockQuantizer(block_dimensions=2),
        _float32(_E4M3, True, shape=(128, 128)),
    ),
    "mxfp8 e4m3": (MXFP8Quantizer(), _mx(_E4M3)),
    "mxfp8 e5m2": (MXFP8Quantizer(_FORMAT.E5M2), _mx(_E5M2)),
    "nvfp4 1x16": (NVFP4Quantizer(), _nvfp4((1, 16))),
    "nvfp4 16x16": (NVFP4Quantizer(2), _nvfp4((16, 16))),
}

# One of each kind, for what the options make no difference to.
KINDS = ("tensor e4m3", "1x128", "128x128", "mxfp8 e4m3", "nvfp4 1x16", "nvfp4 16x16")


def _normal(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def _outliers() -> np.ndarray:
    x = _normal(1)
    return x * np.float32(2) ** np.random.default_rng(2).integers(-40, 40, SHAPE)


def _with(value: float) -> np.ndarray:
    x = _normal(3)
    x[7, 200] = value
    x[64:96] *= 1e-20
    return x


def _powers() -> np.ndarray:
    """Rows whose amax is at, just below or just above MAX times a power of two."""
    x = np.linspace(-1, 1, SHAPE[1], dtype=np.float32) * np.ones((SHAPE[0], 1), "f4")
    amax = 1.75 * 2.0 ** np.repeat(np.arange(-126, 126, 3), 3)
    amax = amax.astype(np.float32)
    amax[1::3] = np.nextafter(amax[1::3], np.float32(0))
    amax[2::3] = np.nextafter(amax[2::3], np.float32(np.inf))
    x[: len(amax)] *= amax[:, None]
    return x


# float32 matrices of one shape, so that each quantizer compiles once.
DATA: dict[str, Callable[[], np.ndarray]] = {
    "normal": _normal,
    "outliers": _outliers,
    "zeros": lambda: np.zeros(SHAPE, np.float32),
    "infinity": lambda: _with(-np.inf),
    "nan": lambda: _with(np.nan),
    "huge": lambda: (_normal(4).clip(-3, 3) * 1.1e38).astype(np.float32),
    "tiny": lambda: (_normal(5) * 2.0**-120).astype(np.float32),
    "subnormal": lambda: (_normal(6) * 2.0**-128).astype(np.float32),
    "powers of two": _powers,
}


def codes_of(q: QuantizedArray) -> np.ndarray:
    """The codes of a matrix of 8 or 4 bits, with -1 for NaN."""
    payload = np.asarray(q.payload)
    if q.format is mpx.Format.E2M1:
        return np.stack([payload & 15, payload >> 4], -1).reshape(q.shape).astype(int)
    bits = reference.FORMATS[q.format.name]
    return reference.without_nan(payload.view(np.uint8), bits)


def scales_of(q: QuantizedArray) -> np.ndarray:
    """Inverse scales as the oracles have them: codes, or float32."""
    scales = np.asarray(q.inverse_scale)
    if scales.dtype == jnp.float32:
        return scales
    codes = scales.view(np.uint8)
    if q.format is mpx.Format.E2M1:
        return reference.without_nan(codes, reference.E4M3)
    return codes.astype(np.int64)
