"""FlowJAX: normalizing flows."""

import jax
import jax.numpy as jnp

from ..data import normal
from ..record import client


def likelihood(key, make):
    """The maximum likelihood loss of a flow."""
    import equinox as eqx
    import flowjax.distributions as dist
    import paramax

    keys = jax.random.split(key)
    flow = make(keys[0], base_dist=dist.Normal(jnp.zeros(6)))
    params, static = eqx.partition(
        flow,
        eqx.is_inexact_array,
        is_leaf=lambda x: isinstance(x, paramax.NonTrainable),
    )

    def loss(params, x):
        flow = paramax.unwrap(eqx.combine(params, static))
        each = flow.log_prob(x)
        return -jnp.mean(each), each

    return loss, params, (normal(keys[1], 32, 6) * 0.5 + 0.2,)


@client(linear=True)
def flowjax_masked_autoregressive(key):
    from flowjax.bijections import RationalQuadraticSpline
    from flowjax.flows import masked_autoregressive_flow

    def make(key, base_dist):
        spline = RationalQuadraticSpline(knots=6, interval=4)
        return masked_autoregressive_flow(
            key, base_dist=base_dist, transformer=spline, flow_layers=2, nn_width=24
        )

    return likelihood(key, make)


@client(linear=True)
def flowjax_coupling(key):
    from flowjax.flows import coupling_flow

    def make(key, base_dist):
        return coupling_flow(key, base_dist=base_dist, flow_layers=3, nn_width=24)

    return likelihood(key, make)


@client(note="It normalizes its weights, so that no recipe takes them for weights.")
def flowjax_block_neural(key):
    from flowjax.flows import block_neural_autoregressive_flow

    def make(key, base_dist):
        return block_neural_autoregressive_flow(
            key, base_dist=base_dist, nn_block_dim=4
        )

    return likelihood(key, make)
