"""Loops that end by what half precision products gave, and programs that are hidden."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import mpx

LOOP = "ends a loop by half-precision matmuls"
HIDDEN = "contains a program that cannot be inspected"
MATRIX = jnp.asarray(3 * np.eye(16) + np.sin(np.arange(256)).reshape(16, 16) / 8, "f4")
RIGHT, ZEROS = jnp.asarray(np.cos(np.arange(16)), "f4"), jnp.zeros(16)


def jacobi(a, b, x):
    return (b - (a @ x - jnp.diag(a) * x)) / jnp.diag(a)


def error_of(a, b, x):
    return jnp.linalg.norm(a @ x - b)


def by_its_condition(a, b, x):
    """Jacobi's iteration, until the error is small."""
    go = lambda x: error_of(a, b, x) > 1e-5  # noqa: E731
    return lax.while_loop(go, lambda x: jacobi(a, b, x), x)


def by_a_flag(a, b, x):
    """The same; the body says when it is done."""

    def step(carry):
        x = jacobi(a, b, carry[0])
        return x, error_of(a, b, x) < 1e-5, carry[2] + 1

    def goes_on(carry):
        return jnp.logical_not(carry[1]) & (carry[2] < 100)

    return lax.while_loop(goes_on, step, (x, False, 0))[0]


def by_the_flag_alone(a, b, x):
    def step(carry):
        x = jacobi(a, b, carry[0])
        return x, error_of(a, b, x) > 1e-5

    return lax.while_loop(lambda carry: carry[1], step, (x, True))[0]


def in_a_scan_under_jit(a, b, x):
    solve = jax.jit(lambda b: by_a_flag(a, b, x))
    return lax.scan(lambda c, b: (c, solve(b)), 0, b[None])[1]


def by_a_number_of_steps(a, b, x):
    step = lambda c: (c[0] + 1, jnp.tanh(a @ c[1]))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 7, step, (0, x))


def by_the_next_token(a, b, x):
    def step(carry):
        token, x = carry
        return jnp.argmax(a @ x), x + 1

    return lax.while_loop(lambda c: c[0] != 3, step, (0, x))


def with_products_outside(a, b, x):
    """Newton's square root in float32; only where it starts is rounded."""
    y = jnp.sum(jnp.abs(a @ x)) + 1
    go = lambda r: jnp.abs(r * r - y) > 1e-3 * y  # noqa: E731
    return lax.while_loop(go, lambda r: (r + y / r) / 2, y)


def in_full_precision(a, b, x):
    with mpx.autocast(enabled=False):
        return by_a_flag(a, b, x)


def found(func, *args):
    return [o for o in mpx.explain(func)(*args).findings if o.finding == LOOP]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "solve", [by_its_condition, by_a_flag, by_the_flag_alone, in_a_scan_under_jit]
)
def test_a_loop_that_waits_for_rounded_numbers_is_found(solve, dtype):
    (one,) = found(mpx.autocast(solve, dtype), MATRIX, RIGHT, ZEROS)
    assert one.primitive in ("lt", "gt")
    assert "test_loops.py" in one.source


@pytest.mark.parametrize(
    "solve", [by_a_number_of_steps, by_the_next_token, with_products_outside]
)
def test_other_loops_are_not(solve):
    assert not found(mpx.autocast(solve), MATRIX, RIGHT, ZEROS)


def test_a_region_helps():
    # Something is in half precision.
    both = mpx.autocast(lambda a, b, x: in_full_precision(a, b, x) @ (a @ x))
    assert not found(both, MATRIX, RIGHT, ZEROS)
    x = mpx.autocast(in_full_precision)(MATRIX, RIGHT, ZEROS)
    assert error_of(MATRIX, RIGHT, x) < 1e-5
    # Without it the loop ends after its 100 steps only, far from the tolerance.
    rounded = mpx.autocast(by_a_flag)(MATRIX, RIGHT, ZEROS)
    assert error_of(MATRIX, RIGHT, rounded) > 1e-4


@pytest.mark.third_party
def test_what_hides_a_program_is_found():
    def product(a, x):
        return a @ x

    def hidden(a, x):
        return jnp.tanh(eqxi.noinline(product)(a, x))

    x = jnp.ones(16)
    exported = export.export(jax.jit(product))(MATRIX, x)
    for func in (hidden, lambda a, x: jnp.tanh(exported.call(a, x))):
        report = mpx.explain(mpx.autocast(func))(MATRIX, x)
        (one,) = [o for o in report.findings if o.finding == HIDDEN]
        assert one.primitive in ("noinline", "call_exported")

    def inside(a, x):
        return jnp.tanh(eqxi.noinline(mpx.autocast(product))(a, x))

    rounded = mpx.autocast(product)(MATRIX, x)
    assert jnp.array_equal(inside(MATRIX, x), jnp.tanh(rounded))
    assert not jnp.array_equal(inside(MATRIX, x), hidden(MATRIX, x))
