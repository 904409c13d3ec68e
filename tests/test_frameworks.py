"""Unmodified models of four frameworks reach the loss of float32.

Handwritten digits (scikit-learn's, 8 by 8 pixels), a few dozen steps of Adam.
"""

import contextlib
import functools

import equinox as eqx
import flax.linen as linen
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import mpx
import mpx.nnx

from .helpers import assert_same_bits, slow_but, unscaled
from .registries import RECIPES

# Flax, Haiku and Optax need JAX's own promotion.
pytestmark = [pytest.mark.third_party, unscaled]

STEPS, BATCH, WIDTH = 60, 64, 32
PRECISIONS = ("float32", "bfloat16", "float16")


@functools.cache
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


class EmaModel(eqx.Module):
    """The same with `mode="ema"`, whose normalization must be in full precision."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear
    wrapped: bool = True

    def __call__(self, x, state):
        x = self.first(x)
        norm = mpx.force_full_precision(self.norm, x.dtype)
        x, state = (norm if self.wrapped else self.norm)(x, state)
        return self.last(jax.nn.relu(x)), state


def equinox_batch_norm(mode="batch", momentum=0.9, wrapped=True):
    def build():
        keys = jax.random.split(jax.random.key(0))
        first = eqx.nn.Linear(64, WIDTH, key=keys[0])
        norm = eqx.nn.BatchNorm(WIDTH, "batch", momentum=momentum, mode=mode)
        last = eqx.nn.Linear(WIDTH, 10, key=keys[1])
        if mode == "ema":
            return EmaModel(first, norm, last, wrapped)
        return eqx.nn.Sequential([first, norm, eqx.nn.Lambda(jax.nn.relu), last])

    model, state = eqx.nn.make_with_state(build)()

    def loss(model, state, x, labels):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = call(x, state)
        return cross_entropy(logits, labels), state

    return model, state, loss


class LinenModel(linen.Module):
    momentum: float

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH)(x)
        x = linen.BatchNorm(use_running_average=False, momentum=self.momentum)(x)
        return linen.Dense(10)(linen.relu(x))


def flax_linen(momentum=0.9):
    module = LinenModel(momentum)
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 64)))
    state = {"batch_stats": variables["batch_stats"]}

    def loss(weights, state, x, labels):
        variables = {"params": weights, **state}
        logits, new = module.apply(variables, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels), new

    return variables["params"], state, loss


def haiku_model(momentum=0.9, wrapped=True):
    def forward(x):
        x = haiku.Linear(WIDTH)(x)
        policy = mpx.Policy("float32", "float32", x.dtype)
        full = haiku.mixed_precision.push_policy(haiku.BatchNorm, policy)
        with full if wrapped else contextlib.nullcontext():
            x = haiku.BatchNorm(True, True, momentum)(x, is_training=True)
        return haiku.Linear(10)(jax.nn.relu(x))

    model = haiku.without_apply_rng(haiku.transform_with_state(forward))
    weights, state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((2, 64)))

    def loss(weights, state, x, labels):
        logits, new = model.apply(weights, state, x)
        return cross_entropy(logits, labels), new

    return weights, state, loss


WITH_STATISTICS = {
    "equinox_batch": equinox_batch_norm,
    "equinox_ema": functools.partial(equinox_batch_norm, "ema"),
    "flax_linen": flax_linen,
    "haiku": haiku_model,
}
FRAMEWORKS = {"plain_jax": plain_jax, **WITH_STATISTICS}


def policy_of(precision):
    return mpx.get_policy(f"params=float32,compute={precision},output=float32")


def train(build, precision):
    model, state, loss = build()
    optimizer, scaling = optax.adam(1e-2), mpx.NoLossScaling()
    options = {"use_mixed_precision": precision != "float32", "has_aux": True}
    options["policy"] = policy_of(precision)
    if precision == "float16":
        scaling = mpx.DynamicLossScaling(2.0**15, period=20)

    @eqx.filter_jit
    def step(model, state, opt_state, scaling, x, labels):
        inputs = (x, labels) if state is None else (state, x, labels)
        result = mpx.filter_value_and_grad(loss, scaling, **options)(model, *inputs)
        model, *rest = mpx.optimizer_step(model, optimizer, opt_state, result)
        if state is not None:
            state = mpx.select_tree(result.finite, result.aux, state)
        return (model, state, *rest), result.value

    images, labels = digits()
    carry = (
        model,
        state,
        optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
        scaling,
    )
    losses = []
    for i in range(STEPS):
        rows = np.arange(i * BATCH, (i + 1) * BATCH) % len(images)
        carry, value = step(*carry, images[rows], labels[rows])
        losses.append(float(value))
    model, state, _, scaling = carry
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    assert {x.dtype.name for x in weights} == {"float32"}
    return np.array(losses), state, scaling


@pytest.mark.parametrize("name", slow_but(["plain_jax", "equinox_batch"], FRAMEWORKS))
def test_half_precision_reaches_the_float32_loss(name):
    runs = {precision: train(FRAMEWORKS[name], precision) for precision in PRECISIONS}
    full, expected, _ = runs.pop("float32")
    assert full[-10:].mean() < 0.5 * full[0]
    for half, state, _ in runs.values():
        assert np.isfinite(half).all()
        assert abs(half[-10:].mean() - full[-10:].mean()) < 0.05 * full[0]
        # The first loss is that of the same weights, rounded.
        assert half[0] == pytest.approx(full[0], rel=2e-2)
        for a, b in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
            assert a.dtype == b.dtype
            a, b = np.float64(a), np.float64(b)
            assert np.abs(a - b).max() <= 0.3 * np.abs(b).max() + 0.1
    assert int(runs["bfloat16"][2].skipped) == 0
    scaling = runs["float16"][2]
    assert int(scaling.skipped) < 10 and int(scaling.steps) == STEPS


def gradient(loss, precision, *args):
    @eqx.filter_jit
    def step(scaling, *args):
        options = {"has_aux": True, "policy": policy_of(precision)}
        return mpx.filter_grad(loss, scaling, **options)(*args)

    return step(mpx.NoLossScaling(), *args)


def numbers(state):
    leaves = [np.ravel(x) for x in jax.tree.leaves(state) if eqx.is_inexact_array(x)]
    assert {x.dtype.name for x in leaves} == {"float32"}
    return np.concatenate(leaves)


@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    [
        ("equinox_batch", "float16", 1e-5),
        ("equinox_ema", "bfloat16", 1e-4),
        ("flax_linen", "float16", 1e-5),
        ("haiku", "bfloat16", 1e-4),
    ],
)
def test_statistics_go_through_a_half_precision_loss(name, precision, tolerance):
    """With a momentum of 0.999 a step is small, and lost where they are cast (MPX)."""
    model, state, loss = WITH_STATISTICS[name](momentum=0.999)
    images, labels = (x[:BATCH] for x in digits())
    plain = eqx.filter_jit(loss)
    _, state = plain(model, state, images, labels)  # the first fills empty statistics
    state = jax.tree.map(lambda x: x + 1 / 3 if eqx.is_inexact_array(x) else x, state)
    result = gradient(loss, precision, model, state, images, labels)
    _, expected = plain(model, state, images, labels)
    before, after, expected = (numbers(s) for s in (state, result.aux, expected))
    rounded = np.float32(before.astype(jnp.dtype(precision)))
    assert np.abs(rounded / before - 1).max() > 3 * tolerance  # so that it can fail
    np.testing.assert_allclose(after, expected, rtol=tolerance)
    assert (after != before).any()


@pytest.mark.parametrize("mode,precision", [("batch", "float16"), ("ema", "bfloat16")])
def test_equinox_batch_norm_on_good_and_bad_steps(mode, precision):
    """The state comes back as aux, and a skipped step keeps the one from before."""
    model, state, loss = equinox_batch_norm(mode)

    @eqx.filter_jit
    def step(model, state, scaling, *batch):
        gradient = mpx.filter_grad(loss, scaling, has_aux=True)
        scaling, finite, grads, new = gradient(model, state, *batch)
        return mpx.select_tree(finite, new, state), scaling, grads

    images, labels = (x[:BATCH].copy() for x in digits())
    with mpx.half_precision(precision):
        scaling = mpx.DynamicLossScaling(2.0**8)
        good, scaling, grads = step(model, state, scaling, images, labels)
        images[3, 5] = np.inf
        bad, scaling, _ = step(model, good, scaling, images, labels)
    assert (numbers(good) != numbers(state)).any()
    assert_same_bits(bad, good)
    assert int(scaling.skipped) == 1
    norm = grads.norm if mode == "ema" else grads.layers[1]
    assert norm.weight.dtype == np.float32 and np.any(norm.weight)


@pytest.mark.slow
def test_equinox_batch_norm_in_ema_mode_must_be_wrapped():
    """It selects between statistics of the batch, half, and running ones, float32."""
    model, state, loss = equinox_batch_norm("ema", wrapped=False)
    images, labels = (x[:BATCH] for x in digits())
    gradient = mpx.filter_grad(loss, mpx.NoLossScaling(), has_aux=True)
    with pytest.raises(TypeError, match="select.*float32, float16"):
        gradient(model, state, images, labels)


def test_haikus_own_average_of_half_precision_statistics_is_wrong():
    """It computes in the input's dtype, where 0.999 is 1; the guide warns of it."""
    model, state, loss = haiku_model(momentum=0.999, wrapped=False)
    images, labels = (x[:BATCH] for x in digits())
    result = gradient(loss, "bfloat16", model, state, images, labels)
    assert bool(result.finite) and not np.isfinite(numbers(result.aux)).all()


