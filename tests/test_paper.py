"""The code that the MPX paper prints, and a program written for the published MPX.

Lines that touch the library are as printed. What the source leaves out or slips on is
mended here and marked `mended`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpx

pytestmark = pytest.mark.third_party  # Optax's Adam needs standard promotion


def split_heads(x, h):  # mended: stands in for es.jax_einshape("n(hf)->hnf")
    return jnp.swapaxes(x.reshape(len(x), h, -1), 0, 1)


def join_heads(x):  # mended: stands in for es.jax_einshape("hnf->n(hf)")
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)


class MultiHeadAttentionBlock(eqx.Module):
    dense_qs: eqx.nn.Linear
    dense_ks: eqx.nn.Linear
    dense_vs: eqx.nn.Linear
    dense_o: eqx.nn.Linear
    num_heads: int

    layer_norm: eqx.nn.LayerNorm

    def __init__(self, feature_dim, num_heads, key):
        self.num_heads = num_heads

        key, subkey = jax.random.split(key)
        self.dense_qs = eqx.nn.Linear(feature_dim, feature_dim, key=subkey)
        # mended: "same for dense_ks, dense_vs, dense_o"
        keys = jax.random.split(key, 3)
        self.dense_ks = eqx.nn.Linear(feature_dim, feature_dim, key=keys[0])
        self.dense_vs = eqx.nn.Linear(feature_dim, feature_dim, key=keys[1])
        self.dense_o = eqx.nn.Linear(feature_dim, feature_dim, key=keys[2])

        self.layer_norm = eqx.nn.LayerNorm(feature_dim)

    def attention(self, q, k, v):  # mended: `self` is missing in the source
        attention_scores = q @ k.T / jnp.sqrt(q.shape[-1])
        attention_scores = mpx.force_full_precision(
            jax.nn.softmax, attention_scores.dtype
        )(attention_scores, axis=-1)
        return attention_scores @ v

    def __call__(self, inputs):
        inputs_after_layernorm = jax.vmap(
            mpx.force_full_precision(self.layer_norm, inputs.dtype)
        )(inputs)
        qs = jax.vmap(self.dense_qs)(inputs_after_layernorm)
        qs = split_heads(qs, h=self.num_heads)
        # mended: "same for ks and vs..."
        ks = split_heads(
            jax.vmap(self.dense_ks)(inputs_after_layernorm), self.num_heads
        )
        vs = split_heads(
            jax.vmap(self.dense_vs)(inputs_after_layernorm), self.num_heads
        )

        outputs = jax.vmap(self.attention, in_axes=(0, 0, 0))(qs, ks, vs)
        outputs = join_heads(outputs)

        outputs = jax.vmap(self.dense_o)(outputs)
        outputs += inputs
        return outputs


@pytest.fixture
def block(getkey):
    return MultiHeadAttentionBlock(16, 4, getkey())


CALL = eqx.filter_jit(lambda block, x: block(x))


each_half = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@each_half
def test_attention_block_computes_in_half_precision(block, getkey, dtype):
    x = jax.random.normal(getkey(), (7, 16))
    with mpx.half_precision(dtype):
        outputs = CALL(*mpx.cast_to_half_precision((block, x)))
    assert outputs.dtype == jnp.dtype(dtype)
    outputs = outputs.astype(jnp.float32)
    np.testing.assert_allclose(outputs, CALL(block, x), rtol=0.05, atol=0.05)


def test_attention_block_keeps_matrix_products_half_and_softmax_full(block):
    half, x = mpx.cast_to_half_precision((block, jnp.ones((7, 16))))
    lines = str(jax.make_jaxpr(half)(x)).splitlines()
    for name, dtype in (("= dot_general", "f16["), ("= exp ", "f32[")):
        found = [line for line in lines if name in line]
        assert found and all(dtype in line for line in found)


def loss_of(model, batch):
    images, targets = batch
    outputs = jax.vmap(model)(images)
    mean = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)  # noqa: E731
    return mpx.force_full_precision(mean, jnp.float32)(outputs, targets)


@each_half
def test_model_update_trains(block, getkey, dtype):
    loss, model = loss_of, block
    optimizer = optax.adam(1e-2)
    optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
    x = jax.random.normal(getkey(), (8, 7, 16))
    batch = (x, -x)

    @eqx.filter_jit
    def step(model, optimizer_state, loss_scaling, batch):
        loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(
            model, batch
        )
        model, optimizer_state = mpx.optimizer_update(
            model, optimizer, optimizer_state, grads, grads_finite
        )
        return model, optimizer_state, loss_scaling

    evaluate = eqx.filter_jit(loss)
    before = evaluate(model, batch)
    loss_scaling = mpx.DynamicLossScaling(2.0**15)
    with mpx.half_precision(dtype):
        for _ in range(40):
            model, optimizer_state, loss_scaling = step(
                model, optimizer_state, loss_scaling, batch
            )
    assert evaluate(model, batch) < 0.5 * before
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert all(x.dtype == jnp.float32 for x in leaves)


@pytest.mark.parametrize("mixed", [True, False])
def test_program_of_the_published_package_runs_unchanged(block, getkey, mixed):
    """The structure of its ViT script: placed state, loss and accuracy, filter_jit."""
    mesh = jax.make_mesh((1,), ("batch",))
    replicated = NamedSharding(mesh, PartitionSpec())

    def filtered_device_put(tree, sharding):
        arrays, rest = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, sharding), rest)

    loss_scaling = None
    if mixed:
        loss_scaling = mpx.DynamicLossScaling(
            loss_scaling=mpx.FLOAT16_MAX,
            min_loss_scaling=jnp.ones((), dtype=jnp.float32) * 1.0,
            period=2000,
        )
        assert float(loss_scaling.loss_scaling) == 2.0**15
        loss_scaling = filtered_device_put(loss_scaling, replicated)
    model = filtered_device_put(block, replicated)
    optimizer = optax.adamw(1e-2)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    def batch_loss(model, batch, weight):
        return weight * loss_of(model, batch), jnp.float32(0.5)

    @eqx.filter_jit
    def make_step(model, opt_state, batch, loss_scaling, weight):
        (value, accuracy), loss_scaling, finite, grads = mpx.filter_value_and_grad(
            batch_loss, has_aux=True, use_mixed_precision=mixed, scaling=loss_scaling
        )(model, batch, weight)
        model, opt_state = mpx.optimizer_update(
            model, optimizer, opt_state, grads, finite
        )
        return model, opt_state, loss_scaling, value, accuracy

    x = jax.random.normal(getkey(), (8, 7, 16))
    losses = []
    for _ in range(20):
        model, opt_state, loss_scaling, value, _ = make_step(
            model, opt_state, (x, -x), loss_scaling, jnp.ones(())
        )
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert (loss_scaling is None) == (not mixed)


def test_names_of_the_published_package():
    assert mpx.HALF_PRECISION_DATATYPE == jnp.float16
    counter = jnp.zeros((), jnp.int32)
    scaling = mpx.DynamicLossScaling(jnp.float32(8), jnp.float32(2), 4, 10, counter)
    fields = ("loss_scaling", "min_loss_scaling", "factor", "period", "counter")
    assert [float(getattr(scaling, f)) for f in fields] == [8, 2, 4, 10, 0]
