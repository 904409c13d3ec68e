"""JAXopt: solvers with implicit differentiation."""

import contextlib
import functools

import jax
import jax.numpy as jnp

import mpx

from ..data import mean_square, normal
from ..record import client

NOTE = "Its products are in a solver with a derivative rule: no recipe quantizes them."


@client(linear=True)
def jaxopt_lbfgs(key):
    """A logistic regression on learned features, solved inside of the loss."""
    import jaxopt

    keys = jax.random.split(key)

    def loss(params, x):
        features = jnp.tanh(x @ params)

        def inner(w, features, labels):
            each = jnp.logaddexp(0.0, -labels * (features @ w))
            return jnp.mean(each) + 0.1 * jnp.sum(w**2)

        solver = jaxopt.LBFGS(inner, maxiter=10, tol=1e-2)
        found = solver.run(jnp.zeros(16), features, jnp.sign(x[:, 0]))
        return mean_square(found.params - 0.1), found.params

    return loss, normal(keys[0], 8, 16) / 3, (normal(keys[1], 64, 8),)


@client(
    linear=True,
    sensitive="The solver stops at a tolerance, which rounded products meet elsewhere.",
)
def jaxopt_implicit(key):
    """The derivative of a minimum by the implicit function theorem."""
    import jaxopt

    keys = jax.random.split(key)

    def loss(params, x, region=contextlib.nullcontext):
        features = jnp.tanh(x @ params)

        def inner(w, features, targets):
            residual = features @ w - targets
            return jnp.mean(residual**2) + 0.5 * jnp.sum(w**2)

        solver = jaxopt.GradientDescent(inner, maxiter=30, tol=1e-2, implicit_diff=True)
        with region():
            w = solver.run(jnp.zeros(16), features, x[:, 0]).params
        return mean_square(features @ w - x[:, 0]), w

    batch = (normal(keys[1], 64, 8),)
    region = functools.partial(mpx.autocast, enabled=False)
    repaired = functools.partial(loss, region=region)
    return loss, normal(keys[0], 8, 16) / 3, batch, repaired


@client(note=NOTE)
def jaxopt_anderson(key):
    """A deep equilibrium model by Anderson's acceleration."""
    import jaxopt

    keys = jax.random.split(key, 3)
    params = 0.3 * normal(keys[0], 16, 16) / 4, normal(keys[1], 16, 16) / 4

    def loss(params, x):
        def step(z, params, x):
            return jnp.tanh(z @ params[0] + x @ params[1])

        solver = jaxopt.AndersonAcceleration(step, maxiter=10, tol=1e-2)
        z = solver.run(jnp.zeros_like(x), params, x).params
        return mean_square(z - 1), z

    return loss, params, (normal(keys[2], 16, 16),)
