"""A policy gradient in float16: rollouts with a cache, a trainer with remat."""

import jax
import jax.numpy as jnp
import optax

import mpx
from examples.guides.decoder import LENGTH, WORDS, apply, empty, new_model, rollout

PRECISION = {"dtype": "float16"}  # the line that changes; {} is bfloat16
BATCH = 64


def forward(model, tokens, _=None):
    return apply(model, tokens, empty(model, tokens), jnp.arange(LENGTH))[0]


def log_prob(logits, tokens):
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]


def loss(model, tokens, rolled, advantages):
    logits = forward(model, tokens)
    ratio = jnp.exp(log_prob(logits, tokens) - rolled)
    bounded = jnp.clip(ratio, 0.8, 1.2)
    value = -jnp.mean(jnp.minimum(ratio * advantages, bounded * advantages))
    return value, {"logits": logits, "ratio": ratio}


trainer, roller = (mpx.autocast(f, **PRECISION) for f in (loss, rollout))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


@jax.jit
def step(model, opt_state, scaling, key):
    first = jax.random.randint(key, (BATCH, 1), 0, WORDS)
    prompts = jnp.full((BATCH, LENGTH), -1).at[:, :1].set(first)
    rolled = mpx.inference(roller, scaling)(model, prompts, key)
    tokens = rolled["tokens"]
    reward = (tokens[:, 1:] == (tokens[:, :-1] + 5) % WORDS).astype(jnp.float32)
    batch = tokens, log_prob(rolled["logits"], tokens), reward - jnp.mean(reward)
    result = mpx.value_and_grad(trainer, scaling, has_aux=True)(model, *batch)
    state = mpx.optimizer_step(model, optimizer, opt_state, result)
    return state, jnp.mean(reward), jnp.max(result.aux["ratio"]), tokens


if __name__ == "__main__":
    model, zeros = new_model(jax.random.key(0)), jnp.zeros((BATCH, LENGTH - 1))
    data = jnp.zeros((BATCH, LENGTH), int), zeros, zeros
    state = model, optimizer.init(model), mpx.init_scaling(trainer, model, *data)
    for key in jax.random.split(jax.random.key(1), 100):
        state, reward, ratio, tokens = step(*state, key)
    print(f"reward {reward:.2f}, largest ratio {ratio:.4f}")
    print(f"loss scale {state[2].loss_scaling:.0f}, skipped {state[2].skipped}")
    found = mpx.compare(mpx.autocast(forward, **PRECISION), roller, floor=False)
    print(found(state[0], tokens, key))
    assert reward > 0.4 and ratio < 1.02
