"""Branches, loops, recomputation and calls out to Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from .program import drawn, mean_square, near_one, program

WIDTH = 16
two_layers = drawn((2, WIDTH, WIDTH), (8, WIDTH))


@program(args=lambda key: (*two_layers(key), jnp.array(True)), loss_of=near_one)
def cond(w, x, positive):
    """Branches of unlike precision: a product, an exponential, nothing at all."""
    x = lax.cond(positive, lambda x: x @ w[0], lambda x: jnp.exp(x), x)
    return lax.cond(~positive, lambda x: jnp.tanh(x @ w[1]), lambda x: x, x)


@program(args=two_layers)
def associative_scan(w, x):
    """A linear recurrence, as state space models have it, and products of matrices."""
    decay, drive = jax.nn.sigmoid(x @ w[0]), x @ w[1]

    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, states = lax.associative_scan(combine, (decay, drive))
    matrices = jnp.eye(4)[None] + 0.1 * x[:, :4, None] * x[:, None, 4:8]
    chain = lax.associative_scan(jnp.matmul, matrices)
    return mean_square(states) + mean_square(chain), (states, chain)


@program(args=two_layers)
def loops_in_loops(w, x):
    """A scan in a scan, whose inner loop is a jitted function."""

    @jax.jit
    def layer(x, w):
        return x + 0.5 * jnp.tanh(x @ w)

    def repeat(x, _):
        x, norms = lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, w)
        return x, norms

    x, norms = lax.scan(repeat, x, None, length=3)
    return near_one(x), norms


@program(args=drawn((4, 4), (8, 4)), forward_mode=True)
def while_until_small(w, x):
    """How often the loop runs depends on the numbers in it."""

    def body(carry):
        i, x = carry
        return i + 1, 0.5 * jnp.tanh(x @ w)

    def is_large(carry):
        i, x = carry
        return (jnp.max(jnp.abs(x @ w)) > 1e-3) & (i < 4)

    count, x = lax.while_loop(is_large, body, (jnp.int32(0), x))
    return mean_square(10 * x), (count, x)


def block(w, x):
    hidden = checkpoint_name(jax.nn.gelu(x @ w[0]), "hidden")
    return x + checkpoint_name(hidden @ w[1], "out")


POLICIES = jax.checkpoint_policies


@program(args=drawn((2, WIDTH, WIDTH), (8, WIDTH), scale=0.5), loss_of=near_one)
def remat_policies(w, x):
    for policy in (
        None,
        POLICIES.everything_saveable,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.save_only_these_names("hidden"),
        POLICIES.save_anything_except_these_names("out"),
    ):
        x = jax.checkpoint(block, policy=policy)(w, x)
    return x


@program(args=drawn((3, 2, WIDTH, WIDTH), (8, WIDTH), scale=0.5), loss_of=near_one)
def remat_in_scan(w, x):
    """Every step keeps only what its policy names."""
    policy = POLICIES.save_only_these_names("hidden")
    kept = functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    return lax.scan(kept(lambda x, w: (block(w, x), None)), x, w)[0]


def only_float32(x):
    """Python code that was written for float32 gets float32."""
    if x.dtype != np.float32:
        raise TypeError(f"the callback needs float32, got {x.dtype}")
    return np.sin(x)


@jax.custom_jvp
def sine(x):
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.pure_callback(only_float32, shape, x, vmap_method="expand_dims")


sine.defjvps(lambda dx, y, x: jnp.cos(x) * dx)


@program(args=two_layers)
def callbacks(w, x):
    """Ordered and pure calls of Python, in and out of a loop."""

    def step(x, w):
        y = sine(x @ w)
        still = lax.stop_gradient(y)
        shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
        seen = io_callback(only_float32, shape, still, ordered=True)
        jax.debug.callback(only_float32, still, ordered=True)
        return y, seen

    x, seen = lax.scan(step, x, w)
    return near_one(sine(x)), seen
