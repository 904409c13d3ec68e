"""Autocast of functions of NNX modules, by itself and in a training step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
import mpx.nnx
from tests.helpers import slow_but

from .cases import (
    MODELS,
    Normed,
    Tied,
    assert_equal,
    batch,
    compiled,
    full_step,
    loss_fn,
    make,
    numbers,
    plain_step,
)

pytestmark = pytest.mark.third_party

HALF = {"bfloat16": (jnp.bfloat16, 0.05), "float16": (jnp.float16, 5e-3)}
CASES = [
    ("scanned", "bfloat16"),
    ("tied", "bfloat16"),
    ("normed", "float16"),
    ("convolutional", "float16"),
]
PLAIN_STEP = nnx.jit(plain_step)


def plain_loss(model, x, y):
    """Without one call of mpx."""
    prediction = model(x)
    return jnp.mean((prediction - y) ** 2), prediction


PLAIN_LOSS = nnx.jit(plain_loss)


def products(func, *args):
    text = str(jax.make_jaxpr(func)(*args))
    kinds = re.compile(r":(\w+)\[[^\]]*\] = (?:dot_general|conv_general_dilated)")
    return [match.group(1) for match in kinds.finditer(text)]


def half_step(dtype):
    @nnx.jit
    def step(model, optimizer, scaling, x, y):
        loss = mpx.autocast(plain_loss, dtype)
        result = mpx.nnx.value_and_grad(loss, scaling, has_aux=True)(model, x, y)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return result.value, result.aux, result.grads, result.scaling

    return step


@pytest.mark.parametrize(("name", "half"), slow_but(CASES[:2], CASES))
def test_a_training_step_of_autocast(name, half):
    dtype, tolerance = HALF[half]
    scaling, step = mpx.DynamicLossScaling(2.0**10), half_step(dtype)

    (a, optimizer_a), (b, optimizer_b) = make(name), make(name)
    expected = PLAIN_STEP(a, optimizer_a, None, *batch(0))
    got = step(b, optimizer_b, scaling, *batch(0))
    assert int(got[3].steps) == 1 and int(got[3].skipped) == 0
    assert_equal(got[:3], expected[:3], tolerance)
    assert got[0] != expected[0]  # something was rounded
    states = (nnx.state((b, optimizer_b)), nnx.state((a, optimizer_a)))
    rest = [nnx.filter_state(state[0], nnx.Not(nnx.Param)) for state in states]
    assert_equal(*rest, tolerance)
    assert int(optimizer_b.step[...]) == 1
    # A bad step leaves everything as it was.
    before = jax.tree.map(jnp.copy, nnx.state((b, optimizer_b)))
    x, y = batch(1)
    *_, scaling = step(b, optimizer_b, got[3], x * jnp.inf, y)
    assert int(scaling.skipped) == 1
    assert_equal(nnx.state((b, optimizer_b)), before)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_not_cast_and_products_run_in_half_precision(name):
    model, _ = make(name)
    seen = set()

    def loss(model, x, y):
        seen.update(str(w.dtype) for w in jax.tree.leaves(nnx.state(model, nnx.Param)))
        seen.add(str(x.dtype))
        return plain_loss(model, x, y)[0]

    graphdef, state = nnx.split(model)

    def gradient(state, x, y):
        result = mpx.nnx.grad(mpx.autocast(loss), mpx.NoLossScaling())(
            nnx.merge(graphdef, state, copy=True), x, y
        )
        return jax.tree.leaves(result.grads)

    dtypes = products(gradient, state, *batch(0))
    assert seen == {"float32"} and len(dtypes) >= 3
    # A product may hand out float32; its operands are cast right before.
    text = str(jax.make_jaxpr(gradient)(state, *batch(0)))
    assert "bf16" in text and not re.search(r"f32\[[\d,]*\] f32.* = dot_general", text)


def test_weights_have_the_names_of_their_places():
    """Rules see the parameters, and not the statistics among them."""
    model, _ = make("normed")
    model.eval()
    asked = set()

    def note(candidate):
        asked.update(path for path in candidate.parameters if path)
        return False

    rules = mpx.Rules(
        mpx.Rule(mpx.Precision.FULL, when=note),
        mpx.Rule(mpx.Precision.FULL, parameter="layers[0].kernel"),
    )
    loss = mpx.autocast(plain_loss, rules=rules, strict=True)
    with pytest.raises(ValueError, match="when note"):
        loss(model, *batch(0))
    assert {"layers[0].kernel", "head.bias", "norm.scale", "mask"} <= asked
    assert not any("mean" in name or "calls" in name for name in asked)
    # A module that is the function itself has names, too.
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, parameter="head.kernel"))
    mpx.autocast(model, rules=rules, strict=True)(batch(0)[0])
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, parameter="other.kernel"))
    with pytest.raises(ValueError, match="other.kernel"):
        mpx.autocast(model, rules=rules, strict=True)(batch(0)[0])


def test_a_module_is_a_function():
    a, b = Normed(nnx.Rngs(0)), Normed(nnx.Rngs(0))
    x, _ = batch(0)
    expected = nnx.jit(lambda module, x: module(x))(a, x)
    got = nnx.jit(lambda module, x: mpx.autocast(module)(x))(b, x)
    assert_equal(got, expected, 0.05)
    assert_equal(nnx.state(b), nnx.state(a), 0.05)
    assert int(b.calls[...]) == 1


def test_structure_and_results_that_are_objects():
    def grow(model, x):
        model.other = nnx.Linear(4, 2, rngs=nnx.Rngs(1))
        model.cache = nnx.Cache(jnp.concatenate([model.cache[...], x]))
        model.mode = "changed"
        return model.other(x), model, model.other

    class Growing(nnx.Module):
        def __init__(self):
            self.cache = nnx.Cache(jnp.zeros((0, 4)))
            self.number = nnx.Variable(3)
            self.mode = "train"

    model = Growing()
    for size in (8, 16):
        y, itself, other = mpx.autocast(grow)(model, batch(0)[0])
        assert model.cache[...].shape == (size, 4)
    assert itself is model and other is model.other and y.dtype == jnp.float32
    assert model.mode == "changed" and model.number.get_value() == 3


def test_a_model_from_outside_may_be_read_but_not_changed():
    model, changing = Tied(nnx.Rngs(0)), Normed(nnx.Rngs(0))
    x, _ = batch(0)

    def evaluate(model, x):
        return model(x)

    got = jax.jit(lambda x: mpx.autocast(evaluate)(model, x))(x)
    assert_equal(got, model(x), 0.05)
    with pytest.raises(ValueError, match=r"outside the function.*args\[0\]\..*nnx.jit"):
        jax.jit(lambda x: mpx.autocast(evaluate)(changing, x))(x)
    assert int(changing.calls[...]) == 0 and changing(x).shape == (8, 1)


@pytest.mark.exhaustive
def test_options_of_the_gradient_functions():
    """Micro-batches and retries, as in the explicit style."""
    (a, _), (b, _) = make("normed"), make("normed")
    x, y = batch(0)
    for i in range(4):
        PLAIN_LOSS(a, x[i::4], y[i::4])
    options = {"has_aux": True, "accumulate": 4}
    loss = mpx.autocast(loss_fn)
    gradient = compiled(mpx.nnx.value_and_grad, loss, mpx.NoLossScaling(), **options)
    result = gradient(b, x, y)
    assert bool(result.finite)
    assert_equal(nnx.state(b), nnx.state(a), 0.05)
    scaling = mpx.DynamicLossScaling(2.0**24, max_loss_scaling=2.0**24)
    model, _ = make("normed")
    loss = mpx.autocast(loss_fn, jnp.float16)
    gradient = compiled(mpx.nnx.grad, loss, scaling, has_aux=True, retries=24)
    assert bool(gradient(model, x, y).finite) and int(model.calls[...]) == 1


@pytest.mark.slow
def test_training_in_half_precision_follows_full_precision():
    def train(step):
        model, optimizer = make("scanned")
        scaling, losses = mpx.DynamicLossScaling(2.0**15, period=20), []
        for seed in range(40):
            x, _ = batch(seed, 32)
            y = jnp.sin(x).sum(axis=1, keepdims=True)
            value, _, _, scaling = step(model, optimizer, scaling, x, y)
            losses.append(float(value))
        return np.array(losses), scaling

    full, _ = train(nnx.jit(full_step))
    mixed, scaling = train(half_step(jnp.float16))
    assert full[-5:].mean() < 0.6 * full[0]
    assert abs(mixed[-5:].mean() - full[-5:].mean()) < 0.05 * full[0]
    assert int(scaling.steps) == 40 and int(scaling.skipped) < 8
    assert numbers(scaling)  # it is a tree of arrays
