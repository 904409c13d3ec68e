"""Counting what a program does: casts, products and their dtypes, trip counts.

A scan's body counts as often as it runs, every branch of a cond and the body of a while
once.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mpx._program import PrimitiveClass, properties


def equations(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """Every equation of a program and of those within it, and how often it runs."""
    for equation, times, _ in nested_equations(jaxpr):
        yield equation, times


def nested_equations(
    jaxpr: Any, times: int = 1, within: tuple[str, ...] = ()
) -> Iterator[tuple[Any, int, tuple[str, ...]]]:
    """The same, with the names of the primitives that each equation stands in."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    for equation in jaxpr.eqns:
        yield equation, times, within
        name = equation.primitive.name
        inner_times = times * equation.params["length"] if name == "scan" else times
        for inner in inner_programs(equation):
            yield from nested_equations(inner, inner_times, (*within, name))


def inner_programs(equation: Any) -> Iterator[Any]:
    for name, value in equation.params.items():
        if name == "update_jaxpr":
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                yield item


def named(primitive: str, func: Callable[..., Any], *args: Any) -> list[Any]:
    """The equations of one primitive in the program of a function."""
    found = equations(jax.make_jaxpr(func)(*args))
    return [e for e, _ in found if e.primitive.name == primitive]


def read_by(primitive: str, func: Callable[..., Any], *args: Any) -> list[str]:
    """The dtype of the first operand of each such operation."""
    return [str(e.invars[0].aval.dtype) for e in named(primitive, func, *args)]


def given_by(primitive: str, func: Callable[..., Any], *args: Any) -> list[str]:
    """The dtype of the first result of each such operation."""
    return [str(e.outvars[0].aval.dtype) for e in named(primitive, func, *args)]


def kept_by(func: Callable[..., Any], *args: Any) -> list[Any]:
    """The types of the arrays that autodiff keeps of a function."""
    return jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(func, *a)[1], *args))


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
F16, BF16, F32 = ("float16",) * 2, ("bfloat16",) * 2, ("float32",) * 2
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
    counts: Counter[tuple[str, ...]] = Counter()
    for dtypes, times in products(func, *args):
        counts[dtypes] += times
    return counts


def reason_to_stay(equation: Any, within: tuple[str, ...]) -> str | None:
    """Why a product is one that autocast has to leave in float32; None if it is not."""
    opaque = [n for n in within if properties(n).kind is PrimitiveClass.OPAQUE]
    if opaque:
        return f"inside {opaque[0]}"
    precision = equation.params.get("precision")
    if isinstance(precision, tuple) and jax.lax.Precision.HIGHEST in precision:
        return "asks for the highest precision"
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        if not contracted:
            return "an outer product"
    return None


def count_stays(jaxpr: Any) -> tuple[Counter[tuple[str, ...]], Counter[str]]:
    """The products of a program that may be cast, by the dtypes of their operands.

    And those of float32 that autocast has to leave alone, by reason.
    """
    free: Counter[tuple[str, ...]] = Counter()
    stays: Counter[str] = Counter()
    for equation, times, within in nested_equations(jaxpr):
        if equation.primitive.name not in PRODUCTS:
            continue
        dtypes = tuple(str(a.aval.dtype) for a in equation.invars[:2])
        reason = reason_to_stay(equation, within)
        if reason is not None and dtypes == ("float32", "float32"):
            stays[reason] += times
        else:
            free[dtypes] += times
    return free, stays


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


# Else XLA leaves out roundings, of one program and not of the other.
jitted = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False}
)


def pairs(*trees: Any) -> Iterator[tuple[Any, ...]]:
    """The leaves of trees of one structure, those of one place together."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def primitives(func: Callable[..., Any], *args: Any) -> list[str]:
    return [e.primitive.name for e, _ in equations(jax.make_jaxpr(func)(*args))]


def relative_error(value: Any, expected: Any) -> float:
    """The error of a tree by its global norm, which exact zeros do not upset."""

    def norm(tree: Any) -> float:
        leaves = [np.abs(wide(x)) for x in jax.tree.leaves(tree)]
        return float(np.sqrt(sum((x**2).sum() for x in leaves)))

    def wide(x: Any) -> np.ndarray:
        return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)

    difference = jax.tree.map(lambda a, b: wide(a) - wide(b), value, expected)
    return norm(difference) / norm(expected)
