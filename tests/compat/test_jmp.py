"""`mpx.compat.jmp` beside the real package, its README, and its mended defects."""

import importlib.metadata

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import mpx.compat.jmp as ours

POLICIES = [
    "half", "full", "float16", "bf16", "c=f16", "p=f16,c=f16", "p=f16,c=bf16", "o=bf16",
    "p=half", "params=float32,compute=float16,output=float32",
]  # fmt: skip


def test_every_public_name_is_there():
    assert importlib.metadata.version("jmp") == "0.0.4"
    assert all(hasattr(ours, name) for name in jmp.__all__)


@pytest.mark.parametrize("text", POLICIES)
def test_policies_are_read_and_written_alike(text):
    policy, theirs = ours.get_policy(text), jmp.get_policy(text)
    assert str(policy) == str(theirs)
    assert ours.get_policy(str(policy)) == policy
    for name in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(policy, name) == jnp.dtype(getattr(theirs, name))


@pytest.mark.parametrize("cast", ["cast_to_full", "cast_to_half"])
def test_casts_agree(cast):
    tree = {"a": jnp.ones(3), "b": np.ones(2, np.float16), "c": jnp.arange(2), "d": "x"}
    result, expected = getattr(ours, cast)(tree), getattr(jmp, cast)(tree)
    assert jax.tree.map(_kind, result) == jax.tree.map(_kind, expected)


def _kind(leaf):
    return getattr(leaf, "dtype", leaf)


@pytest.mark.third_party
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4), st.integers(2, 4))
def test_dynamic_scale_takes_the_same_values(pattern, period, factor):
    scale = ours.DynamicLossScale(jnp.float32(2.0**10), period=period, factor=factor)
    theirs = jmp.DynamicLossScale(jnp.float32(2.0**10), period=period, factor=factor)
    for good in pattern:
        scale, theirs = (s.adjust(jnp.asarray(good)) for s in (scale, theirs))
        assert scale.loss_scale == theirs.loss_scale
        assert scale.counter == theirs.counter
        assert scale.loss_scale.dtype == theirs.loss_scale.dtype


@pytest.mark.third_party
@pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
def test_scale_and_unscale_agree(kind):
    scale, theirs = (getattr(m, kind)(jnp.float32(8.0)) for m in (ours, jmp))
    tree = {"a": jnp.arange(3.0), "b": jnp.ones(2, jnp.float16)}
    for method in ("scale", "unscale"):
        result, expected = (getattr(s, method)(tree) for s in (scale, theirs))
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        assert jax.tree.map(_kind, result) == jax.tree.map(_kind, expected)


def test_select_tree_and_all_finite_agree():
    a, b = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.nan, 0.0])}
    for pred in (jnp.asarray(True), jnp.asarray(False)):
        jax.tree.map(
            np.testing.assert_array_equal,
            ours.select_tree(pred, a, b),
            jmp.select_tree(pred, a, b),
        )
    for tree in (a, b, {}):
        assert bool(ours.all_finite(tree)) == bool(jmp.all_finite(tree))


def test_readme_policies():
    half, full = jnp.float16, jnp.float32
    my_policy = ours.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)

    def layer(params, x):
        params, x = my_policy.cast_to_compute((params, x))
        w, b = params
        y = x @ w + b
        return my_policy.cast_to_output(y)

    params = (jnp.ones((2, 3), my_policy.param_dtype), jnp.ones((3,)))
    y = layer(params, jnp.ones((3, 2)).T.reshape(3, 2)[0])
    assert y.dtype == half
    my_policy = my_policy.with_output_dtype(full)
    assert layer(params, jnp.ones(2)).dtype == full
    assert str(my_policy) == "p=full,c=f16,o=full"


def test_readme_no_op():
    loss_scale = ours.NoOpLossScale()
    loss = grads = object()
    assert loss is loss_scale.scale(loss)
    assert grads is loss_scale.unscale(grads)
    assert loss_scale is loss_scale.adjust(jnp.asarray(True))
    assert loss_scale.loss_scale == 1


@pytest.mark.third_party
def test_readme_training_in_haiku(getkey):
    """The kind of its worked example: a Haiku network, float16, dynamic scaling."""
    import haiku as hk

    policy = ours.get_policy("params=float32,compute=float16,output=float32")

    def forward(x):
        hk.mixed_precision.set_policy(hk.Linear, policy)
        return hk.nets.MLP([16, 1])(x)

    network = hk.without_apply_rng(hk.transform(forward))
    x = jax.random.normal(getkey(), (64, 4))
    y = jnp.sum(x, axis=1, keepdims=True)
    params = network.init(getkey(), x)
    optimizer = optax.adam(1e-2)

    def loss_fn(params, loss_scale):
        loss = jnp.mean((network.apply(params, x) - y) ** 2)
        return loss_scale.scale(loss), loss

    @jax.jit
    def train_step(params, opt_state, loss_scale):
        grads, loss = jax.grad(loss_fn, has_aux=True)(params, loss_scale)
        grads = loss_scale.unscale(grads)
        grads_finite = ours.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_state)
        params, opt_state = ours.select_tree(grads_finite, new, (params, opt_state))
        return params, opt_state, loss_scale, loss

    opt_state = optimizer.init(params)
    loss_scale = ours.DynamicLossScale(jnp.float32(2.0**15))
    losses = []
    for _ in range(100):
        params, opt_state, loss_scale, loss = train_step(params, opt_state, loss_scale)
        losses.append(float(loss))
    hk.mixed_precision.clear_policy(hk.Linear)
    assert losses[-1] < 0.1 * losses[0]


class TestMendedDefects:
    def test_min_loss_scale_survives_jit(self):
        scale = ours.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(4))
        for _ in range(4):
            scale = jax.jit(lambda s: s.adjust(jnp.asarray(False)))(scale)
        assert scale.loss_scale == 4

    def test_float16_scale_works_and_stays_finite(self):
        scale = ours.DynamicLossScale(jnp.float16(2**14), period=1)
        for _ in range(5):
            scale = scale.adjust(jnp.asarray(True))
        assert scale.loss_scale == 2**15 and scale.loss_scale.dtype == jnp.float16

    def test_float32_scale_stays_finite(self):
        scale = ours.DynamicLossScale(jnp.float32(2.0**120), period=1, factor=2**4)
        for _ in range(5):
            scale = scale.adjust(jnp.asarray(True))
        assert scale.loss_scale == 2.0**124

    def test_static_scale_has_a_leaf(self):
        assert jax.tree.leaves(ours.StaticLossScale(jnp.float32(8))) == [8]
        assert jax.tree.leaves(jmp.StaticLossScale(jnp.float32(8))) == []

    @pytest.mark.parametrize("value", [0.0, -2.0, np.nan, np.inf])
    @pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
    def test_impossible_scales_are_refused(self, kind, value):
        with pytest.raises(ValueError, match="must be positive and finite"):
            getattr(ours, kind)(np.float32(value))
