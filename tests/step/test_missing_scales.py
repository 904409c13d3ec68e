"""A recipe with a state under a loss scaling that holds no scales."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx

N = 16
W = jnp.eye(N)


@mpx.autocast(recipe=mpx.DelayedScaling())
def loss(weights, x):
    return jnp.mean((x @ weights[0] @ weights[1]) ** 2)


def ambient_loss(layer, x):
    with mpx.autocast(recipe=mpx.DelayedScaling(), ambient=True):
        return jnp.sum(jax.vmap(layer)(x) ** 2)


@pytest.mark.parametrize(
    ("call", "make", "is_ambient"),
    [
        ("mpx.filter_grad", mpx.filter_grad, False),
        ("mpx.filter_grad", mpx.filter_grad, True),
        ("mpx.filter_value_and_grad", mpx.filter_value_and_grad, True),
        ("mpx.calculate_scaled_grad", mpx.calculate_scaled_grad, False),
        ("mpx.inference", mpx.inference, True),
        ("mpx.blame", mpx.blame, False),
    ],
)
def test_a_loss_scaling_without_scales_is_named(call, make, is_ambient):
    scaling = mpx.NoLossScaling() if is_ambient else mpx.DynamicLossScaling()
    func, args = loss, ((W, W), W)
    if is_ambient:
        layer = mpx.nn.Linear(N, N, key=jax.random.key(0))
        func, args = ambient_loss, (layer, W)
    name = type(scaling).__name__
    with pytest.raises(
        ValueError, match=f"`scaling` of `{call}` must contain"
    ) as caught:
        make(func, scaling)(*args)
    text = str(caught.value)
    assert f"got `mpx.{name}`, which has none." in text
    assert "\n    scaling = mpx.init_scaling(func, model, ...)\n" in text
    line = "    scaling = mpx.init_scaling(func, model, ...).with_loss(scaling)\n"
    assert (line in text) == (name != "NoLossScaling")
    if make is mpx.filter_grad:
        repaired = mpx.init_scaling(func, *args).with_loss(scaling)
        assert eqx.filter_jit(lambda s: make(func, s)(*args).finite)(repaired)


def test_the_line_is_the_users_and_not_that_of_a_library():
    layer = eqx.nn.Linear(N, N, key=jax.random.key(0))

    @mpx.autocast(recipe=mpx.DelayedScaling())
    def squared(layer, x):
        return jnp.mean(jax.vmap(jax.vmap(layer))(jnp.stack([x, x])) ** 2)

    with pytest.raises(ValueError, match=r"DelayedScaling` at \S*test_missing_scales"):
        squared(layer, W)


def test_rules_see_the_users_line_of_a_layer():
    layer = eqx.nn.Linear(N, N, key=jax.random.key(0))
    seen = []

    def is_here(operation):
        seen.append(operation.line)
        return False

    rules = mpx.Rules(
        mpx.Rule(mpx.Precision.FULL, primitive="dot_general", when=is_here)
    )
    mpx.autocast(lambda m, x: jax.vmap(m)(x), rules=rules)(layer, W)
    assert seen and all("test_missing_scales.py:" in line for line in seen)
