"""Gradients of re-used weights, summed in float32 (`accumulate_dtype`)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import HALF, unscaled
from .cases import close, dtypes, same_bits, total, uniform

pytestmark = unscaled
ONE = jnp.ones(())


def gradient(fun, dtype="float16", summed=jnp.float32, scaling=None, **options):
    return mpx.filter_value_and_grad(
        fun,
        scaling or mpx.NoLossScaling(),
        policy=f"params=float32,compute={dtype},output=float32",
        accumulate_dtype=summed,
        **options,
    )


def scanned(w, x):
    total, _ = jax.lax.scan(lambda sum, x: (sum + (w * x).astype(sum.dtype), None),
                            jnp.zeros((), jnp.float32), x)  # fmt: skip
    return total


def unrolled(w, x):
    parts = [(w * x[i]).astype(jnp.float32) for i in range(256)]
    return functools.reduce(jnp.add, parts)


@pytest.mark.parametrize(
    ("fun", "uses", "jit", "dtype"),
    [(scanned, 4096, False, "float16"), (unrolled, 256, True, "bfloat16")],
)
def test_sums_of_many_uses(dtype, fun, uses, jit):
    """4,096 uses with gradient 1 give 2,048 in float16, and 256 in bfloat16."""

    def call(w, x, summed):
        return gradient(fun, dtype, summed)(w, x).grads

    call = jax.jit(call, static_argnums=2) if jit else call
    w, x = ONE, jnp.ones(uses)
    assert float(call(w, x, jnp.float32)) == uses
    if uses == 4096:
        assert float(call(w, x, None)) == {"float16": 2048, "bfloat16": 256}[dtype]


@pytest.mark.slow
def test_one_thousandth_more_than_a_power_of_two():
    """Terms that float16 rounds away one by one, in a sum that it could hold."""
    x = jnp.full(100, 1.0).at[1:].set(2.0**-12)
    fun = lambda w, x: sum((w * x[i]).astype(jnp.float32) for i in range(100))  # noqa: E731
    exact = 1 + 99 * 2.0**-12
    step = jax.jit(lambda w, s: gradient(fun, summed=s)(w, x).grads, static_argnums=1)
    found, lost = step(ONE, jnp.float32), step(ONE, None)
    assert float(found) == pytest.approx(exact, rel=1e-7) and float(lost) != exact


@jax.custom_vjp
def doubled(w):
    return w * 2


doubled.defvjp(lambda w: (w * 2, None), lambda _, g: (g * 3,))


def wide_sum(y):
    return y.astype(jnp.float32).sum()


def repeated(inner):
    return lambda w, x: sum(inner(w, x[i]) for i in range(8))


def chosen(w, x):
    return wide_sum(jax.lax.cond(x[0] > 0.7, lambda w: w * 2, lambda w: w * w, w))


def in_while(w, x):
    y = jax.lax.fori_loop(0, 3, lambda i, y: y * w, x[0])
    return wide_sum(y) + total(w * x[1])


def in_moves(w, x):
    table = w.reshape(2, 2).T.reshape(-1)[::-1]
    return sum(wide_sum(table * x[i]) for i in range(8))


def in_scan_over_weights(w, x):
    def step(y, row):
        return y * row.astype(jnp.float32), row

    y, rows = jax.lax.scan(step, x[0].astype(jnp.float32)[:1], w[:, None])
    return y.sum() + total(rows)


CONTROL = jax.jit(lambda fun, *args: jax.grad(fun)(*args), static_argnums=0)
PROGRAMS = {
    "jit": repeated(jax.jit(lambda w, x: wide_sum(w * x))),
    "remat": repeated(jax.checkpoint(lambda w, x: wide_sum(jnp.tanh(w * x)))),
    "cond": repeated(chosen),
    "custom_vjp": repeated(lambda w, x: wide_sum(doubled(w) * x)),
    "while": in_while,
    "moves": in_moves,
    "scan over weights": in_scan_over_weights,
}


@pytest.mark.parametrize(("name", "dtype"), [*zip(PROGRAMS, itertools.cycle(HALF))])
def test_forward_is_bit_equal_and_gradient_near_the_control(name, dtype):
    fun, w, x = PROGRAMS[name], uniform(0, 4), uniform(1, 8, 4)

    # Jitted as a whole: called eagerly, an inner jit is a compiled unit of its own,
    # inside of which XLA may round less often.
    @functools.partial(jax.jit, static_argnums=3)
    def step(w, x, scaling, summed):
        return gradient(fun, dtype, summed, scaling)(w, x)

    plain = step(w, x, mpx.NoLossScaling(), None)
    master = step(w, x, mpx.NoLossScaling(), jnp.float32)
    assert same_bits(plain.value, master.value)
    assert dtypes(master.grads) == {"float32"}
    # The control: the values of the half-precision inputs, in float32.
    control = CONTROL(fun, *(v.astype(dtype).astype(jnp.float32) for v in (w, x)))
    close(master.grads, control, 2e-2 if dtype == "bfloat16" else 3e-3)
    error = [np.linalg.norm(np.asarray(r.grads - control)) for r in (plain, master)]
    assert error[1] <= error[0] * 1.5 + 1e-6


def test_gather_with_duplicates_against_float64():
    """An embedding whose few rows are each used a thousand times."""
    index = jnp.asarray(np.random.default_rng(0).integers(0, 4, 4096))
    factor = uniform(2, 4096, 1, low=0.9, high=1.1).astype(jnp.float16)

    def fun(table, factor):
        return total((table[index] * factor).astype(jnp.float32))

    call = lambda w, x: gradient(fun)(w, x).grads  # noqa: E731
    grads = jax.jit(call)(uniform(1, 4, 3), factor)
    expected = np.zeros((4, 3))
    np.add.at(expected, np.asarray(index), np.asarray(factor, np.float64))
    close(grads, jnp.asarray(expected), 1e-4)
    loose = gradient(fun, summed=None)(uniform(1, 4, 3), factor).grads
    assert np.abs(loose - expected).max() > 10 * np.abs(grads - expected).max()


def test_masters_with_scaling_and_accumulation():
    step = gradient(scanned, scaling=mpx.DynamicLossScaling(8.0), accumulate=2)
    result = step(ONE, jnp.ones(4096))
    assert float(result.grads) == 2048 and bool(result.finite)


def test_aux_and_leaves_that_are_no_weights_go_through():
    def fun(model, x, key, *, scale):
        noise = jax.random.normal(key, (2,), x.dtype)
        y = model["act"](model["w"] * x) + noise * 0
        return total(y) * scale, {"half": model["w"], "n": model["n"], "name": "a"}

    model = {"w": jnp.ones(2), "n": jnp.arange(2), "act": jnp.tanh}
    step = gradient(fun, summed="float32", has_aux=True)
    result = step(model, jnp.ones(2), jax.random.key(0), scale=2.0)
    assert result.aux["half"].dtype == jnp.float16 and result.aux["name"] == "a"
    assert result.aux["n"].dtype == jnp.int32
    assert result.grads["n"] is None and result.grads["act"] is None
    close(result.grads["w"], jnp.full(2, 2 * (1 - np.tanh(1) ** 2)), 3e-3)


def test_weights_that_are_not_cast_are_left_alone():
    assert float(gradient(scanned, "float32")(ONE, jnp.ones(8)).grads) == 8


def test_vmap_over_masters():
    fun = lambda w, x: gradient(scanned)(w, x).grads  # noqa: E731
    grads = jax.vmap(fun, in_axes=(None, 0))(ONE, jnp.ones((3, 4096)))
    assert grads.tolist() == [4096.0] * 3


def test_leaks_nothing(checking_leaks):
    assert float(gradient(scanned)(ONE, jnp.ones(8)).grads) == 8
