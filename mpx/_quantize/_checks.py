"""Checks of the options of quantizers and recipes, which are frozen dataclasses."""

import math
from typing import Any

from ._format import single_format


def check_format(quantizer: Any) -> None:
    """Raises unless the field `format` is one format of 8 bits."""
    name = f"`format` of `{_public_name(quantizer)}`"
    if single_format(quantizer.format, name).bits != 8:
        raise ValueError(
            f"{name} must have 8 bits; got {quantizer.format}. Use "
            "`mpx.quantization.NVFP4Quantizer` for 4 bits."
        )


def check_dimensions(quantizer: Any) -> None:
    """Raises `ValueError` unless the field `block_dimensions` is 1 or 2."""
    if quantizer.block_dimensions not in (1, 2):
        raise ValueError(
            f"`block_dimensions` of `{_public_name(quantizer)}` must be 1 or 2; "
            f"got {quantizer.block_dimensions!r}."
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
    """The name of its class, recipe or quantizer, as a user writes it."""
    name = type(options).__name__
    return f"mpx.quantization.{name}" if name.endswith("Quantizer") else f"mpx.{name}"
