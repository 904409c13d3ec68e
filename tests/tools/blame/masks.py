"""Parts of models that hold infinities, or NaN, of which nothing reaches the result.

Each maps rows of features to rows of features.
"""

import jax
import jax.numpy as jnp
import numpy as np


def _seen(x):
    return jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))


def _scores(x):
    return x @ x.T / 8.0


def chosen(x):
    scores = jnp.where(_seen(x), _scores(x), -jnp.inf)
    return jax.nn.softmax(scores) @ x


def added(x):
    bias = jnp.where(_seen(x), 0.0, -jnp.inf).astype(x.dtype)
    return jax.nn.softmax(_scores(x) + bias) @ x


def logarithm(x):
    return jax.nn.softmax(_scores(x) + jnp.log(_seen(x).astype(x.dtype))) @ x


def online(x):
    """Softmax over blocks of keys, with a maximum that begins at -inf."""
    keys = x.reshape(4, -1, x.shape[1])

    def body(state, key):
        largest, total, summed = state
        scores = x @ key.T / 8.0
        new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(largest - new)
        total = total * old + jnp.sum(weights, axis=-1, keepdims=True)
        return (new, total, summed * old + weights @ key), None

    ones = jnp.ones_like(x[:, :1])
    start = (ones * jnp.asarray(-jnp.inf, x.dtype), ones * 0, x * 0)
    (_, total, summed), _ = jax.lax.scan(body, start, keys)
    return summed / total


def segments(x):
    """The maximum of each of four segments, of which one is empty."""
    ids = jnp.arange(x.shape[0]) % 3
    largest = jax.ops.segment_max(x, ids, 4)
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return x - largest[ids]


def pooled(x):
    start = np.asarray(-np.inf, x.dtype)
    return jax.lax.reduce_window(x, start, jax.lax.max, (3, 1), (1, 1), "SAME")


def top(x):
    scores = _scores(x)
    smallest = jax.lax.top_k(scores, 3)[0][:, -1:]
    return jax.nn.softmax(jnp.where(scores < smallest, -jnp.inf, scores)) @ x


def padded(x):
    wide = jnp.pad(x, ((1, 1), (0, 0)), constant_values=-jnp.inf)
    return jnp.maximum(jnp.maximum(wide[:-2], wide[1:-1]), wide[2:])


def running(x):
    first = jnp.full_like(x[:1], -jnp.inf)
    return jax.lax.cummax(jnp.concatenate([first, x]))[1:]


def guarded(x):
    roots = jnp.sqrt(jax.lax.stop_gradient(x))  # NaN of negative numbers
    return x + jnp.where(jax.lax.stop_gradient(x) > 0, roots, 0.0)


_PARTS = (chosen, added, logarithm, online, segments, pooled, top, padded, running)
MASKS = {part.__name__: part for part in (*_PARTS, guarded)}