def test_nnx_is_refused_with_a_way_out():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    fun = lambda model, x: model(x).astype(jnp.float32).mean()  # noqa: E731
    with pytest.raises(TypeError, match="Use `mpx.nnx.value_and_grad`.*nnx.split"):
        mpx.filter_grad(fun, mpx.NoLossScaling())(model, jnp.ones(2))
    graph, weights = nnx.split(model)
    split = lambda weights, x: fun(nnx.merge(graph, weights), x)  # noqa: E731
    assert mpx.filter_grad(split, mpx.NoLossScaling())(weights, jnp.ones(2)).finite


# --- Recipes, of which the models know nothing ----------------------------------------

CLASSES = 4


def classes():
    random = np.random.default_rng(0)
    x = random.normal(size=(64, WIDTH)).astype(np.float32)
    labels = (x @ random.normal(size=(WIDTH, CLASSES))).argmax(-1)
    return jnp.asarray(x), jnp.asarray(labels, jnp.int32)


def equinox_mlp():
    model = eqx.nn.MLP(WIDTH, CLASSES, WIDTH, 2, key=jax.random.key(1))
    names = [f"layers[{i}].weight" for i in range(2)]
    return model, lambda m, x, y: cross_entropy(jax.vmap(m)(x), y), names


class LinenPerceptron(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = linen.relu(linen.Dense(WIDTH)(x))
        return linen.Dense(CLASSES)(x)


def linen_mlp():
    model = LinenPerceptron()
    params = jax.jit(model.init)(jax.random.key(1), classes()[0])
    names = [f"['params']['Dense_{i}']['kernel']" for i in range(2)]
    return params, lambda p, x, y: cross_entropy(model.apply(p, x), y), names


def haiku_mlp():
    mlp = haiku.transform(lambda x: haiku.nets.MLP([WIDTH, WIDTH, CLASSES])(x))
    model = haiku.without_apply_rng(mlp)
    params = jax.jit(model.init)(jax.random.key(1), classes()[0])
    names = [f"['mlp/~/linear_{i}']['w']" for i in range(2)]
    return params, lambda p, x, y: cross_entropy(model.apply(p, x), y), names


MODELS = {"equinox": equinox_mlp, "linen": linen_mlp, "haiku": haiku_mlp}
TRAINED = [("linen", "delayed"), ("equinox", "mxfp8"), ("haiku", "delayed")]


def assert_learns(step, carry):
    losses = []
    for _ in range(8):
        carry, value = step(*carry)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    scales = getattr(carry[-1], "scales_by_weight", dict)()
    assert all((x != 1).all() for x in scales.values())
    return carry[-1]


@pytest.mark.parametrize(("name", "recipe"), slow_but(TRAINED[:1], TRAINED))
def test_a_model_trains_with_a_recipe(name, recipe):
    model, func, names = MODELS[name]()
    loss, batch = mpx.autocast(func, recipe=RECIPES[recipe]), classes()
    scaling = mpx.init_scaling(loss, model, *batch)
    if recipe == "delayed":
        found = [slot.split(" (")[0] for slot in scaling.scales_by_weight()]
        assert found == names
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, scaling):
        result = mpx.filter_value_and_grad(loss, scaling)(model, *batch)
        return mpx.optimizer_step(model, optimizer, state, result), result.value

    scaling = assert_learns(step, (model, state, scaling))
    assert int(scaling.steps) == 8 and int(scaling.skipped) == 0


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
def test_an_nnx_model_trains_with_a_recipe(recipe):
    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    batch = classes()

    @mpx.autocast(recipe=RECIPES[recipe])
    def loss(model, x, labels):
        return cross_entropy(model(x), labels)

    scaling = mpx.init_scaling(loss, model, *batch)
    before = model.norm.mean[...]

    @nnx.jit
    def jitted(model, optimizer, scaling):
        result = mpx.nnx.value_and_grad(loss, scaling)(model, *batch)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return (result.scaling,), result.value

    scaling = assert_learns(lambda s: jitted(model, optimizer, s), (scaling,))
    assert (model.norm.mean[...] != before).any()
    if recipe == "delayed":
        assert len(scaling.scales_by_weight()) == 2
