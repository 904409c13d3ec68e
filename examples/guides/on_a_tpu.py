"""A step as large models on TPUs have it: a scan of blocks, remat, float32 masters."""

import jax
import jax.numpy as jnp
import optax

import mpx

LAYERS, WIDTH, HEADS, WORDS = 4, 64, 2, 32


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(x, w):
    qkv = (norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None


def loss(model, words):
    x = model["table"][words[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(block), x, model["blocks"])
    logits = norm(x) @ model["table"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], -1)
    return -jnp.mean(picked)


# On a TPU nothing else is set: scores and the stream of such blocks are in bfloat16.
cast = mpx.autocast(loss, target="tpu v5e")
normal = jax.nn.initializers.normal(0.1, jnp.bfloat16)
sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
blocks = {
    name: normal(jax.random.key(i), (LAYERS, n * WIDTH, m * WIDTH))
    for i, (name, (n, m)) in enumerate(sizes.items())
}
model = {"table": normal(jax.random.key(4), (WORDS, WIDTH)), "blocks": blocks}
optimizer = mpx.master_weights(optax.adam(3e-3))
# The loss decides about a step, so the optimizer need not wait for all gradients.
state = model, optimizer.init(model), mpx.NoLossScaling(skip="loss")


def step(model, opt_state, scaling, words):
    result = mpx.filter_value_and_grad(cast, scaling)(model, words)
    return mpx.optimizer_step(model, optimizer, opt_state, result), result.value


step = jax.jit(step, donate_argnums=(0, 1, 2))
for i in range(60):  # the next word is five further
    first = jax.random.randint(jax.random.key(i), (16, 1), 0, WORDS)
    state, value = step(*state, (first + 5 * jnp.arange(24)) % WORDS)
print(f"loss {value:.3f}, skipped {state[2].skipped}, zeroed {state[2].zeroed}")
assert value < 0.5 and state[2].zeroed == 0
