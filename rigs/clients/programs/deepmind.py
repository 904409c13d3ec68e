"""Distrax and RLax: distributions, flows, and the losses of reinforcement learning."""

import jax
import jax.numpy as jnp

from ..data import labels, mean_square, normal
from ..record import client


@client("distrax", linear=True)
def distrax_coupling_flow(key):
    import distrax
    import haiku as hk

    keys = jax.random.split(key, 2)

    def forward(x):
        layers = []
        mask = jnp.arange(8) % 2 == 0
        for _ in range(3):
            net = hk.Sequential([hk.nets.MLP([32, 16]), hk.Reshape((8, 2))])
            layers.append(
                distrax.MaskedCoupling(
                    mask,
                    net,
                    lambda p: distrax.ScalarAffine(
                        p[..., 0], log_scale=0.1 * p[..., 1]
                    ),
                )
            )
            mask = ~mask
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, distrax.Chain(layers)).log_prob(x)

    function = hk.without_apply_rng(hk.transform(forward))
    x = normal(keys[0], 32, 8)

    def loss(params, x):
        each = function.apply(params, x)
        return -jnp.mean(each), each

    return loss, function.init(keys[1], x), (x,)


@client("distrax", linear=True)
def distrax_mixture(key):
    """A mixture density network; samples by reparametrization."""
    import distrax

    keys = jax.random.split(key, 4)
    params = normal(keys[0], 8, 32) / 3, normal(keys[1], 32, 12) / 6

    def loss(params, x, y, key):
        out = jnp.tanh(x @ params[0]) @ params[1]
        logits, means, scales = jnp.split(out, 3, axis=-1)
        parts = distrax.Normal(means, jax.nn.softplus(scales) + 0.1)
        mixture = distrax.MixtureSameFamily(distrax.Categorical(logits), parts)
        drawn = parts.sample(seed=key)
        return -jnp.mean(mixture.log_prob(y)) + 0.1 * mean_square(drawn), drawn

    x = normal(keys[2], 32, 8)
    return loss, params, (x, jnp.sin(x[:, 0]), keys[3])


def torso(params, x):
    """Features of observations."""
    return jax.nn.relu(jax.nn.relu(x @ params["a"]) @ params["b"])


def torso_parameters(key, out):
    """Those of the features and of a head."""
    keys = jax.random.split(key, 3)
    return {
        "a": normal(keys[0], 16, 64) / 3,
        "b": normal(keys[1], 64, 64) / 6,
        "head": normal(keys[2], 64, out) / 8,
    }


@client("rlax", linear=True)
def rlax_double_q(key):
    import rlax

    keys = jax.random.split(key, 6)

    def loss(params, x, following, actions, rewards):
        q = torso(params, x) @ params["head"]
        after = torso(params, following) @ params["head"]
        error = jax.vmap(rlax.double_q_learning)(
            q, actions, rewards, jnp.full(32, 0.9), after, after
        )
        return jnp.mean(rlax.huber_loss(error)), error

    batch = (
        normal(keys[0], 32, 16),
        normal(keys[1], 32, 16),
        labels(keys[2], 32, classes=4),
        normal(keys[3], 32),
    )
    return loss, torso_parameters(keys[4], 4), batch


@client("rlax", linear=True)
def rlax_vtrace_actor_critic(key):
    import rlax

    keys = jax.random.split(key, 5)

    def loss(params, x, actions, rewards):
        out = torso(params, x) @ params["head"]
        logits, values = out[..., :4], out[..., 4]

        def one(logits, values, actions, rewards):
            ratios = rlax.categorical_importance_sampling_ratios(
                logits[:-1], jax.lax.stop_gradient(logits[:-1]), actions
            )
            found = rlax.vtrace_td_error_and_advantage(
                values[:-1], values[1:], rewards, jnp.full(10, 0.9), ratios
            )
            policy = rlax.policy_gradient_loss(
                logits[:-1], actions, found.pg_advantage, jnp.ones(10)
            )
            entropy = rlax.entropy_loss(logits[:-1], jnp.ones(10))
            return policy + 0.5 * jnp.sum(found.errors**2) + 0.01 * entropy

        each = jax.vmap(one)(logits, values, actions, rewards)
        return jnp.mean(each), each

    batch = (
        normal(keys[0], 8, 11, 16),
        labels(keys[1], 8, 10, classes=4),
        normal(keys[2], 8, 10),
    )
    return loss, torso_parameters(keys[3], 5), batch
