"""Formats and quantizers of 8 bits and fewer in NumPy, from the specifications.

OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0
(E2M1, E8M0). Bits are taken apart by hand here; nothing knows ml_dtypes or mpx. Values
are float64, in which all numbers of these formats, their midpoints and their products
with a float32 are exact; scales are computed in float32, one rounding an operation.
"""

import dataclasses

import numpy as np

F32 = np.float32
TINY = 2.0**-126


@dataclasses.dataclass(frozen=True)
class Bits:
    """How the bits of a format are shared out, and what its topmost codes mean."""

    exponent: int
    mantissa: int
    bias: int
    largest: float
    infinity: int | None  # the code of +inf
    first_nan: int | None  # of the positive codes

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)


E4M3 = Bits(4, 3, 7, 448.0, None, 0x7F)
E5M2 = Bits(5, 2, 15, 57344.0, 0x7C, 0x7D)
E2M1 = Bits(2, 1, 1, 6.0, None, None)
FORMATS = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}


def decode(codes: np.ndarray, bits: Bits) -> np.ndarray:
    """The numbers that codes stand for, NaN and infinity included."""
    codes = codes.astype(np.int64)
    positive = codes & (bits.sign - 1)
    exponent = positive >> bits.mantissa
    fraction = (positive & ((1 << bits.mantissa) - 1)) / 2.0**bits.mantissa
    normal = (1 + fraction) * 2.0 ** (exponent - bits.bias)
    subnormal = fraction * 2.0 ** (1 - bits.bias)
    value = np.where(exponent == 0, subnormal, normal)
    if bits.infinity is not None:
        value[positive == bits.infinity] = np.inf
    if bits.first_nan is not None:
        value[positive >= bits.first_nan] = np.nan
    return np.where(codes & bits.sign, -value, value)


def finite_numbers(bits: Bits) -> np.ndarray:
    """The finite numbers from 0 up, at the index of their codes."""
    values = decode(np.arange(bits.sign), bits)
    return values[np.isfinite(values)]


@np.errstate(invalid="ignore")
def encode(x: np.ndarray, bits: Bits) -> np.ndarray:
    """Codes of the nearest numbers, ties to the even code, saturating; -1 for NaN."""
    numbers = finite_numbers(bits)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), bits.largest)
    middles = (numbers[1:] + numbers[:-1]) / 2
    below = np.searchsorted(middles, magnitude, side="left")
    above = np.searchsorted(middles, magnitude, side="right")
    code = np.where(below == above, below, np.where(below % 2 == 0, below, above))
    code = np.where(np.signbit(x), code + bits.sign, code)
    return np.where(np.isnan(x), -1, code)


def without_nan(codes: np.ndarray, bits: Bits) -> np.ndarray:
    """Codes with -1 for every NaN, as `encode` gives them."""
    return np.where(np.isnan(decode(codes, bits)), -1, codes.astype(np.int64))


@np.errstate(invalid="ignore")
def flush(x: np.ndarray) -> np.ndarray:
    """Float32 with subnormal numbers as zeros."""
    x = x.astype(F32)
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x).astype(F32)


