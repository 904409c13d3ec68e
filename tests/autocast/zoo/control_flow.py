"""Branches, loops, recomputation and calls out to Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from .program import mean_square, normal, program, weight

WIDTH = 16


def layers(key, count):
    keys = jax.random.split(key)
    return weight(keys[0], count, WIDTH, WIDTH), normal(keys[1], 8, WIDTH)


@program()
def cond(key):
    """Branches of unlike precision: a product, an exponential, nothing at all."""

    def loss(w, x, positive):
        x = lax.cond(positive, lambda x: x @ w[0], lambda x: jnp.exp(x), x)
        x = lax.cond(~positive, lambda x: jnp.tanh(x @ w[1]), lambda x: x, x)
        return mean_square(x - 1), x

    return loss, (*layers(key, 2), jnp.array(True))


@program()
def associative_scan(key):
    """A linear recurrence, as state space models have it, and products of matrices."""

    def loss(w, x):
        decay, drive = jax.nn.sigmoid(x @ w[0]), x @ w[1]

        def combine(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, states = lax.associative_scan(combine, (decay, drive))
        matrices = jnp.eye(4)[None] + 0.1 * x[:, :4, None] * x[:, None, 4:8]
        chain = lax.associative_scan(jnp.matmul, matrices)
        return mean_square(states) + mean_square(chain), (states, chain)

    return loss, layers(key, 2)


@program()
def loops_in_loops(key):
    """A scan in a scan, whose inner loop is a jitted function."""

    def loss(w, x):
        @jax.jit
        def layer(x, w):
            return x + 0.5 * jnp.tanh(x @ w)

        def repeat(x, _):
            x, norms = lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, w)
            return x, norms

        x, norms = lax.scan(repeat, x, None, length=3)
        return mean_square(x - 1), norms

    return loss, layers(key, 2)


@program(forward_mode=True)
def while_until_small(key):
    """How often the loop runs depends on the numbers in it."""
    keys = jax.random.split(key)

    def loss(w, x):
        def body(carry):
            i, x = carry
            return i + 1, 0.5 * jnp.tanh(x @ w)

        def is_large(carry):
            i, x = carry
            return (jnp.max(jnp.abs(x @ w)) > 1e-3) & (i < 4)

        count, x = lax.while_loop(is_large, body, (jnp.int32(0), x))
        return mean_square(10 * x), (count, x)

    return loss, (weight(keys[0], 4, 4), normal(keys[1], 8, 4))


def block(w, x):
    hidden = checkpoint_name(jax.nn.gelu(x @ w[0]), "hidden")
    return x + checkpoint_name(hidden @ w[1], "out")


@program()
def remat_policies(key):
    policies = (
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("hidden"),
        jax.checkpoint_policies.save_anything_except_these_names("out"),
    )

    def loss(w, x):
        for policy in policies:
            x = jax.checkpoint(block, policy=policy)(w, x)
        return mean_square(x - 1), x

    w, x = layers(key, 2)
    return loss, (0.5 * w, x)


@program()
def remat_in_scan(key):
    """Every step keeps only what its policy names."""

    def loss(w, x):
        @functools.partial(
            jax.checkpoint,
            policy=jax.checkpoint_policies.save_only_these_names("hidden"),
            prevent_cse=False,
        )
        def step(x, w):
            return block(w, x), None

        x, _ = lax.scan(step, x, w)
        return mean_square(x - 1), x

    keys = jax.random.split(key)
    return loss, (0.5 * weight(keys[0], 3, 2, WIDTH, WIDTH), normal(keys[1], 8, WIDTH))


def only_float32(x):
    """Python code that was written for float32 gets float32."""
    if x.dtype != np.float32:
        raise TypeError(f"the callback needs float32, got {x.dtype}")
    return np.sin(x)


@program()
def callbacks(key):
    """Ordered and pure calls of Python, in and out of a loop."""

    @jax.custom_jvp
    def sine(x):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jax.pure_callback(only_float32, shape, x, vmap_method="expand_dims")

    sine.defjvps(lambda dx, y, x: jnp.cos(x) * dx)

    def loss(w, x):
        def step(x, w):
            y = sine(x @ w)
            still = lax.stop_gradient(y)
            shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
            seen = io_callback(only_float32, shape, still, ordered=True)
            jax.debug.callback(only_float32, still, ordered=True)
            return y, seen

        x, seen = lax.scan(step, x, w)
        return mean_square(sine(x) - 1), seen

    return loss, layers(key, 2)
