"""Formats of 8 bits and fewer, and their properties; checks of options.

A *format* is the meaning of the bits of a number. All formats here have a sign, an
exponent with a bias, a few bits of mantissa, and subnormal numbers below the smallest
normal one:

    E4M3: 4 bits of exponent, 3 of mantissa, no infinity, one NaN
    E5M2: 5 bits of exponent, 2 of mantissa, infinities and NaNs as in IEEE 754
    E2M1: 2 bits of exponent, 1 of mantissa, neither infinity nor NaN

`INT8` has the integers from -127 to 127, so that negation is exact.

`HYBRID` is not a format but a pair: E4M3 in the forward pass, E5M2 for gradients.

Source: OCP 8-bit Floating Point Specification 1.0, section 5; OCP Microscaling Formats
(MX) Specification 1.0, section 5.3.3 (E2M1).
"""

import enum
import math
import types
from typing import Any

import ml_dtypes
import numpy as np

_INT8 = types.SimpleNamespace(
    dtype=np.dtype("int8"),
    bits=8,
    max=127,
    smallest_normal=1,
    smallest_subnormal=1,
    nmant=7,
)
_E4M3, _E5M2, _E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"


class Format(enum.Enum):
    """A format of 8 bits or fewer, or the pair `HYBRID` of two.

    | format | exponent, mantissa | largest | smallest normal | smallest | inf | NaN |
    |---|---|---|---|---|---|---|
    | `E4M3` | 4, 3 | 448 | $2^{-6}$ | $2^{-9}$ | no | yes |
    | `E5M2` | 5, 2 | 57344 | $2^{-14}$ | $2^{-16}$ | yes | yes |
    | `E2M1` | 2, 1 | 6 | 1 | 0.5 | no | no |
    | `INT8` | integers | 127 | 1 | 1 | no | no |
    | `HYBRID` | E4M3 forward, E5M2 backward | | | | | |

    Members are constants: hashable, compared by identity, the same after pickling.

    Source: OCP 8-bit Floating Point Specification 1.0, section 5; OCP Microscaling
    Formats (MX) Specification 1.0, section 5.3.3.

    Examples:
        >>> import mpx
        >>> mpx.Format.E4M3.largest, mpx.Format.E4M3.dtype
        (448.0, dtype(float8_e4m3fn))
        >>> mpx.Format.HYBRID.backward
        <Format.E5M2>
    """

    E4M3 = (_E4M3, _E4M3)
    E5M2 = (_E5M2, _E5M2)
    HYBRID = (_E4M3, _E5M2)
    E2M1 = (_E2M1, _E2M1)
    INT8 = ("int8", "int8")

    @property
    def forward(self) -> "Format":
        """The format of inputs and weights, never `HYBRID`."""
        return Format((self.value[0], self.value[0]))

    @property
    def backward(self) -> "Format":
        """The format of gradients, never `HYBRID`."""
        return Format((self.value[1], self.value[1]))

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which JAX stores a number, such as `float8_e4m3fn`."""
        return self._info.dtype

    @property
    def bits(self) -> int:
        """The number of bits of a number."""
        return self._info.bits

    @property
    def largest(self) -> float:
        """The largest finite number; larger values saturate to it."""
        return float(self._info.max)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with the full mantissa."""
        return float(self._info.smallest_normal)

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal."""
        return float(self._info.smallest_subnormal)

    @property
    def has_exponent(self) -> bool:
        """Whether it is one format of floats."""
        return self not in (Format.HYBRID, Format.INT8)

    @property
    def has_nan(self) -> bool:
        """Whether it has a NaN; else the scale shows one."""
        return self in (Format.E4M3, Format.E5M2)

    @property
    def _info(self) -> Any:
        """The numbers of bits of exponent and mantissa, and the range."""
        if self is Format.HYBRID:
            raise ValueError(
                "`mpx.Format.HYBRID` is two formats and has no such property; use "
                "`Format.HYBRID.forward` (E4M3) or `Format.HYBRID.backward` (E5M2)."
            )
        return _INT8 if self is Format.INT8 else ml_dtypes.finfo(self.value[0])

    def __repr__(self) -> str:
        return f"<Format.{self.name}>"


def single_format(format: Format, caller: str) -> Format:
    """Checks a format that a user passed for one array.

    Args:
        format: The format.
        caller: The public name of the argument's owner.

    Returns:
        The format, which is not `HYBRID`.

    Raises:
        TypeError: It is not a format.
        ValueError: It is `HYBRID`.
    """
    if not isinstance(format, Format):
        raise TypeError(
            f"{caller} needs a format such as `mpx.Format.E4M3`; got {format!r}."
        )
    if format is Format.HYBRID:
        raise ValueError(
            f"{caller} needs one format; got `mpx.Format.HYBRID`, which is two. Use "
            "`Format.HYBRID.forward` (E4M3) or `Format.HYBRID.backward` (E5M2)."
        )
    return format


# --- Checks of the options of quantizers and recipes, which are frozen dataclasses ----


def check_format(format: Format, name: str) -> Format:
    """Returns a quantizer's format; raises unless it is one of 8 bits with floats."""
    caller = f"`format` of `mpx.quantization.{name}`"
    if single_format(format, caller).bits != 8 or not format.has_nan:
        raise ValueError(
            f"{caller} must be `mpx.Format.E4M3` or `mpx.Format.E5M2`; got {format!r}. "
            "Use `mpx.quantization.Quantizer` for another one, "
            "`mpx.quantization.NVFP4Quantizer` for 4 bits."
        )
    return format


def check_dimensions(block_dimensions: int, name: str) -> int:
    """Returns a quantizer's option; raises `ValueError` unless it is 1 or 2."""
    if block_dimensions not in (1, 2):
        raise ValueError(
            f"`block_dimensions` of `mpx.quantization.{name}` must be 1 or 2; got "
            f"{block_dimensions!r}."
        )
    return block_dimensions


def check_choice(options: object, name: str, among: tuple[object, ...]) -> None:
    """Raises `ValueError` unless a field is one of these values."""
    value = getattr(options, name)
    if value not in among:
        *most, last = map(repr, among)
        raise ValueError(
            f"`{name}` of `{_public_name(options)}` must be {', '.join(most)} or "
            f"{last}; got {value!r}."
        )


def check_flags(options: object, *names: str) -> None:
    """Raises `TypeError` unless the fields of these names are booleans."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(
                f"`{name}` of `{_public_name(options)}` must be True or False; "
                f"got {value!r}."
            )


def check_epsilon(options: Any) -> None:
    """Raises unless the field `amax_epsilon` is a finite number, 0 or more."""
    value = options.amax_epsilon
    name = f"`amax_epsilon` of `{_public_name(options)}`"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r}.")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative; got {value!r}.")


def _public_name(options: object) -> str:
    """Returns the public name of the options' class, recipe or quantizer."""
    name = type(options).__name__
    return f"mpx.quantization.{name}" if name.endswith("Quantizer") else f"mpx.{name}"
