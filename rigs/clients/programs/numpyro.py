"""NumPyro and BlackJAX: log densities, their gradients, and steps of samplers."""

import jax
import jax.numpy as jnp

from ..data import mean_square, normal
from ..record import client


def network(x, y=None):
    """A small Bayesian network for regression."""
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("w", dist.Normal(jnp.zeros((8, 16)), 1.0).to_event(2))
    b = numpyro.sample("b", dist.Normal(jnp.zeros(16), 1.0).to_event(1))
    v = numpyro.sample("v", dist.Normal(jnp.zeros((16, 1)), 1.0).to_event(2))
    noise = numpyro.sample("noise", dist.Gamma(3.0, 1.0))
    mean = (jnp.tanh(x @ w + b) @ v)[:, 0]
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(noise)), obs=y)


@client("numpyro", linear=True)
def numpyro_log_density(key):
    from numpyro.infer.util import initialize_model

    keys = jax.random.split(key, 2)
    x = normal(keys[0], 64, 8)
    y = jnp.sin(jnp.sum(x, axis=1))
    info = initialize_model(keys[1], network, model_args=(x, y), dynamic_args=True)

    def loss(params, x, y):
        value = info.potential_fn(x, y)(params)
        return value / x.shape[0], ()

    return loss, info.param_info.z, (x, y)


@client("numpyro", note="Its weights are samples, which no recipe takes for weights.")
def numpyro_svi(key):
    """The evidence lower bound of a guide whose parameters are learned."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    keys = jax.random.split(key, 3)
    x = normal(keys[0], 64, 8)
    y = jnp.sin(jnp.sum(x, axis=1))
    guide = AutoNormal(network)
    svi = SVI(network, guide, Adam(0.01), Trace_ELBO())
    state = svi.init(keys[1], x, y)
    params = svi.get_params(state)

    def loss(params, x, y, key):
        value = Trace_ELBO().loss(key, params, network, guide, x, y)
        return value / x.shape[0], ()

    return loss, params, (x, y, keys[2])


@client("numpyro")
def numpyro_hierarchy(key):
    """Eight schools: no product at all."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    def model(sigma, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    sigma = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    y = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    params = {"mu": jnp.float32(1.0), "tau": jnp.float32(3.0), "theta": normal(key, 8)}

    def loss(params, sigma, y):
        return -log_density(model, (sigma, y), {}, params)[0], ()

    return loss, params, (sigma, y)


def logistic(features, y):
    """The log density of a Bayesian logistic regression."""

    def log_density(w):
        logits = features @ w
        return jnp.sum(jax.nn.log_sigmoid(y * logits)) - 0.5 * jnp.sum(w**2)

    return log_density


@client("blackjax", linear=True)
def blackjax_langevin(key):
    """Features are learned through steps of an unadjusted sampler."""
    import blackjax

    keys = jax.random.split(key, 3)
    x = normal(keys[0], 64, 8)

    def loss(params, x, key):
        density = logistic(jnp.tanh(x @ params), jnp.sign(x[:, 0]))
        sampler = blackjax.sgld(jax.grad(lambda w, batch: density(w)))

        def step(w, key):
            return sampler.step(key, w, None, 1e-3), None

        w, _ = jax.lax.scan(step, jnp.full(16, 0.1), jax.random.split(key, 5))
        return mean_square(w - 0.1), w

    return loss, normal(keys[1], 8, 16) / 3, (x, keys[2])


@client("blackjax", linear=True)
def blackjax_leapfrog(key):
    """The energy error of a trajectory of Hamiltonian Monte Carlo."""
    from blackjax.mcmc import integrators, metrics

    keys = jax.random.split(key, 3)
    x = normal(keys[0], 64, 8)

    def loss(params, x, momentum):
        density = logistic(jnp.tanh(x @ params), jnp.sign(x[:, 0]))
        metric = metrics.default_metric(jnp.ones(16))
        step = integrators.velocity_verlet(density, metric.kinetic_energy)
        start = jnp.full(16, 0.1)
        value, slope = jax.value_and_grad(density)(start)
        state = integrators.IntegratorState(start, momentum, value, slope)
        for _ in range(4):
            state = step(state, 0.05)
        return mean_square(state.position) + mean_square(state.momentum), state.position

    return loss, normal(keys[1], 8, 16) / 3, (x, normal(keys[2], 16))
