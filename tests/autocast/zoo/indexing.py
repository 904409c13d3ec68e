"""Sorting, picking, adding at places, and reductions with functions."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import mean_square, normal, program, weight

ROWS, WIDTH = 8, 16


def scores(w, x):
    """Products that are far enough apart for rounding not to change their order."""
    return 0.05 * (x @ w) + x


def separated(key):
    """Rows whose values stand apart, in random order."""
    values = jnp.linspace(-2.0, 2.0, WIDTH)
    keys = jax.random.split(key, ROWS)
    return jax.vmap(lambda key: jax.random.permutation(key, values))(keys)


def ranked(key):
    keys = jax.random.split(key)
    return weight(keys[0], WIDTH, WIDTH), separated(keys[1])


@program(args=ranked)
def sort_and_top_k(w, x):
    y = scores(w, x)
    sorted_y = jnp.sort(y, axis=-1) * jnp.linspace(0.0, 1.0, WIDTH)[None]
    best, places = lax.top_k(y, 3)
    order = jnp.argsort(y, axis=-1)
    by_order = jnp.take_along_axis(y, order[:, ::-1], axis=-1)
    total = mean_square(sorted_y) + mean_square(best) + mean_square(by_order[:, :4])
    return total, (best, places, order)


@program()
def gather_and_scatter(key):
    keys = jax.random.split(key, 3)

    def loss(weights, index, x):
        table, w = weights
        y = table[index] @ w + jnp.take(x @ w, index, axis=0)
        z = jnp.zeros((ROWS, WIDTH)).at[index].add(y)
        z = z.at[0].set(y[1]).at[1].mul(y[2]).at[2, 3].max(0.5)
        z = lax.dynamic_update_slice(z, y[:2, :2], (3, 3))
        z = z.at[index[0]].min(2.0, mode="drop")
        return mean_square(z), (y, z)

    index = jnp.array([3, 0, 3, 7, 1, 1])
    weights = (normal(keys[0], ROWS, WIDTH), weight(keys[1], WIDTH, WIDTH))
    return loss, (weights, index, normal(keys[2], ROWS, WIDTH))


@program()
def segments(key):
    """A graph layer: products on the edges, sums and softmax over the nodes."""
    keys = jax.random.split(key, 3)

    def loss(weights, nodes, senders, receivers):
        edges = nodes[senders] @ weights[0]
        value = jnp.sum(edges * nodes[receivers], axis=-1)
        top = jax.ops.segment_max(value, receivers, ROWS)
        unnormalized = jnp.exp(value - lax.stop_gradient(top)[receivers])
        total = jax.ops.segment_sum(unnormalized, receivers, ROWS)
        attention = unnormalized / total[receivers]
        messages = attention[:, None] * (nodes[senders] @ weights[1])
        y = jax.ops.segment_sum(messages, receivers, ROWS)
        return mean_square(y), (y, total)

    ids = jnp.arange(3 * ROWS)
    senders, receivers = (5 * ids + 1) % ROWS, ids % ROWS
    return loss, (
        0.5 * weight(keys[0], 2, WIDTH, WIDTH),
        normal(keys[1], ROWS, WIDTH),
        senders,
        receivers,
    )


@program()
def reduce_with_functions(key):
    """`lax.reduce` and `lax.reduce_window` with functions that JAX does not know."""
    keys = jax.random.split(key)

    def soft_maximum(a, b):
        return jnp.maximum(a, b) + 0.1 * jnp.exp(-jnp.abs(a - b))

    def largest_with_place(a, b):
        first = a[0] >= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    def loss(w, x):
        y = scores(w, x)
        summed = lax.reduce(y, jnp.float32(0), lax.add, (1,))
        windows = lax.reduce_window(y, 0.0, lax.add, (1, 4), (1, 2), "VALID")
        peaks = lax.reduce_window(y, -jnp.inf, lax.max, (1, 4), (1, 4), "VALID")
        odd = lax.reduce(y, jnp.float32(-5), soft_maximum, (1,))
        # What follows has no derivative in JAX.
        still = lax.stop_gradient(y)
        odd_windows = lax.reduce_window(
            still, jnp.float32(-5), soft_maximum, (1, 4), (1, 4), "VALID"
        )
        places = jnp.broadcast_to(jnp.arange(WIDTH), y.shape)
        best, at = lax.reduce(
            (still, places),
            (jnp.float32(-jnp.inf), jnp.int32(0)),
            largest_with_place,
            (1,),
        )
        total = mean_square(summed) + mean_square(windows) + mean_square(peaks)
        total = total + mean_square(y * odd[:, None])
        return total, (odd, odd_windows, best, at)

    return loss, (weight(keys[0], WIDTH, WIDTH), separated(keys[1]))


@program()
def tied_embedding(key):
    """A table that is looked up in and multiplied with: two gradients are added."""
    keys = jax.random.split(key, 2)

    def loss(weights, tokens):
        x = jax.nn.gelu(weights["table"][tokens] @ weights["mix"])
        logits = x @ weights["table"].T
        log_probabilities = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=1)
        return -jnp.mean(picked), logits

    weights = {
        "table": normal(keys[0], 24, WIDTH),
        "mix": weight(keys[1], WIDTH, WIDTH),
    }
    return loss, (weights, jnp.arange(24) * 7 % 24)
