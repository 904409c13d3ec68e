"""Layers of `mpx.nn` obey the recipe of the context that they are called in."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx.nn

from ..autocast.counting import equations
from ..helpers import slow_but
from ..low_precision import low_dtypes, quantized_products
from ..registries import STATELESS

HIDDEN = 32
CURRENT = mpx.Float8CurrentScaling()
# The last product of a function, too, as in a layer on its own.
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*"))


def ambient(recipe=CURRENT, **options):
    return mpx.autocast(recipe=recipe, ambient=True, **options)


def linear(seed=0, size=HIDDEN, **options):
    return mpx.nn.Linear(HIDDEN, size, key=jax.random.key(seed), **options)


# How many products of weights there are in a layer.
LAYERS = {
    "Linear": (lambda key: mpx.nn.Linear(HIDDEN, 48, key=key), 1),
    "MultiheadAttention": (
        lambda key: mpx.nn.MultiheadAttention(HIDDEN, 4, num_gqa_groups=2, key=key),
        4,
    ),
    "TransformerLayer": (
        lambda key: mpx.nn.TransformerLayer(HIDDEN, 64, 4, gated_mlp=True, key=key),
        7,
    ),
}


@pytest.fixture
def x(getkey):
    return jax.random.normal(getkey(), (2, 8, HIDDEN), jnp.bfloat16)


def call(layer, x):
    return layer(x)


def loss(layer, x):
    return mpx.nn.mean(layer(x) ** 2, dtype="float32")


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Linear", "float32"),
        ("MultiheadAttention", "bfloat16"),
        pytest.param("TransformerLayer", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_layer_transforms_its_own_call(name, dtype, x, getkey):
    make, count = LAYERS[name]
    layer, x = make(getkey()), x.astype(dtype)
    assert quantized_products(call, layer, x) == 0
    with ambient():
        assert quantized_products(call, layer, x) == count
        found = jax.jit(call)(layer, x)
    assert found.dtype == x.dtype
    transformed = mpx.autocast(call, recipe=CURRENT, rules=EVERY)
    assert equal(found, jax.jit(transformed)(layer, x))
    half = np.float32(jax.jit(call)(layer, x.astype(jnp.bfloat16)))
    error = np.abs(np.float32(found) - half).max() / np.abs(half).max()
    assert 0 < error < 0.1


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_both_products_of_attention_are_quantized_by_fp8_dpa(implementation, x, getkey):
    options = {"implementation": implementation, "key": getkey()}
    layer = mpx.nn.MultiheadAttention(HIDDEN, 4, **options)
    with ambient(mpx.MXFP8BlockScaling(fp8_dpa=True)):
        assert quantized_products(call, layer, x) == 4 + 2


@pytest.mark.parametrize("name", slow_but(["current"], STATELESS))
def test_every_recipe_without_a_state(name, x):
    layer, recipe = linear(), STATELESS[name]
    expected = jax.jit(jax.grad(loss))(layer, x).weight
    with ambient(recipe):
        assert quantized_products(call, layer, x) == 1
        found = jax.jit(jax.grad(loss))(layer, x).weight
    error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
    assert 1e-3 < error < (0.25 if name in ("nvfp4", "custom") else 0.08)


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["float16", "bfloat16"]))
def test_half_precision_inputs_keep_their_dtype(dtype, x, getkey):
    layer, _ = LAYERS["TransformerLayer"]
    # A CPU with units for bfloat16 emulates products in it.
    with ambient(dtype=jnp.float16, target="cpu"):
        jaxpr = jax.make_jaxpr(layer(getkey()))(x.astype(dtype))
    found = {str(v.aval.dtype) for e, _ in equations(jaxpr) for v in e.outvars}
    assert found & {"float16", "bfloat16"} == {dtype}


def test_switched_off_inside(x):
    layer, run = linear(), jax.jit(call)
    plain = run(layer, x)
    with ambient():
        quantized = run(layer, x)
        with mpx.autocast(recipe=None, ambient=True):
            assert equal(run(layer, x), plain)
        with mpx.autocast(enabled=False, ambient=True):
            assert equal(run(layer, x), plain)
            assert low_dtypes(call, layer, x) == set()
        assert equal(run(layer, x), quantized)
    assert equal(layer(x), plain) and not equal(quantized, plain)


def test_ambient_settings_without_a_recipe_change_no_layer(x):
    layer = linear()
    with mpx.autocast(dtype=jnp.float16, ambient=True):
        text = str(jax.make_jaxpr(layer)(x))
    assert text == str(jax.make_jaxpr(layer)(x))


OUTER, INNER = mpx.Float8CurrentScaling(mpx.Format.E4M3), mpx.NVFP4BlockScaling()


def nested(layers, x, context=ambient):
    with context(OUTER):
        x = layers[0](x)
        with context(INNER):
            x = layers[1](x)
            with context(None):
                x = layers[2](x)
        return layers[3](x)


def with_regions(layers, x):
    return nested(layers, x, lambda recipe: mpx.autocast(recipe=recipe))


@pytest.mark.slow
def test_the_inner_context_wins(x):
    layers = [linear(seed) for seed in range(4)]
    recipes = [OUTER, INNER, None, OUTER]
    assert quantized_products(nested, layers, x) == 3

    def expected(layers, x):
        for layer, recipe in zip(layers, recipes, strict=True):
            x = mpx.autocast(call, recipe=recipe)(layer, x) if recipe else layer(x)
        return x

    def gradient(func):
        return jax.jit(jax.grad(lambda layers: loss(lambda x: func(layers, x), x)))

    found, wanted = map(gradient, (nested, expected))
    assert equal(found(layers), wanted(layers))


def test_what_is_compiled_in_one_context_is_not_used_in_another(x):
    traces = []

    @jax.jit
    def func(layer, x):
        traces.append(1)
        return layer(x)

    layer = linear()
    plain = func(layer, x)
    for _ in range(2):
        with ambient():
            assert not equal(func(layer, x), plain)
        assert equal(func(layer, x), plain)
    assert len(traces) == 2


# --- In a function that is being transformed ------------------------------------------


def test_in_a_transformed_function_the_function_decides(x):
    layers = [linear(seed) for seed in range(3)]

    def func(layers, x):
        return layers[2](layers[1](layers[0](x)))

    with ambient():
        once = mpx.autocast(func)
        assert quantized_products(once, layers, x) == 2
        assert quantized_products(mpx.autocast(func, recipe=None), layers, x) == 0
        found = jax.jit(once)(layers, x)
    assert equal(found, jax.jit(mpx.autocast(func, recipe=CURRENT))(layers, x))


def test_contexts_in_a_transformed_function_are_regions(x):
    """So a program that is written with contexts may be transformed, too."""
    layers = [linear(seed) for seed in range(4)]
    found, expected = (mpx.autocast(f, rules=EVERY) for f in (nested, with_regions))
    assert quantized_products(found, layers, x) == 3
    assert equal(jax.jit(found)(layers, x), jax.jit(expected)(layers, x))


def test_a_region_in_a_context_wins(x):
    def func(layer, x):
        with ambient(), mpx.autocast(recipe=None):
            return layer(x)

    assert quantized_products(mpx.autocast(func), linear(), x) == 0


def test_rules_of_a_context_are_not_for_the_function_around(x):
    rules = mpx.Rules(mpx.Rule(mpx.Precision.FULL, primitive="dot_general"))

    def func(layer, x):
        with mpx.autocast(rules=rules, ambient=True):
            return layer(x)

    programs = [jax.make_jaxpr(mpx.autocast(f))(linear(), x) for f in (func, call)]
    assert str(programs[0]) == str(programs[1])


# --- State ----------------------------------------------------------------------------


def test_a_recipe_with_a_state_needs_a_transformed_function(x):
    layer, match = linear(), r"mpx.nn.Linear(?s:.*)mpx.init_scaling\(loss"
    with ambient(mpx.DelayedScaling()), pytest.raises(ValueError, match=match):
        layer(x)
    rules = mpx.Rules(mpx.Rule(mpx.DelayedScaling(), primitive="dot_general"))
    with ambient(CURRENT, rules=rules):
        with pytest.raises(ValueError, match="has a state for each weight"):
            layer(x)


def test_contexts_with_a_state_in_a_transformed_function(x):
    first = mpx.DelayedScaling(fp8_format=mpx.Format.E4M3, amax_history_len=2)
    second = mpx.DelayedScaling(amax_history_len=4)

    @mpx.autocast()
    def loss(layers, x):
        with ambient(first):
            hidden = layers[0](x)
        with ambient(second):
            return mpx.nn.mean(layers[2](layers[1](hidden)), dtype="float32")

    layers = [linear(seed) for seed in range(3)]
    scaling = mpx.init_scaling(loss, layers, x)
    assert isinstance(scaling, mpx.quantization.RecipeScaling)
    assert {s.recipe for s in scaling.scales} == {first, second}
    result = jax.jit(lambda s, *a: mpx.filter_grad(loss, s)(*a))(scaling, layers, x)
    assert float(result.finite)
    changed = result.scaling.scales_by_weight()
    amax = jnp.abs(layers[1].weight).max()  # of the parameter, before it is rounded
    (scale,) = (s[1] for name, s in changed.items() if name.startswith("[1].weight"))
    np.testing.assert_allclose(scale, 448 / amax, rtol=1e-6)


# --- Transforms of JAX ----------------------------------------------------------------

TRANSFORMS = {
    "remat": lambda layer, x: jax.checkpoint(call)(layer, x),
    "scan": lambda layer, x: jax.lax.scan(lambda c, x: (c, layer(x)), 0, x)[1],
    "vmap": lambda layer, x: jax.vmap(layer)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name, x):
    func, layer, recipe = TRANSFORMS[name], linear(), mpx.MXFP8BlockScaling()
    with ambient(recipe):  # blocks lie in rows, so it does not matter how they come
        found = jax.jit(func)(layer, x)
        expected = jax.jit(call)(layer, x)
    assert quantized_products(func, layer, x) == 0
    assert equal(found, expected)


def test_a_row_alone_is_refused(x):
    with ambient(), pytest.raises(ValueError, match="found no weight matmul.*jax.vmap"):
        jax.vmap(linear())(x[0])


def test_explicit_mixed_precision(x):
    """The gradient function casts the weights, and the layer quantizes."""
    layer, x = linear(use_bias=False), x.astype(jnp.float32)
    scaling = mpx.NoLossScaling()
    with mpx.half_precision("bfloat16"):
        grad = jax.jit(lambda s, *args: mpx.filter_grad(loss, s)(*args).grads)
        plain = grad(scaling, layer, x)
        with ambient():
            found = grad(scaling, layer, x)
    assert found.weight.dtype == jnp.float32
    error = jnp.linalg.norm(found.weight - plain.weight)
    assert 1e-3 < error / jnp.linalg.norm(plain.weight) < 0.08


def test_a_layer_is_still_a_tree(x):
    layer = linear()
    with ambient():
        doubled = jax.tree.map(lambda p: 2 * p, layer)
        assert isinstance(doubled, mpx.nn.Linear) and doubled(x).shape == x.shape
        assert eqx.filter_jit(layer)(x).shape == x.shape
