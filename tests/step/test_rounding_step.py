"""Stochastic rounding in training: another noise in each step, the same in one."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from tests.helpers import slow_but

RECIPE = mpx.NVFP4BlockScaling()
NEAREST = mpx.NVFP4BlockScaling(disable_stochastic_rounding=True)
WIDTH, BATCH = 32, 16
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))


@functools.cache
def inputs() -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[:3]]
    return weights, jax.random.normal(keys[3], (BATCH, WIDTH))


def layer(x, w):
    return jnp.tanh(x @ w)


def loss(ws, x, layer: Any = layer):
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(ws, x, layer: Any = layer):
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))
    return jnp.mean(x**2)


def one_weight_scanned(ws, x):
    x, _ = jax.lax.scan(lambda x, _: (layer(x, ws[0]), None), x, length=2)
    return jnp.mean(layer(x, ws[1]) ** 2) + jnp.mean(ws[2])


def branches(ws, x):
    for w in ws:
        x = jax.lax.cond(x[0, 0] > 9, jnp.sin, functools.partial(layer, w=w), x)
    return jnp.mean(x**2)


def on_devices(check_vma: bool, ws, x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda ws, x: jax.lax.pmean(loss(ws, x), "data")  # noqa: E731
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)(ws, x)


def experts(ws, x):
    sizes = jnp.array([6, 10], jnp.int32)
    x = jnp.tanh(jax.lax.ragged_dot(x, jnp.stack(ws[:2]), sizes))
    return jnp.mean((x @ ws[2]) ** 2)


def in_a_region(ws, x):
    with mpx.autocast(recipe=RECIPE):
        return loss(ws, x)


def mapped(ws, x):
    return jax.vmap(loss, (None, 0))(ws, x[None]).sum()


def _of_inputs(role: mpx.quantization.Role, leg: mpx.quantization.Leg) -> Any:
    is_input = role is mpx.quantization.Role.INPUT
    return mpx.quantization.MXFP8Quantizer(stochastic_rounding=is_input)


class Program(NamedTuple):
    func: Callable[..., Any]
    options: dict[str, Any] = {}


def quantized(func, recipe: Any = RECIPE, **options) -> Program:
    return Program(mpx.autocast(func, recipe=recipe), options)


OF_PRODUCTS = mpx.Rules(mpx.Rule(RECIPE, primitive="dot_general"))
PROGRAMS = {
    "plain": quantized(loss),
    "accumulated": quantized(loss, accumulate=2),
    "tried again": quantized(loss, retries=2),
    "scanned": quantized(scanned),
    "one weight scanned": quantized(one_weight_scanned),
    "on devices": quantized(functools.partial(on_devices, True)),
    "on devices, unchecked": quantized(functools.partial(on_devices, False)),
    "experts": quantized(experts),
    "a rule": Program(mpx.autocast(loss, rules=OF_PRODUCTS)),
    "a region": Program(mpx.autocast(in_a_region)),
    "hidden": Program(lambda *a: quantized(loss).func(*a), {"policy": "full"}),
    "mapped": quantized(mapped),
    "inputs": quantized(loss, mpx.CustomRecipe(_of_inputs)),
}


def equal(a: Any, b: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@functools.cache
def step_of(func, **options):
    return jax.jit(lambda s, *args: mpx.filter_grad(func, s, **options)(*args))


# One for each way on which the number of the step gets to a product.
QUICK = ("scanned", "a rule")


@pytest.mark.parametrize("name", slow_but(QUICK, PROGRAMS))
def test_steps_round_a_gradient_differently_and_each_one_always_the_same(name):
    """And nothing is compiled again for it."""
    func, options = PROGRAMS[name]
    traces = []
    # A scale that stays what it is.
    scaling = mpx.DynamicLossScaling(8.0)

    @jax.jit
    def step(scaling, ws, x):
        traces.append(1)
        return mpx.filter_value_and_grad(func, scaling, **options)(ws, x)

    ws, x = inputs()
    scaling = step(scaling, ws, x).scaling  # from where steps leave it
    traces.clear()
    first = step(scaling, ws, x)
    second = step(first.scaling, ws, x)
    assert bool(first.finite) and bool(second.finite)
    assert equal(first.grads, step(scaling, ws, x).grads)
    assert not equal(first.grads, second.grads)
    pairs = zip(*map(jax.tree.leaves, (first.grads, second.grads)), strict=True)
    for one, other in pairs:
        assert jnp.linalg.norm(one - other) < 0.5 * jnp.linalg.norm(one) + 1e-30
    if name != "inputs":
        assert first.value == second.value
    assert len(traces) <= 1


CHEAP = mpx.CustomRecipe(
    lambda role, leg: mpx.quantization.TensorQuantizer(
        stochastic_rounding=role is mpx.quantization.Role.GRADIENT
    )
)
WITHIN = {
    "jit": functools.partial(loss, layer=jax.jit(layer)),
    "checkpoint": functools.partial(loss, layer=jax.checkpoint(layer)),
    "a scan of a checkpoint": functools.partial(scanned, layer=jax.checkpoint(layer)),
    "cond": branches,
}


@pytest.mark.parametrize("way", WITHIN)
def test_the_number_gets_into_programs_within(way):
    step = step_of(mpx.autocast(WITHIN[way], recipe=CHEAP))
    first = step(mpx.DynamicLossScaling(8.0), *inputs())
    second = step(first.scaling, *inputs())
    for one, other in zip(first.grads[:2], second.grads[:2], strict=True):
        assert not np.array_equal(one, other)


def test_over_a_mesh():
    (*ws, _), x = inputs()
    step, scaling = step_of(PROGRAMS["plain"].func), mpx.NoLossScaling()
    explicit = (AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=explicit)):
        x = jax.device_put(x, P("data"))
        first = step(scaling, ws, x)
        assert equal(first.grads, step(scaling, ws, x).grads)
        assert not equal(first.grads, step(first.scaling, ws, x).grads)


@pytest.mark.slow
def test_the_mean_over_steps_goes_to_the_gradient():
    """Without bias its error falls as one over the root of the number of steps."""
    (w, *_), x = inputs()
    g = jax.random.normal(jax.random.key(9), (BATCH, WIDTH))

    def constant_slope(w, x):
        return jnp.sum((x @ w) * g)

    def mean_of(recipe, count: int):
        func = mpx.autocast(constant_slope, recipe=recipe, weights=0)

        def step(scaling, _):
            result = mpx.grad(func, scaling, argnums=1)(w, x)
            return result.scaling, result.grads

        return jax.lax.scan(step, mpx.NoLossScaling(), length=count)[1].mean(0)

    exact = mean_of(mpx.NVFP4BlockScaling(backward_override="dequantized"), 1)

    def error(recipe, count: int) -> float:
        found = mean_of(recipe, count)
        return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))

    once, mean = error(RECIPE, 1), error(RECIPE, 400)
    assert mean < 0.1 * once
    assert mean < 0.3 * error(NEAREST, 400)


def test_a_step_that_is_skipped_counts_too():
    """Else a step that rounding made infinite would be rounded so again."""
    ws, x = inputs()
    step, scaling = step_of(PROGRAMS["plain"].func), mpx.NoLossScaling()
    good, bad = step(scaling, ws, x), step(scaling, ws, x.at[0, 0].set(jnp.inf))
    assert bool(good.finite) and not bool(bad.finite)
    after = [step(result.scaling, ws, x).grads for result in (good, bad)]
    assert equal(*after) and not equal(after[0], good.grads)


@pytest.mark.parametrize("recipe", [None, NEAREST, mpx.MXFP8BlockScaling(), RECIPE])
def test_only_programs_that_need_it_are_given_the_number(recipe):
    func = mpx.autocast(loss, recipe=recipe)
    program = jax.make_jaxpr(lambda s: mpx.filter_grad(func, s)(*inputs()).grads)
    used = program(mpx.NoLossScaling()).jaxpr
    (number, *_) = used.invars
    assert number.aval.shape == () and number.aval.dtype == jnp.int32
    # The next number is computed from it in a jitted function in any case.
    uses = [e for e in used.eqns if number in e.invars]
    names = {str(e.params.get("name", e.primitive.name)) for e in uses}
    assert names <= {"quantized_forward", "_updated"}
    assert ("quantized_forward" in names) == (recipe is RECIPE)


def _nested(ws, x):
    inner = mpx.autocast(lambda ws, x: layer(x, ws), recipe=RECIPE)
    return jnp.mean((inner(ws[0], x) @ ws[1]) ** 2) + jnp.mean(ws[2])


@pytest.mark.parametrize("outer", slow_but([NEAREST], [RECIPE, NEAREST]))
def test_one_autocast_function_in_another(outer):
    step = step_of(mpx.autocast(_nested, recipe=outer, rules=EVERY))
    start = mpx.NoLossScaling()
    first = step(start, *inputs())
    second = step(first.scaling, *inputs())
    assert equal(first.grads, step(start, *inputs()).grads)
    assert not np.array_equal(first.grads[0], second.grads[0])
    is_other = not np.array_equal(first.grads[1], second.grads[1])
    assert is_other == (outer is RECIPE)


@pytest.mark.slow
def test_steps_that_are_not_jitted_trace_jitted_functions_once():
    """As they do without stochastic rounding, or each step would be compiled anew."""
    traces = []

    @jax.jit
    def activation(x):
        traces.append(1)
        return jnp.tanh(x)

    loss = lambda ws, x: jnp.mean((activation(x @ ws[0]) @ ws[1]) ** 2)  # noqa: E731
    func = mpx.autocast(loss, recipe=RECIPE)
    scaling, counts = mpx.NoLossScaling(), []
    for _ in range(3):
        scaling = mpx.filter_grad(func, scaling)(*inputs()).scaling
        counts.append(len(traces))
    assert counts == [1, 1, 1]


@pytest.mark.slow
def test_outside_of_a_training_step_the_numbers_alone_decide():
    gradient = jax.jit(jax.grad(PROGRAMS["plain"].func))
    assert equal(gradient(*inputs()), gradient(*inputs()))
