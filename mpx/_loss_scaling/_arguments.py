"""Numbers that a user gave, or that stood in a checkpoint: read, and refused."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from .._errors import describe
from .._typing import FloatScalar, ScalarLike

# A scale and its inverse must both be normal float32 numbers: XLA may flush subnormal
# ones to zero, and dividing a gradient by a flushed number destroys it.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def scale_value(value: ScalarLike, name: str, owner: type) -> FloatScalar:
    """Reads a scale that a user gave, as a float32 scalar of its own."""
    return number(value, name, owner, jnp.float32, scale_in_range)


def number(
    value: Any, name: str, owner: type, dtype: Any, validate: Callable[..., None]
) -> Array:
    """Reads one number that a user gave; values are checked unless they are traced."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number or (is_array and jnp.issubdtype(value.dtype, np.number))) or (
        is_array
        and (value.ndim != 0 or jnp.issubdtype(value.dtype, np.complexfloating))
    ):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be one real number; got "
            f"{describe(value)}."
        )
    if not isinstance(value, Tracer):
        validate(np.asarray(value, np.float64), name, owner)
    # A copy: the state's buffers may be donated, the user's must survive that.
    return jnp.array(value, dtype, copy=True)


def scale_in_range(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses a scale that is not finite and positive, with a normal inverse."""
    if not np.all((value >= SMALLEST_SCALE) & (value <= LARGEST_SCALE)):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be a positive, finite scale "
            "between 2^-126 and 2^126, so that it and its inverse are normal float32 "
            f"numbers; got {value}."
        )


def require(valid: Any, value: np.ndarray, name: str, owner: type, must: str) -> None:
    """Raises unless all numbers are valid."""
    if not np.all(valid):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be {must}; got "
            f"{describe_all(value)}."
        )


def describe_all(value: np.ndarray) -> str:
    """Writes a number, or the shape and values of several."""
    return str(value) if value.ndim == 0 else f"{describe(value)} {value}"


def start(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses what no scale can start from; one above the largest is lowered to it."""
    scale_in_range(np.asarray(np.minimum(value, LARGEST_SCALE)), name, owner)
    require(value < np.inf, value, name, owner, "finite")


def above_one(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses a factor by which nothing grows."""
    valid = (value > 1) & (value < np.inf)
    require(valid, value, name, owner, "a finite number larger than 1")


def in_zero_one(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses a factor by which nothing falls."""
    require((value > 0) & (value < 1), value, name, owner, "between 0 and 1")


def count(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses what is no number of steps, from 1 on."""
    valid = (value >= 1) & (value < 2**31) & (value == np.floor(value))
    require(valid, value, name, owner, "a whole number, at least 1")


def not_negative(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses what is no number of steps, from 0 on."""
    valid = (value >= 0) & (value < 2**31) & (value == np.floor(value))
    require(valid, value, name, owner, "a whole number, at least 0")


def power_of_two(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses a bound with which scaling would not be exact."""
    valid = (value > 0) & (value <= LARGEST_SCALE)
    valid &= np.frexp(np.where(valid, value, 1))[0] == 0.5
    nearest = (
        f" (the one below: {2.0 ** math.floor(math.log2(value))})"
        if value.ndim == 0 and 0 < value < np.inf
        else ""
    )
    must = f"a power of two of at most 2^126, so that scaling is exact{nearest}"
    require(valid, value, name, owner, must)
