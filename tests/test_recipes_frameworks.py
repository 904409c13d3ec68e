"""Recipes for models of Equinox, Linen, NNX and Haiku that know nothing of them."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
import mpx.nnx
from tests.helpers import slow_but

pytestmark = pytest.mark.third_party

WIDTH, CLASSES, STEPS = 32, 4, 8
RECIPES = {
    "delayed": mpx.DelayedScaling(amax_history_len=4),
    "mxfp8": mpx.MXFP8BlockScaling(),
}


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(64, WIDTH)).astype(np.float32)
    labels = (x @ random.normal(size=(WIDTH, CLASSES))).argmax(-1)
    return jnp.asarray(x), jnp.asarray(labels, jnp.int32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def equinox():
    model = eqx.nn.MLP(WIDTH, CLASSES, WIDTH, 2, key=jax.random.key(1))
    names = [f"layers[{i}].weight" for i in range(2)]
    return model, lambda m, x, y: cross_entropy(jax.vmap(m)(x), y), names


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(CLASSES)(x)


def linen():
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(1), data()[0])
    names = [f"['params']['Dense_{i}']['kernel']" for i in range(2)]
    return params, lambda p, x, y: cross_entropy(model.apply(p, x), y), names


def haiku():
    model = hk.without_apply_rng(
        hk.transform(lambda x: hk.nets.MLP([WIDTH, WIDTH, CLASSES])(x))
    )
    params = jax.jit(model.init)(jax.random.key(1), data()[0])
    names = [f"['mlp/~/linear_{i}']['w']" for i in range(2)]
    return params, lambda p, x, y: cross_entropy(model.apply(p, x), y), names


MODELS = {"equinox": equinox, "linen": linen, "haiku": haiku}


@pytest.mark.parametrize(
    ("name", "recipe"),
    slow_but(
        [("linen", "delayed")],
        [("equinox", "mxfp8"), ("linen", "delayed"), ("haiku", "delayed")],
    ),
)
def test_a_model_trains(name, recipe):
    model, func, names = MODELS[name]()
    loss = mpx.autocast(func, recipe=RECIPES[recipe])
    batch = data()
    scaling = mpx.init_scaling(loss, model, *batch)
    if recipe == "delayed":
        found = [slot.split(" (")[0] for slot in scaling.scales_by_weight()]
        assert found == names
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, scaling):
        result = mpx.filter_value_and_grad(loss, scaling)(model, *batch)
        stepped = mpx.optimizer_step(model, optimizer, state, result)
        return *stepped, result.value

    losses = []
    for _ in range(STEPS):
        model, state, scaling, value = step(model, state, scaling)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert int(scaling.steps) == STEPS and int(scaling.skipped) == 0
    if recipe == "delayed":
        assert all((x != 1).all() for x in scaling.scales_by_weight().values())


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "recipe", ["mxfp8", pytest.param("delayed", marks=pytest.mark.slow)]
)
def test_an_nnx_model_trains(recipe):
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    batch = data()

    @mpx.autocast(recipe=RECIPES[recipe])
    def loss(model, x, labels):
        return cross_entropy(model(x), labels)

    scaling = mpx.init_scaling(loss, model, *batch)
    before = model.norm.mean[...]

    @nnx.jit
    def step(model, optimizer, scaling):
        result = mpx.nnx.value_and_grad(loss, scaling)(model, *batch)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return result.value, result.scaling

    losses = []
    for _ in range(STEPS):
        value, scaling = step(model, optimizer, scaling)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    assert (model.norm.mean[...] != before).any()
    if recipe == "delayed":
        assert len(scaling.scales_by_weight()) == 2
        assert all((x != 1).all() for x in scaling.scales_by_weight().values())
