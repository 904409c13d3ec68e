"""Custom derivatives and batching, attention with a backward pass of its own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .program import drawn, mean_square, near_one, program

HEADS, TOKENS, DEPTH, BLOCK = 2, 16, 8, 4


def blocks(x):
    """Keys or values as blocks of tokens, `[blocks, heads, block, depth]`."""
    return jnp.moveaxis(x.reshape(HEADS, -1, BLOCK, DEPTH), 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash_attention(q, k, v, scale):
    """Attention whose scores never exist as a whole: a running softmax over blocks."""
    return forward_pass(q, k, v, scale)[0]


def forward_pass(q, k, v, scale):
    def step(carry, block):
        largest, total, mixed = carry
        k, v = block
        scores = jnp.einsum("hqd,hkd->hqk", q, k) * scale
        new = jnp.maximum(largest, jnp.max(scores, axis=-1))
        shrink = jnp.exp(largest - new)
        weights = jnp.exp(scores - new[..., None])
        total = total * shrink + jnp.sum(weights, axis=-1)
        mixed = mixed * shrink[..., None] + jnp.einsum("hqk,hkd->hqd", weights, v)
        return (new, total, mixed), None

    start = (jnp.full(q.shape[:-1], -1e30), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape))
    (largest, total, mixed), _ = lax.scan(step, start, (blocks(k), blocks(v)))
    out = mixed / total[..., None]
    return out, (q, k, v, out, largest + jnp.log(total))


def backward_pass(scale, saved, g):
    q, k, v, out, log_total = saved
    correction = jnp.sum(g * out, axis=-1)

    def step(dq, block):
        k, v = block
        scores = jnp.einsum("hqd,hkd->hqk", q, k) * scale
        weights = jnp.exp(scores - log_total[..., None])
        dv = jnp.einsum("hqk,hqd->hkd", weights, g)
        dweights = jnp.einsum("hqd,hkd->hqk", g, v)
        dscores = weights * (dweights - correction[..., None]) * scale
        dk = jnp.einsum("hqk,hqd->hkd", dscores, q)
        return dq + jnp.einsum("hqk,hkd->hqd", dscores, k), (dk, dv)

    dq, (dk, dv) = lax.scan(step, jnp.zeros(q.shape), (blocks(k), blocks(v)))
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(HEADS, TOKENS, DEPTH)  # noqa: E731
    return dq, whole(dk), whole(dv)


flash_attention.defvjp(forward_pass, backward_pass)


def attention(w, x, attend):
    q, k, v = (jnp.einsum("htd,hde->hte", x, part) for part in w)
    y = attend(q, k, v)
    return mean_square(y - x), y


attention_args = drawn((3, HEADS, DEPTH, DEPTH), (HEADS, TOKENS, DEPTH))


@program(args=attention_args)
def flash_attention_plain(w, x):
    return attention(w, x, lambda q, k, v: flash_attention(q, k, v, DEPTH**-0.5))


@program(args=attention_args)
def jax_dot_product_attention(w, x):
    def attend(q, k, v):
        q, k, v = (jnp.moveaxis(x, 0, 1)[None] for x in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.moveaxis(y[0], 1, 0)

    return attention(w, x, attend)


@jax.custom_jvp
def soft_step(x, sharpness, table):
    """A smooth step; `sharpness` is an integer array, `table` is looked up by it."""
    return jnp.tanh(x * sharpness.astype(x.dtype)) * table[sharpness]


@soft_step.defjvp
def soft_step_jvp(primals, tangents):
    x, sharpness, table = primals
    dx, _, dtable = tangents
    factor = sharpness.astype(x.dtype)
    value = jnp.tanh(x * factor)
    slope, entry = (1 - value**2) * factor * dx, table[sharpness]
    return value * entry, slope * entry + value * dtable[sharpness]


def soft_step_args(key):
    table = jnp.array([0.5, 1.0, 1.5])
    return *drawn((12, 12), (8, 12))(key), table, jnp.int32(2)


@program(argnums=(0, 2), args=soft_step_args)
def custom_jvp_with_an_integer(w, x, table, sharpness):
    y = soft_step(x @ w, sharpness, table) @ w.T
    return mean_square(y - x), y


@program(args=drawn((4, 4), (8, 4)))
def custom_batching(w, x):
    """A function that brings its own rule for vmap, and meets it."""

    def layer(w, x):
        return jnp.tanh(x @ w)

    apply = jax.custom_batching.custom_vmap(layer)

    @apply.def_vmap
    def rule(size, batched, w, x):
        if batched == [False, True]:
            return layer(w, x), True  # one product for the whole batch
        axes = [0 if is_batched else None for is_batched in batched]
        return jax.vmap(layer, axes, axis_size=size)(w, x), True

    y = jax.vmap(apply, in_axes=(None, 0))(w, x)
    # What no vmap has taken apart has no reverse derivative in JAX.
    alone = apply(*jax.lax.stop_gradient((w, x[0])))
    return near_one(y), y + alone[None]
