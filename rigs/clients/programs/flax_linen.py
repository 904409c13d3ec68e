"""Flax Linen: modules with collections of variables."""

import jax
import jax.numpy as jnp

from ..data import cross_entropy, labels, mean_square, normal
from ..record import client


def apply_loss(model, x):
    """The loss of a classifier without state, and its parameters."""

    def loss(params, x, y):
        logits = model.apply(params, x)
        return cross_entropy(logits, y), logits

    return loss, model.init(jax.random.key(0), x)


@client("flax", linear=True, layouts=True)
def linen_vit(key):
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            y = nn.Dense(128)(nn.LayerNorm()(x))
            return x + nn.Dense(32)(nn.gelu(y))

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(32, (4, 4), strides=(4, 4))(x)
            x = x.reshape(x.shape[0], -1, 32)
            x = x + self.param("positions", nn.initializers.normal(0.02), (1, 16, 32))
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(8)(nn.LayerNorm()(jnp.mean(x, axis=1)))

    keys = jax.random.split(key, 3)
    x = normal(keys[0], 8, 16, 16, 3)
    model = ViT()
    loss, _ = apply_loss(model, x)
    return loss, model.init(keys[1], x), (x, labels(keys[2], 8, classes=8))


@client("flax", linear=True)
def linen_resnet(key):
    """Batch normalization, whose statistics come back."""
    from flax import linen as nn

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(16, (3, 3))(x)
            for _ in range(2):
                y = nn.relu(nn.BatchNorm(use_running_average=False)(x))
                y = nn.Conv(16, (3, 3), use_bias=False)(y)
                y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
                x = x + nn.Conv(16, (3, 3))(y)
            return nn.Dense(8)(jnp.mean(x, axis=(1, 2)))

    keys = jax.random.split(key, 3)
    x, y = normal(keys[0], 8, 10, 10, 3), labels(keys[1], 8, classes=8)
    model = ResNet()
    variables = model.init(keys[2], x)

    def loss(params, x, y, statistics):
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = model.apply(variables, x, mutable=["batch_stats"])
        return cross_entropy(logits, y), (logits, updated)

    return loss, variables["params"], (x, y, variables["batch_stats"])


@client("flax", linear=True)
def linen_lstm(key):
    from flax import linen as nn

    class Tagger(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(24, 16)(tokens)
            x = nn.Bidirectional(nn.RNN(nn.LSTMCell(24)), nn.RNN(nn.LSTMCell(24)))(x)
            return nn.Dense(8)(x)

    keys = jax.random.split(key, 3)
    x, y = labels(keys[0], 8, 10, classes=24), labels(keys[1], 8, 10, classes=8)
    model = Tagger()
    loss, _ = apply_loss(model, x)
    return loss, model.init(keys[2], x), (x, y)


@client("flax", linear=True)
def linen_scanned_layers(key):
    """`nn.scan` of a rematerialized layer, with dropout."""
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.Dense(64)(nn.RMSNorm()(x))
            y = nn.Dropout(0.1, deterministic=False)(nn.silu(y))
            return x + nn.Dense(32)(y), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=4,
            )
            x, _ = scanned()(x, None)
            return nn.Dense(8)(x)

    keys = jax.random.split(key, 4)
    x, y = normal(keys[0], 32, 32), labels(keys[1], 32, classes=8)
    model = Stack()

    def loss(params, x, y, key):
        logits = model.apply(params, x, rngs={"dropout": key})
        return cross_entropy(logits, y), logits

    return loss, model.init(keys[2], x), (x, y, keys[3])


@client("flax", linear=True)
def linen_ppo_actor_critic(key):
    """Proximal policy optimization on frames of games, as Flax's example has it."""
    from flax import linen as nn

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x.astype(jnp.float32) / 255.0
            x = nn.relu(nn.Conv(32, (8, 8), strides=(4, 4))(x))
            x = nn.relu(nn.Conv(64, (4, 4), strides=(2, 2))(x))
            x = nn.relu(nn.Conv(64, (3, 3), strides=(1, 1))(x))
            x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
            return nn.log_softmax(nn.Dense(6)(x)), nn.Dense(1)(x)

    keys = jax.random.split(key, 6)
    frames = jax.random.randint(keys[0], (16, 42, 42, 4), 0, 256).astype(jnp.uint8)
    model = ActorCritic()
    params = model.init(keys[1], frames)
    actions = labels(keys[2], 16, classes=6)
    old = jnp.log(1 / 6) + 0.1 * normal(keys[3], 16)

    def loss(params, frames, actions, old, advantages, returns):
        scores, values = model.apply(params, frames)
        taken = jnp.take_along_axis(scores, actions[:, None], axis=1)[:, 0]
        ratios = jnp.exp(taken - old)
        clipped = jnp.clip(ratios, 0.9, 1.1)
        policy = -jnp.mean(jnp.minimum(ratios * advantages, clipped * advantages))
        value = mean_square(returns - values[:, 0])
        entropy = -jnp.mean(jnp.sum(jnp.exp(scores) * scores, axis=1))
        return policy + 0.5 * value - 0.01 * entropy, (scores, values)

    advantages = normal(keys[4], 16)
    advantages = (advantages - jnp.mean(advantages)) / jnp.std(advantages)
    batch = (frames, actions, old, advantages, normal(keys[5], 16))
    return loss, params, batch
