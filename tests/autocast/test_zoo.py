"""Every program of the zoo under autocast: its numbers, its dtypes, its products.

The product of programs, half precision dtypes and ways to call. Values and gradients
are compared with those of the plain program in float32, by the global norm. Its
products (matrix products and convolutions) must all be in half precision but for
those that have a reason to stay, and none may have operands of two dtypes.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import mpx

from .counting import count_stays, relative_error
from .zoo import PROGRAMS, Program, gradient

Function = Callable[..., Any]


def differentiated(found: Program, fn: Function, dtype: str) -> Function:
    scale = found.loss_scale if dtype == "float16" else 1.0
    return gradient(fn, found.argnums, scale=scale, forward_mode=found.forward_mode)


def inside(found: Program, fn: Function, dtype: str) -> Function:
    """The gradient of what autocast makes of the function."""
    return differentiated(found, mpx.autocast(fn, dtype), dtype)


def outside(found: Program, fn: Function, dtype: str) -> Function:
    """What autocast makes of the gradient of the function."""
    return mpx.autocast(differentiated(found, fn, dtype), dtype)


# How the gradient of a program is taken with autocast.
WAYS: dict[str, Callable[[Program, Function, str], Function]] = {
    "eager": inside,
    "jit": lambda *args: eqx.filter_jit(inside(*args)),
    "outside": lambda *args: eqx.filter_jit(outside(*args)),
}
# Operation by operation is slow, and no different in float16.
CASES = [("eager", "bfloat16")] + [
    (way, dtype) for way in ("jit", "outside") for dtype in ("bfloat16", "float16")
]


@functools.cache
def made(name: str) -> tuple[Function, tuple[Any, ...]]:
    return PROGRAMS[name].make()


def function_and_arguments(name: str) -> tuple[Function, tuple[Any, ...]]:
    """A program's function, and its arguments as new objects.

    Equinox lets a model's state be used only once.
    """
    fn, args = made(name)
    return fn, jax.tree.map(lambda x: x, args)


@functools.cache
def reference(name: str) -> Any:
    """Loss, outputs and gradients of the plain program."""
    fn, args = function_and_arguments(name)
    return eqx.filter_jit(differentiated(PROGRAMS[name], fn, "float32"))(*args)


@pytest.fixture
def found(name: str) -> Iterator[Program]:
    with PROGRAMS[name].context():
        yield PROGRAMS[name]


def each_program() -> Any:
    marks = {True: [pytest.mark.third_party], False: []}
    names = [pytest.param(n, marks=marks[p.third_party]) for n, p in PROGRAMS.items()]
    return pytest.mark.parametrize("name", names)


def kinds(tree: Any) -> Any:
    """The structure of a tree, and the kind of each leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.dtype, x.shape) if eqx.is_array(x) else x for x in leaves]


def inexact(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_inexact_array)


def are_finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(inexact(tree)))


@each_program()
def test_plain_program(name, found):
    """What the others are compared with says something."""
    loss, outputs, grads = reference(name)
    assert loss.shape == () and loss.dtype == np.float32 and float(loss) > 0
    assert are_finite((loss, outputs, grads))
    assert any(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))


@each_program()
@pytest.mark.parametrize(("way", "dtype"), CASES)
def test_values_and_gradients(name, found, way, dtype):
    fn, args = function_and_arguments(name)
    got = WAYS[way](found, fn, dtype)(*args)
    expected = reference(name)
    assert kinds(got) == kinds(expected)
    assert are_finite(got)
    tolerance = getattr(found, dtype)
    loss, outputs, grads = inexact(got)
    expected_loss, expected_outputs, expected_grads = inexact(expected)
    error = relative_error((loss, outputs), (expected_loss, expected_outputs))
    assert error <= tolerance.value
    assert relative_error(grads, expected_grads) <= tolerance.gradient


FLOAT32, HALF = ("float32", "float32"), ("bfloat16", "bfloat16")


def counts(found: Program) -> dict[str, tuple[Counter[Any], Counter[str]]]:
    """Products, and those that have to stay, of a program and its gradient."""
    fn, _ = made(found.name)
    functions = {
        "plain": fn,
        "cast": mpx.autocast(fn),
        "plain gradient": differentiated(found, fn, "float32"),
        "inside": inside(found, fn, "bfloat16"),
        "outside": outside(found, fn, "bfloat16"),
    }
    return {
        name: count_stays(function, *function_and_arguments(found.name)[1])
        for name, function in functions.items()
    }


def are_mixed(dtypes: tuple[str, ...]) -> bool:
    return len(set(dtypes)) > 1


@each_program()
def test_products(name, found):
    """No float32 product is left that need not stay, and none has mixed operands."""
    by_function = counts(found)
    free, stays = by_function["plain"]
    cast, cast_stays = by_function["cast"]
    assert cast[FLOAT32] == 0 and not any(map(are_mixed, cast))
    assert cast_stays <= stays
    assert cast.total() + cast_stays.total() == free.total() + stays.total()

    free, stays = by_function["plain gradient"]
    assert set(stays) == found.excluded
    for way, derived in (("inside", found.derived), ("outside", 0)):
        cast, cast_stays = by_function[way]
        assert cast[FLOAT32] == derived
        assert not any(map(are_mixed, cast))
        assert cast_stays <= stays
        assert cast[HALF] >= free[FLOAT32] - derived > 0
