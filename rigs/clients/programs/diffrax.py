"""Diffrax: neural differential equations."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, mean_square, normal
from ..record import client

NOTE = "Its products are in a solver with a derivative rule: no recipe quantizes them."


def field(key, width=32, inputs=4, outputs=4):
    """A vector field."""
    import equinox as eqx

    return eqx.nn.MLP(inputs, outputs, width, 2, jnp.tanh, key=key)


def solve_loss(adjoint=None):
    """The distance to a spiral of what an ODE makes of its start."""
    import diffrax

    def loss(model, start, target):
        def run(y):
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: args(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=y,
                args=model,
                saveat=diffrax.SaveAt(ts=jnp.linspace(0, 1, 5)),
                stepsize_controller=diffrax.ConstantStepSize(),
                **({} if adjoint is None else {"adjoint": adjoint}),
            )
            return found.ys

        ys = jax.vmap(run)(start)
        return mean_square(ys - target), ys

    return loss


def start_and_target(key):
    """Eight starts and where they are to be at five times."""
    keys = jax.random.split(key)
    return normal(keys[0], 8, 4), normal(keys[1], 8, 5, 4)


@client(note=NOTE)
def diffrax_ode(key):
    keys = jax.random.split(key)
    return solve_loss(), field(keys[0]), start_and_target(keys[1])


@client(note=NOTE)
def diffrax_backsolve_adjoint(key):
    """The ODE is solved backwards for its gradient."""
    import diffrax

    keys = jax.random.split(key)
    loss = solve_loss(diffrax.BacksolveAdjoint())
    return loss, field(keys[0]), start_and_target(keys[1])


@client(linear=True)
def diffrax_cde(key):
    """A controlled equation: a classifier of time series."""
    import diffrax

    keys = jax.random.split(key, 4)
    import equinox as eqx

    model = field(keys[0], 16, 8, 8 * 3), eqx.nn.Linear(8, 4, key=keys[1])

    def loss(model, xs, y):
        field, head = model
        ts = jnp.linspace(0, 1, 10)

        def run(xs):
            control = diffrax.CubicInterpolation(
                ts, diffrax.backward_hermite_coefficients(ts, xs)
            )
            term = diffrax.ControlTerm(
                lambda t, y, args: jnp.tanh(field(y)).reshape(8, 3), control
            ).to_ode()
            found = diffrax.diffeqsolve(
                term, diffrax.Heun(), 0.0, 1.0, 0.1, jnp.zeros(8) + 0.1
            )
            return head(found.ys[-1])

        logits = jax.vmap(run)(xs)
        return cross_entropy(logits, y), logits

    return loss, model, (normal(keys[2], 8, 10, 3), labels(keys[3], 8, classes=4))


@client(note=NOTE)
def diffrax_sde(key):
    """A stochastic equation with a Brownian path."""
    import diffrax

    keys = jax.random.split(key, 4)
    model = field(keys[0]), field(keys[1])

    def loss(model, start, key):
        drift, noise = model

        def run(y, key):
            path = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (4,), key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: drift(y)),
                diffrax.ControlTerm(
                    lambda t, y, args: jnp.diag(0.1 * jnp.tanh(noise(y))), path
                ),
            )
            found = diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.1, y)
            return found.ys[-1]

        ys = jax.vmap(run)(start, jax.random.split(key, 8))
        return mean_square(ys - 1), ys

    return loss, model, (normal(keys[2], 8, 4), keys[3])


@client(note=NOTE)
def diffrax_stiff(key):
    """An implicit solver, whose Newton steps solve linear systems."""
    import diffrax

    keys = jax.random.split(key)

    def loss(model, start):
        def run(y):
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: args(y) - 20.0 * y),
                diffrax.Kvaerno3(root_finder=diffrax.VeryChord(rtol=1e-2, atol=1e-2)),
                0.0,
                0.5,
                0.05,
                y,
                args=model,
                stepsize_controller=diffrax.ConstantStepSize(),
                throw=False,
            )
            return found.ys[-1]

        ys = jax.vmap(run)(start)
        return mean_square(10 * ys - 1), ys

    return loss, field(keys[0]), (normal(keys[1], 4, 4),)
