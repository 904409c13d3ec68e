"""Products under a recipe read the 8 bits of stored weights; steps write them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx.quantization import dequantize_weights, quantize, quantize_weights

from ..helpers import assert_same_bits, slow_but, unscaled

pytestmark = unscaled

SIZE, LAYERS = 128, 3
X = jax.random.normal(jax.random.key(2), (16, SIZE))
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*"))
READ = "the stored weight is read without quantizing it again"
NONE = mpx.NoLossScaling()


def stored_of(*shape, dtype="float32", format=mpx.Format.E4M3):
    """A weight whose largest number is not that of the format.

    Quantized again by its own amax, it would be other numbers.
    """
    w = jnp.asarray(np.random.default_rng(0).normal(size=shape) / 12, dtype)
    quantizer = mpx.quantization.TensorQuantizer(format)
    (stored,) = quantize_weights([w], quantizer)
    quantized = quantize(w, quantizer, scale=157.0)
    return {"w": dataclasses.replace(stored, quantized=quantized)}


CURRENT = mpx.Float8CurrentScaling()
RECIPES = {"current": CURRENT, "delayed": mpx.DelayedScaling(warm_start=True)}


def layer(x, w):
    return x + jnp.tanh(x @ w)


barrier = jax.lax.optimization_barrier
SQUARE, STACK = (SIZE, SIZE), (LAYERS, SIZE, SIZE)


def reshaped(w, x):
    x = jnp.einsum("bi,ihd->bhd", x, w).reshape(16, -1)
    return x @ w.reshape(SIZE, SIZE)


def in_a_loop(w, x):
    return jax.lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0]


def over_a_stack(w, x):
    return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0]


# How a program may come to the weight that a product reads.
PROGRAMS = {
    "plain": (SQUARE, lambda w, x: x @ w),
    "transposed": (SQUARE, lambda w, x: x @ w.T),
    "reshaped": ((SIZE, 8, SIZE // 8), reshaped),
    "cast": (SQUARE, lambda w, x: x @ w.astype(jnp.bfloat16).astype(x.dtype)),
    "jitted": (SQUARE, lambda w, x: jax.jit(layer)(x, w)),
    "recomputed": (SQUARE, lambda w, x: jax.checkpoint(layer)(x, w)),
    "chosen": (
        SQUARE,
        lambda w, x: jax.lax.cond(x[0, 0] > 9, lambda x, w: x @ w, layer, x, w),
    ),
    "in a loop": (SQUARE, in_a_loop),
    "a loop over a stack": (STACK, over_a_stack),
    "slices of a stack": (STACK, lambda w, x: layer(layer(x, w[0]), w[2])),
    "behind a barrier": (SQUARE, lambda w, x: x @ barrier((x, w))[1]),
}


def step_of(name, recipe, dtype="float32"):
    @functools.partial(mpx.autocast, dtype=dtype, recipe=recipe, rules=EVERY)
    def loss(model, x):
        return jnp.mean(PROGRAMS[name][1](model["w"], x) ** 2)

    def step(scaling, model, x):
        return mpx.filter_value_and_grad(loss, scaling)(model, x)

    return loss, jax.jit(step)


def but_for_weights(role, leg):
    if role is mpx.quantization.Role.WEIGHT:
        return None
    return CURRENT.quantizer(role, leg=leg)


EACH = [*zip(itertools.cycle(RECIPES), PROGRAMS, strict=False)]
EACH.append(("delayed", "a loop over a stack"))


@pytest.mark.parametrize(("recipe", "name"), slow_but([("current", "reshaped")], EACH))
def test_products_read_the_stored_numbers_as_they_are(name: str, recipe: str):
    model = stored_of(*PROGRAMS[name][0])
    loss, step = step_of(name, RECIPES[recipe])
    scaling = mpx.init_scaling(loss, model, X)
    # Of data and gradients a warm start makes in its first step what current scaling
    # does. A cast of the program's own is of the weight, not of its 8 bits.
    other = "plain" if name == "cast" else name
    _, expected = step_of(other, mpx.CustomRecipe(but_for_weights))
    found = step(scaling, model, X)
    plain = dequantize_weights(model)
    wanted = expected(NONE, plain, X)
    np.testing.assert_allclose(found.value, wanted.value, rtol=2e-5)
    again = step(scaling, plain, X)
    off = lambda result: jnp.linalg.norm(result.grads["w"] - wanted.grads["w"])  # noqa: E731
    # A rounding or two may turn around; the gradient goes through the program's cast.
    assert off(found) < (0.5 if name == "cast" else 0.02) * off(again)
    assert found.grads["w"].dtype == model["w"].dtype


def test_gradients_of_micro_batches_are_of_the_stored_numbers():
    model, x = stored_of(*SQUARE, dtype="bfloat16"), X.astype(jnp.bfloat16)
    loss, step = step_of("plain", CURRENT, "bfloat16")
    whole = step(NONE, model, x).grads["w"]
    part = mpx.filter_grad(loss, NONE, accumulate=2)(model, x)
    difference = (part.grads["w"] - whole).astype(jnp.float32)
    assert jnp.linalg.norm(difference) < 0.1 * jnp.linalg.norm(whole)
    plain = step(NONE, dequantize_weights(model), x)
    assert whole.dtype == plain.grads["w"].dtype


@pytest.mark.slow
def test_a_frozen_base_is_read_as_it_is_stored():
    def func(adapter, base, x):
        return jnp.mean((x @ base["w"] + (x @ adapter["a"]) @ adapter["b"]) ** 2)

    adapter = {"a": jnp.ones((SIZE, 4)) / 16, "b": jnp.ones((4, SIZE)) / 16}
    base, found = stored_of(*SQUARE), []
    for recipe in (CURRENT, mpx.CustomRecipe(but_for_weights)):
        loss = mpx.autocast(func, "float32", recipe=recipe, weights=(0, 1), rules=EVERY)
        found.append(mpx.filter_grad(loss, NONE)(adapter, base, X).grads)
        base = dequantize_weights(base)
    np.testing.assert_allclose(found[0]["b"], found[1]["b"], rtol=0.05, atol=1e-3)


def test_explain_says_that_the_stored_numbers_are_read():
    def are_read(model, recipe):
        operations = mpx.explain(step_of("plain", recipe)[0])(model, X).operations
        return {READ in o.reason for o in operations if o.is_low}

    stored = stored_of(*SQUARE)
    assert are_read(stored, CURRENT) == {True}
    for recipe in (mpx.MXFP8BlockScaling(), mpx.Float8BlockScaling()):
        assert are_read(stored, recipe) == {False}
    others = stored_of(*SQUARE, format=mpx.Format.E5M2), dequantize_weights(stored)
    for other in others:
        assert are_read(other, CURRENT) == {False}


OTHERS = [mpx.MXFP8BlockScaling(), mpx.CustomRecipe(but_for_weights)]


@pytest.mark.parametrize("recipe", OTHERS)
def test_other_recipes_quantize_what_is_dequantized(recipe):
    model, (_, step) = stored_of(*SQUARE), step_of("plain", recipe)
    found, expected = (step(NONE, m, X) for m in (model, dequantize_weights(model)))
    assert_same_bits(found.grads, expected.grads)


def test_what_jax_traces_on_the_way_is_quantized_as_other_weights_are():
    model, (loss, _) = stored_of(*SQUARE), step_of("plain", CURRENT)
    hidden = jax.jit(loss)
    gradient = lambda m: mpx.filter_grad(hidden, NONE)(m, X).grads  # noqa: E731
    assert_same_bits(*map(gradient, (model, dequantize_weights(model))))
    # Where nothing differentiates, the weight itself goes through `jax.jit`.
    assert_same_bits(hidden(model, X), jax.jit(lambda *args: loss(*args))(model, X))


def test_delayed_scaling_learns_the_scale_of_the_storage():
    model, (loss, step) = stored_of(*SQUARE), step_of("plain", mpx.DelayedScaling())
    scaling = mpx.init_scaling(loss, model, X)
    result = step(scaling, model, X)
    (use,) = result.scaling.quantized
    scales = result.scaling.state_dict()["slots"][str(use)]["scale"]
    np.testing.assert_allclose(scales[1], 157.0, rtol=1e-6)
    # That of the state has no say, whatever it is.
    later = step(result.scaling, model, X * 4)
    (slot,) = later.scaling.state_dict()["slots"].values()
    np.testing.assert_allclose(slot["scale"][1], 157.0, rtol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_computes_with_the_numbers_of_training(recipe: str):
    model = stored_of(*STACK)
    loss, step = step_of("a loop over a stack", RECIPES[recipe])
    scaling = mpx.init_scaling(loss, model, X)
    scaling = step(scaling, model, X).scaling
    value = jax.jit(lambda s, m, x: mpx.inference(loss, s)(m, x))(scaling, model, X)
    np.testing.assert_allclose(value, step(scaling, model, X).value, rtol=1e-6)


def test_devices_gather_the_stored_numbers():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    loss, one_device = step_of("plain", CURRENT)
    model = stored_of(*SQUARE)

    def place(spec):
        layout = lambda a: NamedSharding(mesh, spec if a.ndim > 1 else P())  # noqa: E731
        return jax.tree.map(layout, model)

    def step(model, x):
        model = jax.lax.with_sharding_constraint(model, place(P()))
        return mpx.filter_grad(loss, mpx.NoLossScaling())(model, x).grads

    lying = jax.tree.map(jax.device_put, model, place(P("data")))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    compiled = jax.jit(step).lower(lying, x).compile()
    found = compiled(lying, x)["w"]
    wanted = one_device(NONE, model, X).grads["w"]
    assert jnp.linalg.norm(found - wanted) < 2e-2 * jnp.linalg.norm(wanted)
    text = compiled.as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    # XLA:CPU has no collectives of 8 bits, and gathers them as float16.
    assert gathered and all("= f16[128,128]" in line for line in gathered)


def test_devices_that_share_a_batch_read_the_same_numbers():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model, (loss, step) = stored_of(*SQUARE), step_of("plain", CURRENT)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def shared(model, x):
        grads = mpx.filter_grad(loss, mpx.NoLossScaling())(model, x).grads
        return jax.tree.map(lambda g: g / 8, grads)

    found, wanted = shared(model, X)["w"], step(NONE, model, X).grads["w"]
    assert jnp.linalg.norm(found - wanted) < 2e-2 * jnp.linalg.norm(wanted)
