"""What a loop's turns read is cast once, in front of it, for a GPU's compiler.

A program that casts in each turn is the control: the same bits. And the gradient of a
recurrent weight is one product of all turns, behind the loop.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from mpx._quantize import Target

from .counting import equations, jitted

D, V, CHUNKS = 8, 24, 4
RNG = np.random.default_rng(0)
W = RNG.normal(size=(D, V)).astype(np.float32)
X = RNG.normal(size=(CHUNKS, 6, D)).astype(np.float32)


def chunked(product, checkpoint=jax.checkpoint):
    """A cross-entropy over chunks, as with a large vocabulary."""

    def func(w, x):
        @checkpoint
        def part(total, h):
            z = product(h, w)
            return total + jnp.sum(jax.nn.logsumexp(z, -1) - z[:, 0] ** 2), None

        return lax.scan(part, jnp.float32(0), x)[0]

    return func


def in_regions(h, w):
    with mpx.autocast(enabled=False):
        y = h @ w
    with mpx.autocast(dtype=jnp.float16):
        return y + h @ w


def in_a_loop(h, w):
    """Also in float32, beside it."""
    y = lax.scan(lambda c, _: (jnp.tanh(c @ w @ w.T), None), h, None, length=2)[0]
    return y @ w + jnp.sum(w * w)


def in_a_while(h, w):
    body = lambda c: (c[0] + 1, c[1] @ w @ w.T)  # noqa: E731
    found = lax.while_loop(lambda c: c[0] < 2, body, (0, lax.stop_gradient(h)))
    return lax.stop_gradient(found[1]) @ w


@jax.custom_vjp
def ruled(h, w):
    return h @ w


ruled.defvjp(lambda h, w: (h @ w, (h, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

PRODUCTS = {
    "transposed": lambda h, w: h @ w.T.reshape(V, D).T,
    "tied": lambda h, w: jnp.tanh(h @ w) @ w.T @ w,
    "rows": lambda h, w: h @ w + w[h[:, 0].astype(int) % D],
    "slice": lambda h, w: h[:, :4] @ w[:4],
    "moving": lambda h, w: h[:, 4:] @ lax.dynamic_slice_in_dim(w, jnp.argmax(h[0]), 4),
    "computed": lambda h, w: h @ (w * jnp.sum(h)),
    "jit": jax.jit(lambda h, w: h @ w),
    "branch": lambda h, w: lax.cond(h[0, 0] > 0, lambda: h @ w, lambda: h @ -w),
    **{f.__name__: f for f in (in_regions, in_a_loop, in_a_while)},
    "rule": ruled,
}


def casting():
    """A context in which programs for a GPU cast in each turn."""
    return mock.patch.object(Target, "repeats_casts", False)


def both(made, *args):
    """What a function gives with copies and without, made and traced anew."""
    copied = jax.tree.leaves(jitted(made())(*args))
    with casting():
        return copied, jax.tree.leaves(jitted(made())(*args))


def on_gpu(func, take=lambda func: func, dtype="bfloat16"):
    return lambda: take(mpx.autocast(func, dtype, target="H100"))


def casts(func, *args):
    """How often the weight is cast to half precision."""
    return sum(
        times
        for e, times in equations(jax.make_jaxpr(func)(*args))
        if e.primitive.name == "convert_element_type"
        and e.invars[0].aval.shape in (W.shape, W.T.shape)
        and e.params["new_dtype"] in (jnp.bfloat16, jnp.float16)
    )


grad = functools.partial(jax.value_and_grad, argnums=(0, 1))


@pytest.mark.parametrize("product", PRODUCTS)
def test_value_and_gradients_are_the_same(product):
    copied, cast = both(on_gpu(chunked(PRODUCTS[product]), grad), W, X)
    for a, b in zip(copied, cast, strict=True):
        assert np.array_equal(a, b) and np.all(np.isfinite(a))


def slopes(func):
    return lambda *args: jax.jvp(func, args, jax.tree.map(jnp.cos, args))


TAKES = {
    "reverse": grad,
    "one": lambda f: jax.grad(f, argnums=1),
    "forward": slopes,
    "again": lambda f: slopes(jax.checkpoint(f)),
    "second": lambda f: slopes(jax.grad(f)),
    "twice": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f, 1)(w, x) ** 2)),
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[None]),
    "nested": lambda f: jax.grad(
        lambda w, x: lax.scan(lambda c, x: (c + f(w, x), None), 0.0, x[None])[0]
    ),
}


@pytest.mark.parametrize("take", TAKES)
def test_so_are_other_derivatives(take):
    copied, cast = both(on_gpu(chunked(PRODUCTS["tied"]), TAKES[take]), W, X)
    assert all(map(np.array_equal, copied, cast))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_cast_for_all_turns(dtype, policy):
    again = functools.partial(jax.checkpoint, policy=policy)
    made = on_gpu(chunked(jnp.matmul, again), grad, dtype)
    assert casts(made(), W, X) == 1
    with casting():
        assert casts(made(), W, X) > CHUNKS
    infinite = W.copy()
    infinite[0, :2] = 1e30, np.nan
    assert all(
        map(functools.partial(np.array_equal, equal_nan=True), *both(made, infinite, X))
    )


def test_gradients_of_turns_are_summed_in_float32():
    def func(w, x):
        return lax.scan(lambda c, h: (c + jnp.sum(h @ w), None), 0.0, x)[0]

    found = on_gpu(func, jax.grad)()(jnp.ones((1, 1)), jnp.ones((600, 1, 1)))
    assert float(found[0, 0]) == 600  # in bfloat16 256 + 1 is 256


def test_a_weight_in_the_carry_is_cast_as_it_changes():
    def train(w, x):
        def step(w, h):
            return w - 0.1 * jax.grad(lambda w: jnp.mean((h @ w) ** 2))(w), None

        return lax.scan(step, w, x)[0]

    copied, cast = both(on_gpu(train), W, X)
    assert np.array_equal(copied[0], cast[0]) and not np.array_equal(copied[0], W)


# --- Micro-batches --------------------------------------------------------------------


def step(recipe=None):
    def blocks(model, x):
        for w in (model["a"], model["b"]):
            x = jax.checkpoint(lambda h, w: jnp.tanh(h @ w) @ w.T)(x, w)
        return jnp.mean((x * model["scale"][None]) ** 2)

    func = mpx.autocast(blocks, target="H100", recipe=recipe)

    def run(scaling, model, x):
        found = mpx.filter_value_and_grad(func, scaling, accumulate=CHUNKS)(model, x)
        return found.value, found.grads, found.scaling

    model = {"a": jnp.asarray(W), "b": -jnp.asarray(W), "scale": jnp.ones(D)}
    x = jnp.asarray(X.reshape(-1, D))
    return run, (mpx.init_scaling(func, model, x[::CHUNKS]), model, x)


def test_micro_batches_share_a_cast():
    run, args = step()
    assert casts(run, *args) == 2
    with casting():
        run, args = step()
        assert casts(run, *args) > 2 * CHUNKS


@pytest.mark.parametrize("recipe", [None, mpx.DelayedScaling()])
def test_micro_batches_give_the_same_bits(recipe):
    """Also the amaxes of a recipe, which are of the weights and not of the copies."""
    copied, cast = both(lambda: step(recipe)[0], *step(recipe)[1])
    assert all(map(np.array_equal, copied, cast)) and len(copied) > 3


# --- Gradients behind a loop ----------------------------------------------------------

T, B = 16, 4
LSTM = {"wi": RNG.normal(size=(D, 4 * D)), "wh": RNG.normal(size=(D, 4 * D))}
LSTM = {name: (w / 3).astype(np.float32) for name, w in LSTM.items()}
ROWS = RNG.normal(size=(T, B, D)).astype(np.float32)


def lstm(p, x):
    def turn(carry, g):
        n, h, k = carry
        both = lax.dot(p["wi"], g, dimension_numbers=(((0,), (1,)), ((), ())))
        i, f, u, o = jnp.split(both.T + h @ p["wh"], 4, -1)
        k = jax.nn.sigmoid(f) * k + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(k)
        return (n + 1, h, k), (h, n)

    z = jnp.zeros(x.shape[1:])
    (n, h, _), (hs, _) = lax.scan(turn, (0, z, z), x)
    return hs * jnp.float32(n) / T


def squares(p, x):
    return jnp.mean(lstm(p, x) ** 2)


@pytest.mark.parametrize("take", TAKES)
def test_derivatives_of_a_recurrent_weight(take):
    """As good as those that the loop sums, in each turn, in float32."""
    exact = jax.tree.leaves(TAKES[take](squares)(LSTM, ROWS))
    found = both(on_gpu(squares, TAKES[take]), LSTM, ROWS)

    def error(values):
        pairs = zip(values, exact, strict=True)
        return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)

    assert error(found[0]) < 1.1 * error(found[1]) < 0.05


def sums(made, rows=ROWS):
    """How often a loop adds to a sum of the recurrent weight's shape."""
    program = jax.make_jaxpr(made())(LSTM, rows)
    return sum(
        times
        for e, times in equations(program)
        if e.primitive.name == "add_any" and e.outvars[0].aval.shape == (D, 4 * D)
    )


def test_no_turn_adds_to_a_sum():
    assert sums(on_gpu(squares, jax.grad)) == 0
    with casting():
        assert sums(on_gpu(squares, jax.grad)) == 2 * T
    # Float16 lacks the range, and stacks of so many rows are larger than the sum.
    assert sums(on_gpu(squares, jax.grad, "float16")) == 2 * T
    assert sums(on_gpu(squares, jax.grad), np.tile(ROWS, (1, D, 1))) == 2 * T
    # One product of 13 turns would be rounded once.
    assert sums(on_gpu(squares, jax.grad), ROWS[:13]) == 2 * 13
    assert sums(on_gpu(squares, jax.grad), ROWS[:0]) == 0
