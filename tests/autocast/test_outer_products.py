"""Products that sum one number are multiplications: decided and kept like `*`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from .counting import BF16, count_products, relative_error

# The program is written as others write theirs.
pytestmark = pytest.mark.third_party

BATCH, LENGTH, HEADS, WIDTH = 2, 32, 4, 16
SIZE = HEADS * WIDTH


def with_einsum(decay, x):
    return jnp.einsum("blh,blhp->blhp", decay, x)


def with_times(decay, x):
    return decay[..., None] * x


def inputs():
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32))

    w = {
        "in": normal(SIZE, 3 * SIZE + HEADS) / 8,
        "rate": normal(HEADS) / 4,
        "out": normal(SIZE, SIZE) / 8,
    }
    return w, normal(BATCH, LENGTH, SIZE)


def state_space(times):
    """A layer of Mamba 2: what a token adds to the state decays until it is read."""

    def loss(w, x):
        z = x @ w["in"]
        data, b, c, dt = jnp.split(z, [SIZE, 2 * SIZE, 3 * SIZE], -1)
        shape = BATCH, LENGTH, HEADS, WIDTH
        data, b, c = (a.reshape(shape) for a in (data, b, c))
        way = jnp.cumsum(-jnp.exp(w["rate"]) * jax.nn.softplus(dt), axis=1)
        scores = jnp.einsum("blhn,bshn->bhls", c, b)
        lower = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        difference = way[:, :, None] - way[:, None]
        within = jnp.where(lower[..., None], difference, -jnp.inf)
        weights = jnp.exp(within).transpose(0, 3, 1, 2)
        y = jnp.einsum("bhls,bshp->blhp", times(weights, scores), data)
        later = times(jnp.exp(way[:, -1:] - way), data)
        state = jnp.einsum("blhn,blhp->bhnp", b, later)
        y = y + times(jnp.exp(way), jnp.einsum("blhn,bhnp->blhp", c, state))
        return jnp.mean((y.reshape(x.shape) @ w["out"]) ** 2)

    return loss


def as_einsum(a, b):
    letters = "abcd"[: b.ndim]
    return jnp.einsum(f"{letters[: a.ndim]},{letters}->{letters}", a, b)


def as_product(a, b):
    return a.reshape(*a.shape, *(1,) * (b.ndim - a.ndim)) * b


def products(report):
    return [o for o in report.operations if o.primitive == "dot_general"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_that_sums_one_number_is_decided_like_a_multiplication(dtype):
    _, x = inputs()
    w, rate = jnp.eye(SIZE), jnp.full((BATCH, LENGTH, HEADS), -0.3)

    def result(times):
        def func(w, rate, x):
            y = (x @ w).reshape(BATCH, LENGTH, HEADS, WIDTH)
            y = times(jnp.exp(rate), y)  # float32 by a half precision product
            return jnp.sum(y.reshape(x.shape) @ w)

        return jax.jit(jax.grad(mpx.autocast(func, dtype), (0, 1)))(w, rate, x)

    for a, b in zip(result(with_einsum), result(with_times), strict=True):
        assert relative_error(a, b) < 1e-5


def test_an_outer_product_is_computed_again_like_a_multiplication():
    args = inputs()

    def kept(times, **options):
        func = mpx.autocast(state_space(times), **options)
        return mpx.explain(func)(*args).totals.residual_bytes

    assert kept(as_einsum) <= 1.05 * kept(as_product)
    assert kept(as_einsum) < 0.8 * kept(as_einsum, residuals="fast")
    loss = state_space(as_einsum)
    ways = (mpx.autocast(loss, residuals=r) for r in ("small", "fast"))
    assert relative_error(*(jax.jit(jax.grad(f))(*args) for f in ways)) < 1e-6


def test_its_derivatives_in_float32_are_few_and_have_a_reason():
    w, x = inputs()
    func = mpx.autocast(state_space(as_einsum))
    found = products(mpx.explain(jax.grad(func))(w, x))
    wide = [o for o in found if o.precision == "float32"]
    assert {o.phase for o in wide} == {"forward", "backward"}
    assert all("it sums over one number" in o.reason for o in wide)
    assert sum(o.flops for o in wide) < 0.03 * sum(o.flops for o in found)


def test_a_rule_computes_it_in_half_precision():
    w, x = inputs()

    def sums_nothing(operation):
        return not operation.equation.params["dimension_numbers"][0][0]

    rule = mpx.Rule(mpx.Precision.HALF, primitive="dot_general", when=sums_nothing)
    func = mpx.autocast(state_space(as_einsum), rules=mpx.Rules(rule))
    assert set(count_products(jax.grad(func), w, x)) == {BF16}
    funcs = func, state_space(as_einsum)
    found = jax.jit(lambda *args: [jax.grad(f)(*args) for f in funcs])(w, x)
    assert relative_error(*found) < 3e-2
