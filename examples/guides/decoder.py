"""A decoder for two guides: a batched forward pass, and a rollout with a cache."""

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HEADS, WORDS, LENGTH = 3, 64, 2, 16, 16


def new_model(key):
    keys = iter(jax.random.split(key, 7))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / WIDTH**0.5

    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    blocks = {k: draw(LAYERS, n * WIDTH, m * WIDTH) for k, (n, m) in shapes.items()}
    places, table, head = draw(LENGTH, WIDTH), draw(WORDS, WIDTH), draw(WIDTH, WORDS)
    return {"table": table, "places": places, "blocks": blocks, "head": head}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(x, w, cache, at):
    q, *new = jnp.split((norm(x) @ w["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    k, v = (c.at[:, at].set(y.astype(c.dtype)) for c, y in zip(cache, new, strict=True))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    seen = jnp.arange(LENGTH) <= at[:, None]
    mixed = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min))
    x = x + jnp.einsum("bhts,bshd->bthd", mixed, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], (k, v)


def apply(model, tokens, cache, at):
    def layer(x, turn):
        return jax.checkpoint(block)(x, *turn, at)

    x = model["table"][tokens] + model["places"][at]
    x, cache = jax.lax.scan(layer, x, (model["blocks"], cache))
    return norm(x) @ model["head"], cache


def empty(model, tokens):
    shape = (LAYERS, *tokens.shape, HEADS, WIDTH // HEADS)
    return (jnp.zeros(shape, model["head"].dtype),) * 2


def rollout(model, tokens, key):
    """One token after another, with a cache; those below 0 are sampled."""

    def one(carry, turn):
        (cache, sampled), (token, at, key) = carry, turn
        token = jnp.where(token < 0, sampled, token)
        logits, cache = apply(model, token[:, None], cache, at[None])
        return (cache, jax.random.categorical(key, logits[:, 0])), (logits[:, 0], token)

    turns = tokens.T, jnp.arange(LENGTH), jax.random.split(key, LENGTH)
    _, found = jax.lax.scan(one, (empty(model, tokens), tokens[:, 0]), turns)
    return {"logits": jnp.moveaxis(found[0], 0, 1), "tokens": found[1].T}