def to_blocks(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A matrix as [row of blocks, column of blocks, row, column]."""
    m, n = x.shape
    cut = x.reshape(m // rows, rows, n // columns, columns)
    return cut.swapaxes(1, 2)


def from_blocks(blocks: np.ndarray) -> np.ndarray:
    """The inverse of `to_blocks`."""
    a, b, rows, columns = blocks.shape
    return blocks.swapaxes(1, 2).reshape(a * rows, b * columns)


def scale(
    amax: np.ndarray, largest: float, power_of_two: bool, limit: float = 2.0**126
):
    """MAX / amax in float32, or 1, or NaN; perhaps rounded down to a power of two."""
    amax = np.asarray(amax, F32)
    usable = np.isfinite(amax) & (amax >= TINY)
    with np.errstate(over="ignore"):
        found = F32(largest) / np.where(usable, amax, F32(1))
    found = np.clip(found, F32(TINY), F32(limit))
    if power_of_two:
        _, exponent = np.frexp(found)
        found = np.ldexp(1.0, exponent - 1).astype(F32)
    found = np.where(np.isfinite(amax), np.where(usable, found, 1), np.nan)
    return found.astype(F32)


def quantize_scaled(x, bits, shape, power_of_two, epsilon=0.0):
    """Codes and inverse scales of blocks of a shape with float32 scales."""
    blocks = to_blocks(flush(x), *shape)
    if shape == x.shape:  # one scale: that of the finite numbers
        blocks = np.where(np.isfinite(blocks), blocks, F32(0))
    amax = np.maximum(np.abs(blocks).max(axis=(2, 3)), F32(epsilon))
    scales = scale(amax, bits.largest, power_of_two)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = blocks * scales[:, :, None, None]
    codes = np.where(np.isfinite(x), from_blocks(encode(scaled, bits)), -1)
    return codes, (F32(1) / scales).astype(F32)


@np.errstate(invalid="ignore")
def e8m0_codes(amax: np.ndarray, bits: Bits) -> np.ndarray:
    """The smallest k with MAX * 2^k >= amax, plus 127; 255 for inf and for NaN."""
    amax = amax.astype(np.float64)
    usable = np.isfinite(amax) & (amax > 0)
    value = np.where(usable, amax, 1.0)
    k = np.floor(np.log2(value / bits.largest)).astype(np.int64) - 1
    while np.any(short := bits.largest * 2.0**k < value):
        k = k + short
    code = np.where(usable, np.clip(k + 127, 1, 253), 1)
    return np.where(np.isfinite(amax), code, 255)


def quantize_mx(x, bits):
    """Codes and E8M0 codes of 1x32 blocks."""
    blocks = to_blocks(flush(x), 1, 32)
    shared = e8m0_codes(np.abs(blocks).max(axis=(2, 3)), bits)
    exact = blocks.astype(np.float64) * 2.0 ** (127.0 - shared)[:, :, None, None]
    exact[shared == 255] = np.nan
    return from_blocks(encode(exact, bits)), shared


def quantize_nvfp4(x, shape):
    """Codes, E4M3 codes of the blocks (-1: NaN) and the inverse tensor scale.

    The order of operations is Transformer Engine's: block amax times (tensor scale
    times 1/6), each rounded to float32.
    """
    blocks = to_blocks(flush(x), *shape)
    amax = np.abs(blocks).max(axis=(2, 3))
    tensor = scale(amax.max(), 448.0 * 6.0, False, limit=2.0**100)
    inverse = F32(1) / tensor
    with np.errstate(all="ignore"):
        shared = encode((amax * (tensor * (F32(1) / F32(6)))).astype(F32), E4M3)
        block = decode(np.where(shared < 0, 0x7F, shared), E4M3).astype(F32)
        factor = np.minimum(F32(1) / (block * inverse), np.finfo(F32).max)
        scaled = blocks * factor[:, :, None, None]
    codes = np.where(np.isnan(scaled), 0, encode(scaled, E2M1))
    return from_blocks(codes), shared, inverse


def dequantize(codes, bits, factors, shape):
    """Numbers times the float32 factors of their blocks, in float32."""
    numbers = decode(np.where(codes < 0, 0, codes), bits)
    numbers[codes < 0] = np.nan
    with np.errstate(all="ignore"):
        product = to_blocks(numbers, *shape) * factors[:, :, None, None]
        return from_blocks(product).astype(F32)


def hadamard(signs: np.ndarray) -> np.ndarray:
    """diag(signs) times Sylvester's matrix of order 16, over 4."""
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.diag(signs) @ matrix / 4


def delayed_update(history, scale, amax, largest, margin, algorithm):
    """One step of delayed scaling: the next history and the next scale."""
    if not np.isfinite(amax):
        return history, F32(scale)
    history = history.astype(F32).copy()
    history[0] = amax
    if algorithm == "max":
        chosen = history.max()
    elif algorithm == "most_recent":
        chosen = history[0]
    else:
        chosen = algorithm(history)
    if np.isfinite(chosen) and chosen >= TINY:
        with np.errstate(over="ignore"):
            wanted = F32(F32(largest) / F32(chosen)) / F32(2.0**margin)
        scale = np.clip(wanted, F32(TINY), F32(2.0**126))
    history = np.roll(history, -1)
    history[0] = 0
    return history, F32(scale)
