"""Layers of mpx.nn: a transformer in bfloat16 without a cast, in the explicit style."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx
import mpx.nn


class Model(eqx.Module):
    embedding: jax.Array
    layers: list[mpx.nn.TransformerLayer]
    norm: mpx.nn.RMSNorm

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = 0.3 * jax.random.normal(keys[0], (12, 32))
        options = {"num_gqa_groups": 2, "layernorm_type": "rmsnorm"}
        options |= {"self_attention_mask_type": "causal", "hidden_dropout": 0.05}
        self.layers = [
            mpx.nn.TransformerLayer(
                32, 64, 4, use_rotary_positions=True, key=key, **options
            )
            for key in keys[1:]
        ]
        self.norm = mpx.nn.RMSNorm(32)

    def __call__(self, tokens, key):
        x = self.embedding[tokens]
        keys = jax.random.split(key, 2)
        for layer, each in zip(self.layers, keys, strict=True):
            x = layer(x, key=each)
        return self.norm(x) @ self.embedding.astype(x.dtype).T


def loss(model, tokens, key):
    losses = mpx.nn.cross_entropy(model(tokens[:, :-1], key), tokens[:, 1:])
    return mpx.nn.mean(losses, dtype="float32")


@eqx.filter_jit
def step(model, opt_state, scaling, tokens, key):
    with mpx.half_precision("bfloat16"):  # weights are float32, and cast here
        result = mpx.filter_value_and_grad(loss, scaling)(model, tokens, key)
    return mpx.optimizer_step(model, optimizer, opt_state, result), result.value


model, optimizer = Model(jax.random.key(0)), optax.adam(1e-2)
state = model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))
state = *state, mpx.NoLossScaling()
tokens = (jnp.arange(4)[:, None] + jnp.arange(9)) % 12
losses = []
for key in jax.random.split(jax.random.key(1), 20):
    state, value = step(*state, tokens, key)
    losses.append(float(value))
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
assert losses[-1] < 0.5 * losses[0]
