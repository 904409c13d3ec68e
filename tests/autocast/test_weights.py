"""Which arguments a recipe takes for weights: `weights=`, and what goes without it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import slow_but
from ..registries import RECIPES

SIZE, RANK, ROWS = 256, 8, 32
NONE = mpx.NoLossScaling()


class Adapted(eqx.Module):
    """A linear layer with an adapter of low rank beside it."""

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
    for found, expected in zip(
        jax.tree.leaves(result.grads), jax.tree.leaves(exact), strict=True
    ):
        error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
        assert error < (0.5 if name in ("nvfp4", "custom") else 0.2)


def test_explain_says_that_an_adapter_is_too_narrow():
    adapters, base = partitioned()
    func = mpx.autocast(loss, recipe=mpx.Float8CurrentScaling(), weights=(0, 1))
    found = products(func, adapters, base, normal(8, ROWS, SIZE))
    assert sum(is_low for is_low, _ in found) == 2
    assert sum("too small to pay" in reason for _, reason in found) == 4


def test_a_rule_quantizes_a_narrow_weight():
    low = mpx.Rules(mpx.Rule(mpx.Precision.LOW, parameter="*down"))
    func = mpx.autocast(
        loss, recipe=mpx.Float8CurrentScaling(), weights=(0, 1), rules=low
    )
    found = products(func, *partitioned(), normal(8, ROWS, SIZE))
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
    message = r"differentiates argument 2.*weights=2"
    for gradient in (mpx.grad, mpx.value_and_grad):
        with pytest.raises(ValueError, match=message):
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
