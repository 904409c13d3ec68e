"""Functions that autocast made: how they are known, and what they were told."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ._region import ambient_settings, is_under_control
from ._settings import Settings
from ._weights import Weights

# The attribute by which a function is known to be one that autocast made.
MARK = "__mpx_autocast__"


class Mark:
    """What autocast made a function of. JAX's transforms copy it to what they make.

    Attributes:
        made: The function that autocast made.
        func: What it was made of.
        options: What autocast was told.
        weights: Positions and names of the arguments that hold parameters.
        again: Makes another function in the same way.
    """

    def __init__(
        self,
        made: Any,
        func: Any,
        options: dict[str, Any],
        weights: Weights,
        again: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.made, self.func, self.options, self.weights = made, func, options, weights
        self.again = again


def resolved(options: dict[str, Any]) -> Settings:
    """The settings of a call here and now."""
    settings = {"dtype": jnp.dtype(jnp.bfloat16), **ambient_settings(), **options}
    if is_under_control():
        settings["is_enabled"] = False
    return Settings(**settings)


def unwrapped(
    func: Callable[..., Any],
) -> tuple[Callable[..., Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """What autocast wrapped, and how to wrap it again; other functions as they are.

    For those who look into a callable PyTree: its arrays are not in the wrapper's.
    """
    mark = getattr(func, MARK, None)
    if mark is None or mark.made is not func:
        return func, lambda same: same
    return mark.func, mark.again


def weights_of(func: Any) -> Weights:
    """Which arguments of a function hold its parameters: the first if nobody said."""
    mark = getattr(func, MARK, None)
    return (0,) if mark is None else mark.weights


def settings_of(func: Any) -> Settings | None:
    """What the transform that made a function was told; None for other functions."""
    while func is not None:
        mark = getattr(func, MARK, None)
        if mark is not None:
            return resolved(mark.options)
        is_partial = isinstance(func, functools.partial | eqx.Partial)
        func = func.func if is_partial else getattr(func, "__wrapped__", None)
    return None
