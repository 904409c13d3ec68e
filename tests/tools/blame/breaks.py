"""Ways in which a step breaks where a product quantizes to zero, all in one step.

The weight of the product has one large row, which no row of the batch reads: beside it
a recipe rounds the other numbers, 2e-5, to zero. Each fault stands on a line of its own
and is `fault(h, w)`, of rows `h` of which each number is 2e-5 or zero: finite of the
first, not of the second. `w` is 1, a weight of its own, and in the loop that of another
product, of the same shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

SIZE, TURNS, SMALL = 32, 9, 2e-5


def quotient(h, w):
    return 1e-4 / (h * w)  # here


def logarithm(h, w):
    return jnp.log(jnp.abs(h * w))  # here


def spread(h, w):
    """Whose gradient is infinite where all rows are equal."""
    return jnp.std(h * w * jnp.arange(SIZE, dtype=h.dtype)[:, None], 0)  # here


def length(h, w):
    """Whose gradient is infinite at zero."""
    return jnp.linalg.norm(h * w, axis=-1)  # here


def mean_of_some(h, w):
    some = (h > SMALL / 2).astype(h.dtype)
    return jnp.sum(h * w * some) / jnp.sum(some)  # here


def attention(h, w):
    scores = jnp.where(h > SMALL / 2, h * w, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)  # here


def choice(h, w):
    return w * jnp.where(h > SMALL / 2, h, jnp.nan)  # here


def index(h, w):
    place = jnp.where(h[0] > SMALL / 2, 3, SIZE + 7)
    return jnp.take(h * w, place, axis=1, mode="fill")  # here


def exponential(h, w):
    return jnp.exp(w * 1e-3 / (h + SMALL / 2))  # here


def half(h, w):
    return (w / (h + SMALL / 2)).astype(jnp.float16).astype(jnp.float32)  # here


@jax.custom_vjp
def root(h):
    return jnp.sqrt(jnp.abs(h) + 1.0)


def pull(h, cotangent):
    return (cotangent * h / jnp.abs(h),)  # the rule


root.defvjp(lambda h: (root(h), h), pull)


def rule(h, w):
    return root(h * w)  # here


def turn(h, w):
    def body(total, place):
        size = jnp.where(place == 6, h * w, 1.0)
        return total + jnp.log2(size), None  # here

    return jax.lax.scan(body, h * 0.0, jnp.arange(TURNS))[0]


def branch(h, w):
    def inverse(h):
        return (h * w) ** -0.5  # here

    return jax.lax.cond(jnp.sum(h) < 1.0, inverse, lambda h: h, h)


FAULTS: tuple[Callable[..., Any], ...] = (quotient, logarithm, spread, length)
FAULTS += (mean_of_some, attention, choice, index, exponential, half, rule)
FAULTS += (turn, branch)


def loss_of(faults: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def loss(w, x):
        h = x @ w["product"]
        found = (jnp.sum(fault(h, w[fault.__name__])) for fault in faults)
        return sum(found, jnp.sum(h @ w["last"]))

    return loss


def weights_of(faults: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    product = jnp.full((SIZE, SIZE), SMALL).at[1].set(500.0)
    ones = {f.__name__: jnp.ones(()) for f in faults}
    return {"product": product, "last": jnp.eye(SIZE), **ones}


def batch() -> Any:
    """Rows that do not read the large row, but rows of the same blocks."""
    return jnp.eye(SIZE)[jnp.arange(SIZE) % 8 + 2]
