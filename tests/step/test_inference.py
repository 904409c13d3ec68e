"""`mpx.inference`: what is computed with a state is what the training computes."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx

from ..helpers import slow_but
from ..registries import RECIPES, STATELESS

ROWS, CLASSES = 64, 10
RECIPE = mpx.DelayedScaling(warm_start=True)


def mlp(sizes=(16, CLASSES, 32, 2), seed=0):
    return eqx.nn.MLP(*sizes, key=jax.random.key(seed))


def features(model, x):
    """Of the second layer, the last product of a function that returns them."""
    return jax.vmap(lambda x: model.layers[1](jax.nn.relu(model.layers[0](x))))(x)


def head(model, hidden):
    for layer in model.layers[2:]:
        hidden = jax.vmap(layer)(jax.nn.relu(hidden))
    return hidden


def predict(model, x):
    return head(model, features(model, x))


def loss(model, x, labels):
    return -jnp.mean(jax.nn.log_softmax(predict(model, x))[jnp.arange(ROWS), labels])


def as_in_training(model, x, labels):
    """The loss, and beside it what its own forward pass has computed."""
    hidden = features(model, x)
    logits = head(model, hidden)
    rows = jax.nn.log_softmax(logits)[jnp.arange(ROWS), labels]
    return -jnp.mean(rows), (hidden, logits)


def in_another_scope(model, x):
    with jax.named_scope("evaluation"):
        return predict(model, x)


def log_likelihood(model, x):
    """One number for each row, as a function that scores candidates returns it."""
    return jnp.max(jax.nn.log_softmax(predict(model, x)), axis=-1)


@pytest.fixture
def data():
    x = 3 * jax.random.normal(jax.random.key(1), (ROWS, 16))
    return x, jnp.arange(ROWS) % CLASSES


@pytest.fixture(params=slow_but([], ["delayed", *STATELESS]))
def trained(request, data):
    recipe, model = RECIPES[request.param], mlp()
    func = mpx.autocast(loss, recipe=recipe)
    scaling = mpx.init_scaling(func, model, *data)

    @eqx.filter_jit
    def step(scaling, model):
        scaling, _, grads = mpx.filter_grad(func, scaling)(model, *data)
        updates = jax.tree.map(lambda g: -0.1 * g, grads)
        return scaling, eqx.apply_updates(model, updates)

    for _ in range(2):
        scaling, model = step(scaling, model)
    return recipe, model, scaling


def test_logits_and_features_are_those_of_the_training_s_forward_pass(trained, data):
    recipe, model, scaling = trained
    x, labels = data

    def computed(func, *args):
        func = mpx.inference(mpx.autocast(func, recipe=recipe), scaling)
        return eqx.filter_jit(func)(model, *args)

    value, (hidden, logits) = computed(as_in_training, x, labels)
    assert value == computed(loss, x, labels)
    assert np.array_equal(computed(features, x), hidden)
    assert np.array_equal(computed(in_another_scope, x), logits)
    assert np.array_equal(computed(head, hidden), logits)
    expected = jnp.max(jax.nn.log_softmax(logits), axis=-1)
    assert np.allclose(computed(log_likelihood, x), expected, atol=1e-6)


@pytest.mark.parametrize("name", slow_but(["current"], ["current", "nvfp4"]))
def test_logits_are_those_of_the_training_without_a_state_too(name, data):
    """Of a recipe that needs none: the final projection is the same product."""
    x, labels = data
    wrap = functools.partial(mpx.autocast, recipe=RECIPES[name])
    logits = wrap(as_in_training)(mlp(), x, labels)[1][1]
    assert np.array_equal(wrap(predict)(mlp(), x), logits)


def is_as_in_training(loss, func, model, x, recipe):
    train = mpx.autocast(loss, recipe=recipe)
    scaling = mpx.init_scaling(train, model, x)
    alone = mpx.inference(mpx.autocast(func, recipe=recipe), scaling)
    assert np.array_equal(alone(model, x), mpx.inference(train, scaling)(model, x)[1])


@pytest.mark.slow
def test_a_generator_samples_as_its_discriminator_saw_it(data):
    """Its last product goes into others in the training, and into none alone."""
    x, _ = data
    both = {"generator": mlp(), "judge": mlp((CLASSES, 1, 32, 2), 2)}

    def generated(both, noise):
        return jax.vmap(both["generator"])(noise)

    def judged(both, noise):
        fake = generated(both, noise)
        return jnp.mean(jax.nn.softplus(-jax.vmap(both["judge"])(fake))), fake

    is_as_in_training(judged, generated, both, x, mpx.Float8CurrentScaling())


@pytest.mark.slow
def test_a_scan_over_layers_is_evaluated_as_it_trains(data):
    x, _ = data
    weights = jax.random.normal(jax.random.key(3), (3, 16, 16)) / 4

    def features(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def loss(weights, x):
        last = features(weights, x)
        return jnp.sum(last @ weights[0]), last

    for recipe in (RECIPE, mpx.MXFP8BlockScaling()):
        is_as_in_training(loss, features, weights, x, recipe)


@pytest.mark.slow
def test_flax_nnx_predicts_as_it_trains(data):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 32, rngs=rngs)
            self.second = nnx.Linear(32, 32, rngs=rngs)
            self.last = nnx.Linear(32, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(self.second(jnp.tanh(self.first(x)))))

    def loss(net, x):
        logits = net(x)
        return jnp.mean(logits**2), logits

    net = Net(nnx.Rngs(0))
    is_as_in_training(loss, lambda net, x: net(x), net, data[0], RECIPE)


def test_a_state_of_another_model_is_refused(data):
    x, labels = data
    recipe = mpx.Float8CurrentScaling()
    scaling = mpx.init_scaling(mpx.autocast(loss, recipe=recipe), mlp(), x, labels)
    other = mpx.autocast(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], recipe=recipe)
    weights = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 4))}
    with pytest.raises(ValueError, match=r"state of this model.*layers\[0\].*'a'"):
        mpx.inference(other, scaling)(weights, x)


@pytest.mark.parametrize(
    ("recipe", "width", "depth"),
    [
        (RECIPE, 64, 2),
        (RECIPE, 32, 1),
        (RECIPE, 32, 3),
        (mpx.Float8CurrentScaling(), 32, 3),
    ],
)
def test_a_state_of_a_model_of_another_size_is_refused(data, recipe, width, depth):
    train = mpx.autocast(loss, recipe=recipe)
    state = mpx.init_scaling(train, mlp((16, CLASSES, width, depth)), *data)
    calls = [mpx.inference, mpx.filter_value_and_grad][: 1 + (recipe is RECIPE)]
    for call in calls:
        with pytest.raises(ValueError, match="state of this model; got .* made for"):
            call(train, state)(mlp(), *data)


def test_a_state_of_a_scan_of_another_length_is_refused():
    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return jnp.mean(x)

    func, x = mpx.autocast(loss, recipe=RECIPE), jnp.ones((4, 16))
    state = mpx.init_scaling(func, jnp.ones((3, 16, 16)), x)
    for call in (mpx.inference, mpx.value_and_grad):
        with pytest.raises(ValueError, match=r"the shape \(3, 16, 16\), which is \(2,"):
            call(func, state)(jnp.ones((2, 16, 16)), x)


def test_a_state_with_scales_for_more_weights_is_refused_in_training():
    """An evaluation may have no use for some of the weights."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    func = mpx.autocast(loss, recipe=RECIPE)
    x, w = jnp.ones((4, 16)), jnp.ones((16, 16))
    state = mpx.init_scaling(func, [w] * 4, x)
    with pytest.raises(ValueError, match=r"scales for `\[2\]`, which the function has"):
        mpx.value_and_grad(func, state)([w] * 2, x)
    mpx.inference(func, state)([w] * 2, x)


def test_a_function_without_the_recipe_is_refused(data):
    """It would be evaluated in float32, or in half precision."""
    args = mlp(), *data
    state = mpx.init_scaling(mpx.autocast(loss, recipe=RECIPE), *args)

    def traced(func):
        eqx.filter_eval_shape(mpx.inference(func, state), *args)

    with pytest.raises(ValueError, match="this one is not an autocast function"):
        traced(loss)
    with pytest.raises(ValueError, match="this one has no recipe"):
        traced(mpx.autocast(loss))
    traced(mpx.autocast(loss, recipe=RECIPE, enabled=False))
    traced(mpx.autocast(lambda model, x, _: 2 * x, recipe=RECIPE))  # no product


@pytest.mark.slow
def test_a_state_that_has_seen_no_step_is_a_warning(data):
    for recipe, warns in ((mpx.DelayedScaling(), True), (RECIPE, False)):
        func = mpx.autocast(loss, recipe=recipe)
        scaling = mpx.init_scaling(func, mlp(), *data)
        said = pytest.warns(UserWarning, match="before its first step")
        with said if warns else contextlib.nullcontext():
            eqx.filter_eval_shape(mpx.inference(func, scaling), mlp(), *data)
