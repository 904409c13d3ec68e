"""JAX MD: learned and classical potentials."""

import jax
import jax.numpy as jnp

from ..data import normal
from ..record import client


def lattice(key):
    """Particles near the points of a grid."""
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(3.0)] * 3), -1).reshape(-1, 3)
    return 1.2 * grid + 0.1 * normal(key, 27, 3) + 0.3


NOTE = "It differentiates inside, where no recipe can tell gradients from data."


@client(
    "jax-md",
    note=NOTE,
    sensitive="Forces have a cutoff: single seeds of float16 are off by 0.4 of their "
    "norm, and by 0.7 with the naive cast, so that the ratio of medians says little.",
)
def jax_md_graph_network(key):
    """Forces are the derivatives of a learned energy."""
    from flax import nnx
    from jax_md import energy, space

    keys = jax.random.split(key, 3)
    displacement, _ = space.periodic(4.0)
    model = energy.graph_network(
        displacement, 1.5, key=keys[0], n_recurrences=2, mlp_sizes=(16, 16)
    ).model
    positions = lattice(keys[1])
    graph, params = nnx.split(model)

    def loss(params, positions, forces):
        def energy_of(positions):
            return nnx.merge(graph, params)(positions)

        found = -jax.grad(energy_of)(positions)
        return jnp.mean((found - forces) ** 2), found

    return loss, params, (positions, normal(keys[2], 27, 3))


@client("jax-md")
def jax_md_simulation(key):
    """The parameters of a potential, through a short simulation."""
    from jax_md import energy, simulate, space

    displacement, shift = space.periodic(4.0)

    def loss(params, positions, key):
        def potential(r, **kwargs):
            pair = energy.soft_sphere_pair(displacement, **params)
            return pair(r, **kwargs)

        init, step = simulate.nve(potential, shift, 1e-3)
        state = init(key, positions, kT=0.1)
        state = jax.lax.fori_loop(0, 10, lambda i, s: step(s), state)
        return jnp.mean(state.momentum**2) + potential(state.position), state.position

    params = {"sigma": jnp.float32(1.3), "epsilon": jnp.float32(2.0)}
    return loss, params, (lattice(key), key)
