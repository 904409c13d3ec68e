"""Counting what a program does: casts, products and their dtypes, trip counts."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation of a program and of those within it, and how often it runs."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    for equation in jaxpr.eqns:
        yield equation, times
        is_scan = equation.primitive.name == "scan"
        inner_times = times * equation.params["length"] if is_scan else times
        for inner in inner_programs(equation):
            yield from equations(inner, inner_times)


def inner_programs(equation: Any) -> Iterator[Any]:
    for name, value in equation.params.items():
        if name == "update_jaxpr":
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                yield item


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_FLOATS = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16), np.dtype(np.float32))


def products(func: Callable[..., Any], *args: Any) -> list[tuple[tuple[str, ...], int]]:
    """The operand dtypes of every matrix product, and how often it runs."""
    found = []
    for equation, times in equations(jax.make_jaxpr(func)(*args)):
        if equation.primitive.name in PRODUCTS:
            dtypes = tuple(str(a.aval.dtype) for a in equation.invars[:2])
            found.append((dtypes, times))
    return found


def count_products(func: Callable[..., Any], *args: Any) -> dict[tuple[str, ...], int]:
    counts: dict[tuple[str, ...], int] = {}
    for dtypes, times in products(func, *args):
        counts[dtypes] = counts.get(dtypes, 0) + times
    return counts


def count_casts(func: Callable[..., Any], *args: Any) -> int:
    """The casts between floating dtypes in a program."""
    return sum(
        times
        for equation, times in equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == "convert_element_type"
        and equation.invars[0].aval.dtype in _FLOATS
        and equation.params["new_dtype"] in _FLOATS
        and equation.invars[0].aval.dtype != equation.params["new_dtype"]
    )


def primitives(func: Callable[..., Any], *args: Any) -> list[str]:
    return [e.primitive.name for e, _ in equations(jax.make_jaxpr(func)(*args))]


def relative_error(value: Any, expected: Any) -> float:
    """The error of a tree by its global norm, which exact zeros do not upset."""

    def norm(tree: Any) -> float:
        leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
        return float(np.sqrt(sum((x**2).sum() for x in leaves)))

    difference = jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64),
        value,
        expected,
    )
    return norm(difference) / norm(expected)
