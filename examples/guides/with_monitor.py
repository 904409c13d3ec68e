"""How large the numbers of a step are, and how close two precisions are."""

import jax
import jax.numpy as jnp
import optax

import mpx


def loss(weights, x, y):
    for w in weights["layers"]:
        with jax.named_scope("layer"):
            x = x + jax.nn.gelu(x @ w)
    return jnp.mean((x @ weights["head"] - y) ** 2)


half = mpx.autocast(loss, "float16")
optimizer = optax.adam(1e-3)


@jax.jit
def step(weights, opt_state, scaling, x, y):
    result = mpx.value_and_grad(half, scaling)(weights, x, y)
    return mpx.optimizer_step(weights, optimizer, opt_state, result)


keys = jax.random.split(jax.random.key(0), 5)
weights = {
    "layers": [jax.random.normal(key, (32, 32)) / 8 for key in keys[:3]],
    "head": jax.random.normal(keys[3], (32, 4)) / 8,
}
x = jax.random.normal(keys[4], (64, 32))
y = x[:, :4]

# Every ten steps the step that also counts, in the place of the step.
watch = mpx.monitor(step, ("float16", mpx.Format.HYBRID), sample=1)
state = (weights, optimizer.init(weights), mpx.init_scaling(half, weights, x, y))
history = {}
for number in range(21):
    if number % 10 == 0:
        state, history[number] = watch(*state, x, y)
    else:
        state = step(*state, x, y)

seen = history[20]
assert "['head']/gradient/float16/flushed" in seen.records()
print(seen.text(width=90))

found = mpx.compare(loss, half)(state[0], x, y)
mpx.expect_close(found, activation_snr=50.0, gradient_snr=50.0)
print(f"worst of the loss: {found.worst(1)[0]}, floor {found.floor:.0f} dB")
