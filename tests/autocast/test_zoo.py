"""Every program of the zoo under autocast: its numbers, its dtypes, its products.

The product of programs, half precision dtypes and ways to call. Values and gradients
are compared with those of the plain program in float32, by the global norm. Its
products (matrix products and convolutions) must all be in half precision but for
those that have a reason to stay, and none may have operands of two dtypes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest

import mpx

from .counting import count_stays, relative_error
from .zoo import OF_EACH_KIND, PROGRAMS, Program, cases, gradient

Function = Callable[..., Any]


def differentiated(found: Program, fn: Function, dtype: str) -> Function:
    scale = found.loss_scale if dtype == "float16" else 1.0
    return gradient(fn, found.argnums, scale=scale, forward_mode=found.forward_mode)


def inside(found: Program, fn: Function, dtype: str) -> Function:
    return differentiated(found, mpx.autocast(fn, dtype), dtype)


def outside(found: Program, fn: Function, dtype: str) -> Function:
    return mpx.autocast(differentiated(found, fn, dtype), dtype)


def plain(found: Program, fn: Function, dtype: str) -> Function:
    return differentiated(found, fn, dtype)


WAYS = {"plain": plain, "inside": inside, "outside": outside}


class Traced(NamedTuple):
    """A traced gradient, the arrays among its arguments, and its other results."""

    program: Any
    arrays: Any
    others: Any

    def __call__(self) -> Any:
        compiled = self.program.lower().compile()
        return eqx.combine(compiled(self.arrays), self.others)


@functools.cache
def traced(name: str, way: str = "plain", dtype: str = "float32") -> Traced:
    fn, args = PROGRAMS[name].make()
    arrays, static = eqx.partition(args, eqx.is_array)
    function = WAYS[way](PROGRAMS[name], fn, dtype)
    others: list[Any] = []

    def of_arrays(arrays: Any) -> Any:
        results = function(*eqx.combine(arrays, static))
        arrays, rest = eqx.partition(results, eqx.is_array)
        others.append(rest)
        return arrays

    program = jax.jit(of_arrays).trace(arrays)
    return Traced(program, arrays, others[-1])


@functools.cache
def reference(name: str) -> Any:
    """Loss, outputs and gradients of the plain program, which have to say something."""
    loss, outputs, grads = found = traced(name)()
    assert loss.shape == () and loss.dtype == np.float32 and float(loss) > 0
    assert are_finite(found)
    assert any(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))
    return found


@pytest.fixture
def found(name: str) -> Iterator[Program]:
    with PROGRAMS[name].context():
        yield PROGRAMS[name]


ONE_OF_EACH_KIND = (
    "equinox_batch_norm_ema",
    "equinox_lstm_in_while",
    "linen_batch_norm_and_dropout",
    "haiku_layer_stack",
    "optax_sigmoid",
    "conjugate_gradients",
    "vjp_inside",
    *OF_EACH_KIND,
)


def each_program(names: Iterable[str]) -> pytest.MarkDecorator:
    params = []
    for name in names:
        is_one = name in ONE_OF_EACH_KIND
        marks = [pytest.mark.slow if is_one else pytest.mark.exhaustive]
        marks += [pytest.mark.third_party] * PROGRAMS[name].third_party
        params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", params)


# One of each framework and kind whose record `test_emitted.py` leaves to CI.
OTHERS = (
    "equinox_batch_norm_ema",
    "equinox_group_norm_cnn",
    "equinox_lstm_in_while",
    "linen_scan_over_layers_with_remat",
    "nnx_block_with_statistics",
    "haiku_layer_stack",
    "optax_ctc",
    "jax_dot_product_attention",
    "complex_matmul",
    "eigenvalues",
    "remat_policies",
    "jvp_inside",
)


def kinds(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.dtype, x.shape) if eqx.is_array(x) else x for x in leaves]


def inexact(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_inexact_array)


def are_finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(inexact(tree)))


def assert_close(found: Program, dtype: str, got: Any) -> None:
    """Fails unless loss, outputs and gradients are those of the plain program."""
    expected = reference(found.name)
    assert kinds(got) == kinds(expected)
    assert are_finite(got)
    tolerance = getattr(found, dtype)
    *values, grads = inexact(got)
    *expected_values, expected_grads = inexact(expected)
    assert relative_error(values, expected_values) <= tolerance.value
    assert relative_error(grads, expected_grads) <= tolerance.gradient


@each_program(PROGRAMS)
def test_gradient_of_autocast(name, found):
    assert_close(found, "float16", traced(name, "inside", "float16")())


@each_program(ONE_OF_EACH_KIND[::3])
def test_autocast_of_the_gradient(name, found):
    assert_close(found, "bfloat16", traced(name, "outside", "bfloat16")())
    assert_products(found, "outside", "bfloat16")


@each_program(ONE_OF_EACH_KIND[1::4])
def test_eager(name, found):
    """Operation by operation: slow, no different in float16, nor in a like program."""
    fn, args = found.make()
    assert_close(found, "bfloat16", inside(found, fn, "bfloat16")(*args))


@pytest.mark.parametrize("name", cases(OTHERS))
def test_products(name, found):
    assert_products(found, "inside", "float16")


FLOAT32 = ("float32", "float32")


def assert_products(found: Program, way: str, dtype: str) -> None:
    """No float32 product is left that need not stay, and none has mixed operands."""
    free, stays = count_stays(traced(found.name).program.jaxpr)
    cast, cast_stays = count_stays(traced(found.name, way, dtype).program.jaxpr)
    derived = found.derived if way == "inside" else 0
    assert set(stays) == found.excluded
    assert cast_stays <= stays
    assert cast[FLOAT32] == derived
    assert not [dtypes for dtypes in cast if len(set(dtypes)) > 1]
    assert cast[dtype, dtype] >= free[FLOAT32] - derived > 0
