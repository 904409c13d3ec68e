"""Numbers that are no float32: complex, random, keys, 64 bits."""

import jax
import jax.numpy as jnp

from .program import drawn, mean_square, near_one, normal, program, weight

WIDTH = 16


@program()
def fft(key):
    """A filter in frequency space, between two products."""
    keys = jax.random.split(key, 4)

    def loss(weights, x):
        spectrum = jnp.fft.rfft(x @ weights["first"], axis=-1)
        x = jnp.fft.irfft(spectrum * weights["filter"][None], axis=-1)
        y = x @ weights["last"]
        return mean_square(y - 1), (y, spectrum)

    weights = {
        "first": weight(keys[0], WIDTH, WIDTH),
        "filter": normal(keys[1], WIDTH // 2 + 1),
        "last": weight(keys[2], WIDTH, WIDTH),
    }
    # A filter that is complex, and yet changes with real weights.
    weights["filter"] = jax.lax.complex(weights["filter"], -weights["filter"])
    return loss, (weights, normal(keys[3], 8, WIDTH))


@program()
def complex_matmul(key):
    keys = jax.random.split(key, 5)

    def loss(weights, x):
        z = jax.lax.complex(x @ weights["real"], x @ weights["imag"])
        z = z @ weights["complex"]
        return jnp.mean(jnp.abs(z) ** 2), z

    weights = {
        "real": weight(keys[0], WIDTH, WIDTH),
        "imag": weight(keys[1], WIDTH, WIDTH),
        "complex": jax.lax.complex(*(weight(k, WIDTH, WIDTH) for k in keys[2:4])),
    }
    return loss, (weights, normal(keys[4], 8, WIDTH))


@program()
def random_numbers_and_keys(key):
    """Noise, masks and choices must be those of float32, bit for bit."""
    keys = jax.random.split(key, 4)

    def loss(weights, key, old_key, x):
        keys = jax.random.split(key, 4)
        x = x + 0.1 * jax.random.normal(keys[0], x.shape)
        hidden = jax.nn.gelu(x @ weights["first"])
        kept = jax.random.bernoulli(keys[1], 0.75, hidden.shape)
        hidden = jnp.where(kept, hidden / 0.75, 0.0)
        logits = hidden @ weights["last"] + jax.random.gumbel(old_key, (8, WIDTH))
        chosen = jax.random.categorical(keys[2], jnp.zeros((8, WIDTH)))
        y = jax.nn.softmax(logits)
        outputs = {"y": y, "key": keys[3], "old": old_key, "kept": kept, "at": chosen}
        return mean_square(y - 1), outputs

    first, last = (weight(k, WIDTH, WIDTH) for k in keys[:2])
    weights = {"first": first, "last": last}
    return loss, (weights, keys[2], jax.random.PRNGKey(3), normal(keys[3], 8, WIDTH))


@program(context=lambda: jax.enable_x64(True))
def with_64_bits(key):
    """float64 stays what it is, beside float32 that is cast."""
    keys = jax.random.split(key, 4)

    def loss(weights, x, index):
        y = jax.nn.gelu(x @ weights["first"])[:, index]
        exact = jnp.cumsum(y.astype(jnp.float64) @ weights["double"], axis=0)
        z = exact.astype(jnp.float32) @ weights["first"]
        return mean_square(z) + 1, {"exact": exact, "count": jnp.sum(index), "z": z}

    weights = {
        "first": weight(keys[0], WIDTH, WIDTH),
        "double": weight(keys[1], WIDTH, WIDTH).astype(jnp.float64),
    }
    index = jax.random.permutation(keys[2], WIDTH)
    return loss, (weights, normal(keys[3], 8, WIDTH), index)


def masked(key):
    mask = jnp.tril(jnp.ones((6, 6), bool), -1)
    return *drawn((WIDTH, WIDTH), (2, 6, WIDTH))(key), mask


@program(args=masked, loss_of=near_one)
def masked_softmax(w, x, mask):
    """The lowest float32 is no number of half precision; one row is masked wholly."""
    scores = (x @ w) @ jnp.swapaxes(x, -1, -2)
    lowest = jnp.finfo(scores.dtype).min
    probabilities = jax.nn.softmax(jnp.where(mask, scores, lowest))
    bias = jnp.where(mask, 0.0, lowest)[None]
    return probabilities @ x + jax.nn.softmax(0.5 * scores + 0.5 * bias) @ x
