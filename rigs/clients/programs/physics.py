"""Brax and MJX: policies through differentiable physics, and Brax's own losses."""

import jax
import jax.numpy as jnp

from ..data import mean_square, normal
from ..record import client

PENDULUM = """
<mujoco><option timestep="0.02" iterations="2" ls_iterations="4"/><worldbody>
<body pos="0 0 1"><joint name="a" type="hinge" axis="0 1 0" damping="0.1"/>
<geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5" contype="0" conaffinity="0"/>
<body pos="0 0 -0.5"><joint name="b" type="hinge" axis="0 1 0" damping="0.1"/>
<geom type="capsule" size="0.04" fromto="0 0 0 0 0 -0.5" contype="0" conaffinity="0"/>
</body></body></worldbody>
<actuator><motor joint="a" gear="1"/><motor joint="b" gear="1"/></actuator></mujoco>
"""


def policy(params, x):
    """Two layers."""
    return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1])


def policy_parameters(key, inputs, outputs):
    """Its weights."""
    keys = jax.random.split(key)
    return normal(keys[0], inputs, 32) / inputs**0.5, normal(keys[1], 32, outputs) / 6


@client("mujoco-mjx", linear=True)
def mjx_policy(key):
    """The gradient of a return through steps of MuJoCo in XLA."""
    import mujoco
    from mujoco import mjx

    model = mjx.put_model(mujoco.MjModel.from_xml_string(PENDULUM))

    def loss(params, start):
        def step(data, _):
            action = policy(params, jnp.concatenate([data.qpos, data.qvel]))
            data = mjx.step(model, data.replace(ctrl=action))
            return data, mean_square(data.qpos - 0.5)

        def run(qpos):
            return jax.lax.scan(
                step, mjx.make_data(model).replace(qpos=qpos), None, length=4
            )[1]

        costs = jax.vmap(run)(start)
        return jnp.mean(costs), costs

    keys = jax.random.split(key)
    return loss, policy_parameters(keys[0], 4, 2), (0.3 * normal(keys[1], 8, 2),)


@client("brax", linear=True)
def brax_ppo(key):
    """Brax's own loss of proximal policy optimization."""
    from brax.training import types
    from brax.training.agents.ppo import losses, networks

    keys = jax.random.split(key, 8)
    nets = networks.make_ppo_networks(
        12, 4, policy_hidden_layer_sizes=(32, 32), value_hidden_layer_sizes=(32, 32)
    )
    params = losses.PPONetworkParams(
        policy=nets.policy_network.init(keys[0]), value=nets.value_network.init(keys[1])
    )
    shape = (8, 6)
    raw = 0.5 * normal(keys[2], *shape, 4)
    data = types.Transition(
        observation=normal(keys[3], *shape, 12),
        action=jnp.tanh(raw),
        reward=normal(keys[4], *shape),
        discount=jnp.ones(shape),
        next_observation=normal(keys[5], *shape, 12),
        extras={
            "state_extras": {"truncation": jnp.zeros(shape)},
            "policy_extras": {
                "raw_action": raw,
                "distribution_params": 0.5 * normal(keys[7], *shape, 8),
                "log_prob": -4 + 0.1 * normal(keys[6], *shape),
            },
        },
    )

    def loss(params, data, key):
        return losses.compute_ppo_loss(params, None, data, key, nets)

    return loss, params, (data, keys[7])


@client(
    "brax",
    note="Its policy sees a single vector, which no recipe quantizes.",
    sensitive="Products rounded by hand, without mpx, give the same error of the loss, "
    "1e-2 in bfloat16. In float16 small numbers are below its range: its 11 bits with "
    "float32's range give 6e-4. Physics is for a region of float32.",
)
def brax_physics(key):
    """A policy through steps of Brax's positional pipeline."""
    from brax import envs

    env = envs.get_environment("inverted_pendulum", backend="positional")

    def loss(params, key):
        def step(state, _):
            state = env.step(state, policy(params, state.obs))
            return state, mean_square(state.obs)

        state, costs = jax.lax.scan(step, env.reset(key), None, length=4)
        return jnp.mean(costs), costs

    keys = jax.random.split(key)
    return loss, policy_parameters(keys[0], 4, 1), (keys[1],)
