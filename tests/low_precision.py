"""Counting the products of a program that are quantized."""

from collections.abc import Callable
from typing import Any

import jax

from .autocast.counting import equations, inner_programs, nested_equations

# Numbers of 4 bits are packed into bytes, two and two.
_LOW = ("float8", "float4", "uint8", "int8")


def low_dtypes(func: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of 8 bits and fewer in a program."""
    # Bits of 8 and 4 are uint8, those of 8 on a CPU.
    return _low_dtypes(jax.make_jaxpr(func)(*args)) - {"uint8"}


def quantized_products(func: Callable[..., Any], *args: Any) -> int:
    """How many products of a program, one that is not differentiated, are quantized."""
    return sum(
        times
        for equation, times, within in nested_equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == "custom_vjp_call"
        and "custom_vjp_call" not in within
        and any(map(_low_dtypes, inner_programs(equation)))
    )


def _low_dtypes(jaxpr: Any) -> set[str]:
    found = {
        str(getattr(variable.aval, "dtype", ""))
        for equation, _ in equations(jaxpr)
        for variable in equation.outvars
    }
    return {name for name in found if name.startswith(_LOW)}
