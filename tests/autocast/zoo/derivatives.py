"""Programs that differentiate inside of themselves."""

import jax
import jax.numpy as jnp

from .program import OUTER, Tolerance, mean_square, normal, program, weight

WIDTH = 8


def network(weights, x):
    """A scalar function of a vector."""
    return jnp.sum(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]))


def network_program(key, outputs_of):
    keys = jax.random.split(key)

    def loss(weights, x):
        outputs = outputs_of(weights, x)
        return mean_square(outputs), outputs

    return loss, (weight(keys[0], 2, WIDTH, WIDTH), normal(keys[1], 4, WIDTH))


# Each derivative rounds what the one before it has rounded.
@program(bfloat16=Tolerance(2e-2, 1.5e-2), float16=Tolerance(2.5e-3, 2.5e-3))
def hessian(key):
    def curvature(weights, x):
        of_one = jax.hessian(lambda x: network(weights, x))
        return jax.vmap(of_one)(x)

    return network_program(key, curvature)


@program(OUTER, bfloat16=Tolerance(2e-2, 2.5e-2), float16=Tolerance(2e-3, 3e-3))
def jvp_inside(key):
    """First and second derivatives along a direction, as physics losses have them."""

    def slopes(weights, x):
        direction = jnp.ones(WIDTH)

        def slope(x):
            return jax.jvp(lambda x: network(weights, x), (x,), (direction,))[1]

        def both(x):
            return jnp.stack(jax.jvp(slope, (x,), (direction,)))

        return jax.vmap(both)(x)

    return network_program(key, slopes)


@program(OUTER, float16=Tolerance(1e-3, 2e-3), derived=3)
def vjp_inside(key):
    """Gradients by example, and a pull-back that is used twice."""

    def pulled(weights, x):
        by_example = jax.vmap(jax.grad(network), in_axes=(None, 0))(weights, x)
        y, pull = jax.vjp(lambda x: jnp.tanh(x @ weights[0]), x)
        return jnp.sum(by_example, axis=0), pull(y)[0], pull(jnp.ones_like(y))[0]

    keys = jax.random.split(key)

    def loss(weights, x):
        outputs = pulled(weights, x)
        return sum(mean_square(y) for y in outputs), outputs

    return loss, (weight(keys[0], 2, WIDTH, WIDTH), normal(keys[1], 4, WIDTH))


@program()
def linearize_inside(key):
    def pushed(weights, x):
        y, push = jax.linearize(lambda x: jnp.tanh(x @ weights[0]) @ weights[1], x)
        return y + push(jnp.ones_like(x)) + push(x)

    return network_program(key, pushed)
