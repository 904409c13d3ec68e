"""Optimistix and Lineax: solvers inside of a loss."""

import contextlib
import functools

import jax
import jax.numpy as jnp

import mpx

from ..data import mean_square, normal
from ..record import client

NOTE = "Its products are in a solver with a derivative rule: no recipe quantizes them."


def layer(key, width=16):
    """A contraction: its fixed point exists."""
    keys = jax.random.split(key)
    w = 0.3 * normal(keys[0], width, width) / width**0.5
    return {"w": w, "u": normal(keys[1], width, width) / width**0.5}


@client("optimistix", note=NOTE)
def optimistix_fixed_point(key):
    """A deep equilibrium model, differentiated implicitly."""
    import optimistix as optx

    keys = jax.random.split(key)
    solver = optx.FixedPointIteration(rtol=1e-2, atol=1e-2)

    def loss(params, x):
        def step(z, args):
            params, x = args
            return jnp.tanh(z @ params["w"] + x @ params["u"])

        found = optx.fixed_point(step, solver, jnp.zeros_like(x), (params, x))
        return mean_square(found.value - 1), found.value

    return loss, layer(keys[0]), (normal(keys[1], 16, 16),)


@client("optimistix", note=NOTE)
def optimistix_root(key):
    """Newton's method, with a tolerance that half precision can meet."""
    import optimistix as optx

    keys = jax.random.split(key)
    solver = optx.Newton(rtol=3e-2, atol=3e-2)

    def loss(params, x):
        def residual(z, args):
            params, x = args
            return z - jnp.tanh(params["w"] @ z + params["u"] @ x)

        def solve(x):
            return optx.root_find(
                residual, solver, jnp.zeros(16), (params, x), throw=False
            ).value

        z = jax.vmap(solve)(x)
        return mean_square(z - 1), z

    return loss, layer(keys[0]), (normal(keys[1], 8, 16),)


@client(
    "optimistix",
    linear=True,
    sensitive="The solver stops at a tolerance, which rounded products meet elsewhere.",
)
def optimistix_least_squares(key):
    """Levenberg and Marquardt inside of the loss."""
    import optimistix as optx

    keys = jax.random.split(key)
    solver = optx.LevenbergMarquardt(rtol=1e-2, atol=1e-2)

    def loss(params, x, region=contextlib.nullcontext):
        features = jnp.tanh(x @ params["u"])

        def residual(z, features):
            return jnp.exp(features @ z) - 1.5

        with region():
            found = optx.least_squares(
                residual, solver, jnp.zeros(16), features, throw=False, max_steps=32
            )
        return mean_square(found.value - 0.1), found.value

    region = functools.partial(mpx.autocast, enabled=False)
    repaired = functools.partial(loss, region=region)
    return loss, layer(keys[0]), (normal(keys[1], 32, 16),), repaired


@client("lineax", linear=True)
def lineax_ridge(key):
    """A ridge regression on learned features, by Cholesky and by LU."""
    import lineax as lx

    keys = jax.random.split(key)

    def loss(params, x):
        features = jnp.tanh(x @ params["u"])
        gram = features.T @ features + jnp.eye(16)
        target = features.T @ jnp.sin(x[:, 0])
        whole = lx.MatrixLinearOperator(gram, lx.positive_semidefinite_tag)
        first = lx.linear_solve(whole, target, lx.Cholesky()).value
        second = lx.linear_solve(lx.MatrixLinearOperator(gram), target, lx.LU()).value
        return mean_square(first + second - 0.1), first

    return loss, layer(keys[0]), (normal(keys[1], 64, 16),)


@client("lineax", linear=True)
def lineax_conjugate_gradients(key):
    """A system that is known by its product with a vector only."""
    import lineax as lx

    keys = jax.random.split(key)

    def loss(params, x):
        features = jnp.tanh(x @ params["u"])

        def product(v):
            return features.T @ (features @ v) / 64 + v

        operator = lx.FunctionLinearOperator(
            product,
            jax.ShapeDtypeStruct((16,), jnp.float32),
            lx.positive_semidefinite_tag,
        )
        solver = lx.CG(rtol=1e-2, atol=1e-2)
        found = lx.linear_solve(operator, jnp.ones(16), solver, throw=False).value
        return mean_square(found - 0.1), found

    return loss, layer(keys[0]), (normal(keys[1], 64, 16),)
