"""Unmodified models of four frameworks reach the loss of float32.

Handwritten digits (scikit-learn's, 8 by 8 pixels), a few dozen steps of Adam.
"""

import equinox as eqx
import flax.linen as linen
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import mpx

# Flax, Haiku and Optax need JAX's own promotion.
pytestmark = pytest.mark.third_party

STEPS, BATCH, WIDTH = 60, 64, 32
PRECISIONS = ("float32", "bfloat16", "float16")


def digits():
    images, labels = load_digits(return_X_y=True)
    return np.float32(images / 16), np.int32(labels)


def cross_entropy(logits, labels):
    """In full precision: a sum of exponentials is a critical operation."""
    losses = mpx.force_full_precision(
        optax.softmax_cross_entropy_with_integer_labels, jnp.float32
    )(logits, labels)
    return losses.mean()


def plain_jax():
    keys = jax.random.split(jax.random.key(0))
    model = {
        "w1": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "b1": jnp.zeros(WIDTH),
        "w2": jax.random.normal(keys[1], (WIDTH, 10)) / WIDTH**0.5,
    }

    def loss(model, x, labels):
        hidden = jax.nn.relu(x @ model["w1"] + model["b1"])
        return cross_entropy(hidden @ model["w2"], labels), None

    return model, None, loss


def equinox():
    model = eqx.nn.MLP(64, 10, WIDTH, 1, key=jax.random.key(0))

    def loss(model, x, labels):
        return cross_entropy(jax.vmap(model)(x), labels), None

    return model, None, loss


class LinenModel(linen.Module):
    """A perceptron with batch normalization."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH)(x)
        x = linen.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return linen.Dense(10)(linen.relu(x))


def flax_linen():
    module = LinenModel()
    variables = module.init(jax.random.key(0), jnp.zeros((1, 64)))
    state = {"batch_stats": variables["batch_stats"]}

    def loss(weights, state, x, labels):
        variables = {"params": weights, **state}
        logits, new = module.apply(variables, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels), new

    return variables["params"], state, loss


def haiku_model():
    def forward(x):
        x = haiku.Linear(WIDTH)(x)
        x = haiku.BatchNorm(True, True, 0.9)(x, is_training=True)
        return haiku.Linear(10)(jax.nn.relu(x))

    model = haiku.without_apply_rng(haiku.transform_with_state(forward))
    weights, state = model.init(jax.random.key(0), jnp.zeros((2, 64)))

    def loss(weights, state, x, labels):
        logits, new = model.apply(weights, state, x)
        return cross_entropy(logits, labels), new

    return weights, state, loss


FRAMEWORKS = {
    "plain_jax": plain_jax,
    "equinox": equinox,
    "flax_linen": flax_linen,
    "haiku": haiku_model,
}


def train(build, precision):
    """The losses, the final model state and the final scaling."""
    model, state, loss = build()
    optimizer = optax.adam(1e-2)
    mixed = precision != "float32"
    policy = mpx.get_policy(f"params=float32,compute={precision},output=float32")
    scaling = {
        "float32": mpx.NoLossScaling,
        "bfloat16": mpx.NoLossScaling,
        "float16": lambda: mpx.DynamicLossScaling(2.0**15, period=20),
    }[precision]()

    @eqx.filter_jit
    def step(model, state, opt_state, scaling, x, labels):
        inputs = (x, labels) if state is None else (state, x, labels)
        result = mpx.filter_value_and_grad(
            loss, scaling, has_aux=True, use_mixed_precision=mixed, policy=policy
        )(model, *inputs)
        model, opt_state, scaling = mpx.optimizer_step(
            model, optimizer, opt_state, result
        )
        if state is not None:
            state = mpx.select_tree(result.finite, result.aux, state)
        return model, state, opt_state, scaling, result.value

    images, labels = digits()
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for i in range(STEPS):
        rows = np.arange(i * BATCH, (i + 1) * BATCH) % len(images)
        model, state, opt_state, scaling, value = step(
            model, state, opt_state, scaling, images[rows], labels[rows]
        )
        losses.append(float(value))
    assert {str(x.dtype) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))} == {
        "float32"
    }
    return np.array(losses), state, scaling


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_half_precision_reaches_the_float32_loss(name):
    losses, states, scalings = {}, {}, {}
    for precision in PRECISIONS:
        losses[precision], states[precision], scalings[precision] = train(
            FRAMEWORKS[name], precision
        )
    full = losses["float32"]
    assert full[-10:].mean() < 0.5 * full[0]
    for precision, tolerance in (("bfloat16", 0.05), ("float16", 0.05)):
        half = losses[precision]
        assert np.isfinite(half).all()
        assert abs(half[-10:].mean() - full[-10:].mean()) < tolerance * full[0]
        # The first loss is that of the same weights, rounded.
        assert half[0] == pytest.approx(full[0], rel=2e-2)
        for a, b in zip(
            jax.tree.leaves(states[precision]),
            jax.tree.leaves(states["float32"]),
            strict=True,
        ):
            assert a.dtype == b.dtype
            assert np.abs(a - b).max() <= 0.2 * np.abs(b).max() + 0.1
    assert int(scalings["bfloat16"].skipped) == 0
    assert int(scalings["float16"].skipped) < 10
    assert int(scalings["float16"].steps) == STEPS


def test_nnx_is_refused_with_a_way_out():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    fun = lambda model, x: model(x).astype(jnp.float32).mean()  # noqa: E731
    with pytest.raises(TypeError, match="nnx.split"):
        mpx.filter_grad(fun, mpx.NoLossScaling())(model, jnp.ones(2))
    graph, weights = nnx.split(model)

    def split(weights, x):
        return fun(nnx.merge(graph, weights), x)

    assert bool(
        mpx.filter_grad(split, mpx.NoLossScaling())(weights, jnp.ones(2)).finite
    )
