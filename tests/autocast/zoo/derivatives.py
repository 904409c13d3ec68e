"""Programs that differentiate inside of themselves."""

import jax
import jax.numpy as jnp

from .program import OUTER, Tolerance, drawn, mean_square, program

WIDTH = 8


def network(weights, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]))


of_network = {"args": drawn((2, WIDTH, WIDTH), (4, WIDTH)), "loss_of": mean_square}


# Each derivative rounds what the one before it has rounded.
@program(
    **of_network, bfloat16=Tolerance(2e-2, 1.5e-2), float16=Tolerance(2.5e-3, 2.5e-3)
)
def hessian(weights, x):
    return jax.vmap(jax.hessian(lambda x: network(weights, x)))(x)


@program(
    OUTER,
    **of_network,
    bfloat16=Tolerance(2e-2, 2.5e-2),
    float16=Tolerance(2e-3, 3e-3),
)
def jvp_inside(weights, x):
    """First and second derivatives along a direction, as physics losses have them."""
    direction = jnp.ones(WIDTH)

    def slope(x):
        return jax.jvp(lambda x: network(weights, x), (x,), (direction,))[1]

    def both(x):
        return jnp.stack(jax.jvp(slope, (x,), (direction,)))

    return jax.vmap(both)(x)


@program(OUTER, args=of_network["args"], float16=Tolerance(1e-3, 2e-3), derived=3)
def vjp_inside(weights, x):
    """Gradients by example, and a pull-back that is used twice."""
    by_example = jax.vmap(jax.grad(network), in_axes=(None, 0))(weights, x)
    y, pull = jax.vjp(lambda x: jnp.tanh(x @ weights[0]), x)
    outputs = jnp.sum(by_example, axis=0), pull(y)[0], pull(jnp.ones_like(y))[0]
    return sum(mean_square(y) for y in outputs), outputs


@program(**of_network)
def linearize_inside(weights, x):
    y, push = jax.linearize(lambda x: jnp.tanh(x @ weights[0]) @ weights[1], x)
    return y + push(jnp.ones_like(x)) + push(x)
