"""Which arguments a recipe takes for weights: `weights=`, and what goes without it."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import slow_but
from ..registries import RECIPES
from .counting import pairs

SIZE, RANK, ROWS = 256, 8, 32
NONE = mpx.NoLossScaling()


class Adapted(eqx.Module):
    base: jax.Array
    down: jax.Array
    up: jax.Array

    def __call__(self, x):
        return jnp.tanh(x @ self.base + (x @ self.down) @ self.up)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])


def partitioned():
    layers = [
        Adapted(normal(i, SIZE, SIZE), normal(3 + i, SIZE, RANK), normal(6, RANK, SIZE))
        for i in range(2)
    ]
    model = {"layers": layers, "head": normal(9, SIZE, 64)}
    frozen = jax.tree.map(lambda _: False, model)
    where = lambda m: [x for layer in m["layers"] for x in (layer.down, layer.up)]  # noqa: E731
    spec = eqx.tree_at(where, frozen, [True] * 4)
    return eqx.partition(model, spec)


def loss(adapters, base, x):
    model = eqx.combine(adapters, base)
    for layer in model["layers"]:
        x = layer(x)
    return jnp.mean((x @ model["head"]) ** 2)


def products(func, *args):
    """Of each product of the function, whether it is quantized, and why not."""
    report = mpx.explain(func)(*args)
    found = [o for o in report.operations if o.primitive == "dot_general"]
    return [(o.is_low, o.reason) for o in found]


@pytest.mark.parametrize("name", slow_but(["mxfp8"], RECIPES))
def test_a_frozen_base_is_quantized_and_its_adapters_are_not(name):
    adapters, base = partitioned()
    x = normal(8, ROWS, SIZE)
    func = mpx.autocast(loss, recipe=RECIPES[name], weights=(0, 1))
    scaling = mpx.init_scaling(func, adapters, base, x)
    bases = [f"[1]['layers'][{i}].base" for i in range(2)]
    assert [use.parameter for use in scaling.quantized] == bases

    @jax.jit
    def run(scaling, *args):
        return mpx.filter_grad(func, scaling)(*args), jax.grad(loss)(*args)

    result, exact = run(scaling, adapters, base, x)
    assert result.grads["head"] is None
    bound = 0.5 if name in ("nvfp4", "custom") else 0.2
    for found, expected in pairs(result.grads, exact):
        assert jnp.linalg.norm(found - expected) < bound * jnp.linalg.norm(expected)


FROZEN = {"recipe": mpx.Float8CurrentScaling(), "weights": (0, 1)}


def test_an_adapter_is_too_narrow_unless_a_rule_quantizes_it():
    args = *partitioned(), normal(8, ROWS, SIZE)
    found = products(mpx.autocast(loss, **FROZEN), *args)
    assert sum(is_low for is_low, _ in found) == 2
    assert sum("too small to pay" in reason for _, reason in found) == 4
    low = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*down"))
    found = products(mpx.autocast(loss, rules=low, **FROZEN), *args)
    assert sum(is_low for is_low, _ in found) == 4


@pytest.mark.slow
def test_two_models_of_one_kind_have_scales_of_their_own():
    """Their weights have the same paths."""
    weights = [normal(i, 64, 64) for i in range(2)]

    def far_apart(first, second, x):
        a, b = (jnp.tanh(x @ w[0]) @ w[1] for w in (first, second))
        return jnp.mean((a - b) ** 2)

    func = mpx.autocast(far_apart, recipe=mpx.DelayedScaling(), weights=(0, 1))
    args = weights, [8 * w for w in weights], normal(5, ROWS, 64)
    scaling = mpx.init_scaling(func, *args)
    assert list(scaling.scales_by_weight()) == ["[0] (64x64)", "[1][0] (64x64)"]
    result = mpx.grad(func, scaling, argnums=(0, 1))(*args)
    first, second = result.scaling.amaxes_by_weight().values()
    assert np.isclose(second[1], 8 * first[1], rtol=0.01)


@pytest.mark.slow
def test_a_stopped_teacher_takes_the_scales_of_the_moment():
    """No gradient reaches it, so no amax comes back that scales could be made of."""
    weights = [normal(i, 64, 64) for i in range(2)]

    def distilled(student, teacher, x):
        a, b = (jnp.tanh(x @ w[0]) @ w[1] for w in (student, teacher))
        return jnp.mean((a - jax.lax.stop_gradient(b)) ** 2), b

    x = normal(5, ROWS, 64)
    results = []
    for recipe in (mpx.DelayedScaling(), mpx.Float8CurrentScaling()):
        func = mpx.autocast(distilled, recipe=recipe, weights=(0, 1))
        scaling = mpx.init_scaling(func, weights, weights, x)
        gradient = mpx.filter_value_and_grad(func, scaling, has_aux=True)
        # 2^-10 of numbers of size 1 is nothing in E4M3 with a scale of 1.
        small = [w / 1024 for w in weights]
        results.append(gradient(weights, small, x).aux)
    assert np.array_equal(*results)


@pytest.mark.slow
def test_a_batch_is_not_taken_for_the_weights():
    """`argnums` says what is differentiated, and the recipe goes by `weights`."""

    def last(x, labels, weights):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - labels) ** 2)

    weights = [normal(0, 64, 64), normal(1, 64, 4)]
    x, labels = normal(2, ROWS, 64), jnp.ones((ROWS, 4))
    recipe = mpx.Float8CurrentScaling()
    func = mpx.autocast(last, recipe=recipe)
    for gradient in (mpx.grad, mpx.value_and_grad):
        with pytest.raises(ValueError, match=r"differentiates argument 2.*weights=2"):
            gradient(func, NONE, argnums=2)(x, labels, weights)
    func = mpx.autocast(last, recipe=recipe, weights=2)
    assert sum(low for low, _ in products(func, x, labels, weights)) == 1
    grads = mpx.grad(func, NONE, argnums=2)(x, labels, weights).grads
    assert [g.shape for g in grads] == [w.shape for w in weights]
    # Without a recipe nothing hangs on it, and the gradient by data is no mistake.
    mpx.grad(mpx.autocast(last), NONE, argnums=2)(x, labels, weights)
    first = mpx.autocast(lambda w, x: last(x, labels, w), recipe=recipe, weights=0)
    by_data = mpx.grad(first, NONE, argnums=1)(weights, x).grads
    assert by_data.shape == x.shape


# --- The error that nothing is quantized ----------------------------------------------


CURRENT = mpx.Float8CurrentScaling()


@jax.custom_vjp
def _doubled(w, x):
    return 2 * (x @ w)


_doubled.defvjp(lambda w, x: (_doubled(w, x), None), lambda _, g: (g, g))
WIDE = jnp.ones((4, 4096))
ARGUMENTS = jnp.ones((32, 32)), jnp.ones((8, 32))


@pytest.mark.parametrize(
    ("func", "match"),
    [
        (
            lambda w, x: jnp.matmul(x, w, precision="highest"),
            r"1 of 1: the program sets the precision .*_weights.py:\d+\): omit `prec",
        ),
        (
            lambda w, x: jnp.tanh(x @ x.T) @ x @ x.T,
            r"3 of 3: an activation matmul .*computed from the arrays of argument `0`",
        ),
        (lambda w, x: x[0] @ w, "1 of 1: a matmul with a vector .*put `jax.vmap`"),
        (lambda w, x: x + jnp.sum(w @ w), "1 of 1: a matmul of weights only .*closes"),
        (_doubled, "1 of 1: a function with a custom derivative rule .*outside of it"),
        (lambda w, x: x[:, :4] @ WIDE * w[0, 0], "1 of 1: an activation matmul"),
        (lambda w, x: x[:, :4] @ jnp.tile(w[:4], 512), "its weight is too small to"),
        (lambda w, x: jnp.sum(x) * jnp.sum(w), "There is no matmul or convolution"),
        (
            lambda w, x: jnp.tanh(jnp.matmul(x, w, precision="highest")) @ x.T,
            "among 2 matmuls. 1 of 2: the program .* 1 of 2: an activation matmul",
        ),
    ],
)
def test_the_error_that_nothing_is_quantized_has_the_reasons(func, match):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(mpx.autocast(func, recipe=CURRENT), *ARGUMENTS)


def test_the_error_that_nothing_is_quantized_names_regions_rules_and_few_lines():
    def switched_off(w, x):
        with mpx.autocast(enabled=False):
            return x @ w

    def many(w, x):
        for factor in range(5):
            x = jnp.tanh(x @ x.T * factor) @ x
        return x

    half = mpx.Rules(mpx.Rule(mpx.Precision.HALF, primitive="dot_general"))
    for func, rules, match in (
        (switched_off, None, "1 of 1: a region with .*omit `enabled=F"),
        (lambda w, x: x @ w, half, "1 of 1: a rule of the user's.*change the"),
        (many, None, "10 of 10: an activation"),
    ):
        with pytest.raises(ValueError, match=match) as found:
            mpx.autocast(func, recipe=CURRENT, rules=rules)(*ARGUMENTS)
    assert len(str(found.value)) < 700


# --- One array that several products read is quantized once ---------------------------


TOKENS, TOKEN_WIDTH = 64, 32
SHORT = mpx.DelayedScaling(amax_history_len=4)
WEIGHTS = {"query": 1.0, "key": 2.0, "value": 4.0}


def attention(weights, x):
    query, key, value = (x @ weights[name] for name in WEIGHTS)
    return jnp.tanh(query * key) * value


def attention_loss(weights, x):
    return jnp.sum(attention(weights, jnp.tanh(x)) @ weights["out"])


@pytest.fixture(scope="module")
def attention_inputs():
    keys = jax.random.split(jax.random.key(0), 5)
    scales = {**WEIGHTS, "out": 1.0}
    weights = {
        name: scale * jax.random.normal(key, (TOKEN_WIDTH, TOKEN_WIDTH)) / 8
        for key, (name, scale) in zip(keys, scales.items(), strict=False)
    }
    return weights, jax.random.normal(keys[4], (TOKENS, TOKEN_WIDTH))


def compiled_step(func, recipe, *args):
    func = mpx.autocast(func, recipe=recipe)

    @jax.jit
    def step(scaling, *args):
        return mpx.filter_value_and_grad(func, scaling)(*args)

    scaling = mpx.init_scaling(func, *args)
    return step.lower(scaling, *args).compile(), scaling


def copies(recipe, inputs):
    """How often data are rounded to 8 bits; a CPU makes integers."""
    compiled, _ = compiled_step(attention_loss, recipe, *inputs)
    text, dims = compiled.as_text(), f"{TOKENS},{TOKEN_WIDTH}"
    return len(re.findall(rf"= (?:u8|f8e\w+)\[{dims}\]\S* convert\(", text))


@pytest.mark.slow
def test_queries_keys_and_values_read_one_copy(attention_inputs):
    assert copies(SHORT, attention_inputs) == copies(CURRENT, attention_inputs) > 0


def test_each_weight_learns_the_amax_of_what_it_reads(attention_inputs):
    weights, x = attention_inputs
    compiled, scaling = compiled_step(attention_loss, SHORT, weights, x)
    result = compiled(scaling, weights, x)
    after = result.scaling.scales_by_weight()
    rows = {name: after[slot] for name in WEIGHTS for slot in after if name in slot}
    largest = float(jnp.max(jnp.abs(jnp.tanh(x))))
    for name in WEIGHTS:
        assert rows[name][0] == pytest.approx(448 / largest, 1e-2)
        of_weight = float(jnp.max(jnp.abs(weights[name])))
        assert rows[name][1] == pytest.approx(448 / of_weight, 1e-5)


def test_a_reader_without_a_derivative_does_not_spoil_the_scale(attention_inputs):
    def with_probe(weights, x):
        x = 100 * jnp.tanh(x)
        probe = jax.lax.stop_gradient(jnp.tanh(x @ weights["query"]))
        hidden = jnp.tanh(x @ weights["key"]) + 0 * probe
        return jnp.sum(hidden @ weights["out"])

    weights, x = attention_inputs
    compiled, scaling = compiled_step(with_probe, SHORT, weights, x)
    after = compiled(scaling, weights, x).scaling.scales_by_weight()
    # No amax comes back from the probe, which takes the scales of the moment.
    assert not any("query" in slot for slot in after)
    (trained,) = (row for slot, row in after.items() if "key" in slot)
    assert trained[0] < 10
