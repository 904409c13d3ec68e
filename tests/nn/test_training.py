"""A small transformer trains in every precision, and keeps little in a scan."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx.nn

from ..helpers import HALF
from .cases import kept_arrays

VOCABULARY, HIDDEN, LENGTH = 12, 16, 8


class Model(eqx.Module):
    embedding: jax.Array
    layers: list[mpx.nn.TransformerLayer]
    norm: mpx.nn.RMSNorm

    def __init__(self, key, depth=1):
        keys = jax.random.split(key, depth + 1)
        self.embedding = 0.3 * jax.random.normal(keys[0], (VOCABULARY, HIDDEN))
        options = {
            "num_gqa_groups": 2,
            "layernorm_type": "rmsnorm",
            "self_attention_mask_type": "causal",
            "use_rotary_positions": True,
            "hidden_dropout": 0.05,
        }
        layer = functools.partial(mpx.nn.TransformerLayer, HIDDEN, 32, 4, **options)
        self.layers = [layer(key=key) for key in keys[1:]]
        self.norm = mpx.nn.RMSNorm(HIDDEN)

    def __call__(self, tokens, key):
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x, key=key)
        return self.norm(x) @ self.embedding.astype(x.dtype).T


def loss_fn(model, tokens, key):
    logits = model(tokens[:, :-1], key)
    return mpx.nn.mean(mpx.nn.cross_entropy(logits, tokens[:, 1:]), dtype="float32")


def train(loss, scaling, dtype=None, steps=20):
    """Losses of a training run; explicit mixed precision if there is a dtype."""
    model = Model(jax.random.key(0))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    tokens = (jnp.arange(4)[:, None] + jnp.arange(LENGTH + 1)[None]) % VOCABULARY
    options = {} if dtype else {"use_mixed_precision": False}

    @eqx.filter_jit
    def step(model, state, scaling, key):
        with mpx.half_precision(dtype or "float16"):
            call = mpx.filter_value_and_grad(loss, scaling, **options)
            result = call(model, tokens, key)
        model, state, scaling = mpx.optimizer_step(model, optimizer, state, result)
        return model, state, scaling, result.value

    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        model, state, scaling, value = step(model, state, scaling, key)
        losses.append(float(value))
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert all(x.dtype == jnp.float32 for x in arrays)
    return losses, scaling


@pytest.mark.third_party  # Optax's Adam
@pytest.mark.parametrize(
    ("dtype", "loss", "scaling"),
    [
        pytest.param(None, loss_fn, mpx.NoLossScaling(), marks=pytest.mark.slow),
        pytest.param(
            "float16", loss_fn, mpx.DynamicLossScaling(2.0**12), marks=pytest.mark.slow
        ),
        ("bfloat16", mpx.autocast(loss_fn, "bfloat16"), mpx.NoLossScaling()),
    ],
)
def test_the_loss_falls(dtype, loss, scaling):
    losses, scaling = train(loss, scaling, dtype)
    assert np.isfinite(losses).all() and scaling.skipped == 0
    assert losses[0] > 2.0 and losses[-1] < 0.5 * losses[0]


def layer_and_input(dtype="bfloat16"):
    layer = mpx.nn.TransformerLayer(
        HIDDEN, 32, 4, self_attention_mask_type="causal", key=jax.random.key(0)
    )
    x = jax.random.normal(jax.random.key(1), (3, LENGTH, HIDDEN))
    return mpx.cast_tree((layer, x), dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_a_scan_over_layers_keeps_half(dtype):
    layer, x = layer_and_input(dtype)
    layers = jax.tree.map(lambda a: jnp.stack([a] * 3), layer)

    def run(layers, x):
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, layers)[0]

    kept = kept_arrays(run, layers, x)
    sizes = {np.prod(shape) for name, shape in kept if name == "float32"} - {1}
    assert sizes == {3 * x.size // HIDDEN}  # a number for each position of each layer


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_input_decides_what_is_computed_in(parameters, compute):
    """As in Transformer Engine: weights in float32, computation in bfloat16."""
    layer, x = layer_and_input(parameters)
    x = x.astype(compute)

    def loss(layer):
        out = layer(x)
        return jnp.sum(out.astype(jnp.float32)), out

    grads, out = jax.eval_shape(jax.grad(loss, has_aux=True), layer)
    assert out.dtype == compute
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {parameters}
