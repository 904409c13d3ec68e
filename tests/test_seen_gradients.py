"""Gradients that a recipe has seen: one number of each product says if all are finite.

A gradient is bad here while the loss is finite: `root` has no derivative at zero, and
JAX gives NaN for it.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from mpx._autocast import noting_seen, seen_of
from mpx._grad._finite import finite_flags
from mpx._recipe_state import first_step

N = 16
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))
SEEING = {
    "current": mpx.Float8CurrentScaling(),
    "powers of two": mpx.Float8CurrentScaling(use_power_2_scales=True),
    "delayed": mpx.DelayedScaling(amax_history_len=2),
    "nvfp4": mpx.NVFP4BlockScaling(),
    "custom": mpx.CustomRecipe(lambda role, for_wgrad: mpx.TensorQuantizer()),
}
OTHERS = {
    "mxfp8": mpx.MXFP8BlockScaling(),
    "blocks": mpx.Float8BlockScaling(),
    "high precision": mpx.Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": mpx.Float8CurrentScaling(backward_override="dequantized"),
}
RECIPES = SEEING | OTHERS
autocast = functools.partial(mpx.autocast, recipe=SEEING["current"], rules=EVERY)


def root(x):
    return jnp.sqrt(jnp.abs(x))


def weight(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) / N**0.5


DATA = jax.random.normal(jax.random.key(7), (N, N))


# --- What reads an argument -----------------------------------------------------------


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def scanned_rounded(w, x):
    return scanned(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))


def product(w, x, dtype):
    return x.astype(dtype) @ w.astype(dtype)


def shared_by_turns(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]


def scanned_twice(w, x):
    return jax.lax.scan(lambda x, w: (scanned(w, x), None), x, w)[0]


def heads(w, x):
    return jnp.einsum("nd,dhk->nhk", x, w)


def branch(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x + x) @ w)


def carried(w, x):
    return jax.lax.scan(lambda c, _: (c.T, x @ c), w, None, length=2)[1]


@jax.custom_vjp
def odd(w):
    return w.T


odd.defvjp(lambda w: (w.T, w), lambda w, g: (jnp.where(w > 0, jnp.inf, g.T),))

SEEN = {
    "product": (lambda w, x: x @ w, (N, N), 0),
    "transposed": (lambda w, x: x @ w.T, (N, N), 0),
    "both ways": (lambda w, x: (x @ w) @ w.T, (N, N), 0),
    "heads": (heads, (N, 2, N // 2), 0),
    "as a vector": (lambda w, x: x @ w.reshape(N, N), (N * N,), 0),
    "rounded": (lambda w, x: product(w, x, "bfloat16"), (N, N), 0),
    "scan": (scanned, (3, N, N), 1),
    "scan of rounded": (scanned_rounded, (3, N, N), 1),
    "scan in scan": (scanned_twice, (2, 3, N, N), 2),
    "shared by turns": (shared_by_turns, (N, N), 0),
    "jit": (lambda w, x: jax.jit(jnp.matmul)(x, w), (N, N), 0),
    "checkpoint": (jax.checkpoint(lambda w, x: jnp.tanh(x @ w)), (N, N), 0),
    "cond": (branch, (N, N), 0),
    "vmap": (lambda w, x: jax.vmap(lambda row: row @ w)(x), (N, N), 0),
    "many": (lambda w, x: jax.vmap(jnp.matmul, (None, 0))(x, w), (3, N, N), 0),
}
NOT_SEEN = {
    "decay": (lambda w, x: x @ w + jnp.sum(w**2), (N, N)),
    "result": (lambda w, x: (x @ w, w), (N, N)),
    "slices": (lambda w, x: x @ w[0] + x @ w[1], (2, N, N)),
    "part": (lambda w, x: x[:, : N // 2] @ w[: N // 2], (N, N)),
    "scaled": (lambda w, x: x @ (w + w), (N, N)),
    "masked": (lambda w, x: x @ jnp.where(w > 0, w, 0), (N, N)),
    "looked up": (lambda w, x: x @ w + w[jnp.arange(N)], (N, N)),
    "rule of its own": (lambda w, x: x @ odd(w), (N, N)),
    "scan, turned": (lambda w, x: scanned(jnp.moveaxis(w, 2, 0), x), (N, N, 3)),
    "scan, and one": (lambda w, x: scanned(w, x) @ w[0], (3, N, N)),
    "scan, and all": (lambda w, x: scanned(w, x) @ w.reshape(-1, N).T, (3, N, N)),
    "carry": (carried, (N, N)),
    "rounded to float16": (lambda w, x: product(w, x, "float16"), (N, N)),
    "another recipe": (lambda w, x: x @ w + in_blocks(w, x), (N, N)),
    "half": (lambda w, x: x @ w + in_half(w, x), (N, N)),
}


def in_blocks(w, x):
    with mpx.autocast(recipe=OTHERS["mxfp8"]):
        return x @ w


def in_half(w, x):
    with mpx.autocast(recipe=None):
        return x @ w


@pytest.mark.parametrize("name", SEEN)
def test_gradients_of_what_only_products_read_are_seen(name):
    func, shape, axes = SEEN[name]
    assert noted(func, shape) == axes


@pytest.mark.parametrize("name", NOT_SEEN)
def test_gradients_of_what_anything_else_reads_are_not(name):
    func, shape = NOT_SEEN[name]
    assert noted(func, shape) is None


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_with_scales_for_whole_arrays_see_gradients(name):
    found = noted(lambda w, x: x @ w, (N, N), recipe=RECIPES[name])
    assert found == (0 if name in SEEING else None)


def test_one_program_in_two_places_counts_as_what_it_is_in_both():
    """JAX gives the same program for both calls; one of them is in half precision."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def func(w, x):
        with mpx.autocast(recipe=None):
            x = layer(w, x)
        return layer(w, x)

    assert noted(func, (N, N)) is None
    assert noted(lambda w, x: layer(w, layer(w, x)), (N, N)) == 0


def test_what_a_rule_writes_anew_counts_as_another_reader():
    """A product that is quantized elsewhere, whose weight a user's function squares."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def func(w, x):
        with jax.named_scope("odd"):
            x = layer(w, x)
        return layer(w, x)

    def squared(candidate, operands):
        return [operands[0], operands[1] ** 2], candidate.equation.params

    rule = mpx.Rule(squared, scope="odd", primitive="dot_general")
    assert noted(func, (N, N), rules=mpx.Rules(rule, *EVERY.rules)) is None


def test_a_program_that_a_rule_leaves_alone_counts_as_another_reader():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    left = mpx.Rule(mpx.Precision.DECLARED, primitive="jit")
    rules = mpx.Rules(left, *EVERY.rules)
    assert noted(lambda w, x: layer(w, x @ w), (N, N), rules=rules) is None


def noted(func, shape, recipe=SEEING["current"], rules=EVERY):
    """What is noted of the first argument, also where JAX has traced it before."""

    def loss(w, x):
        found = jax.tree.leaves(func(w, x))
        return sum(jnp.sum(one) for one in found), found

    loss = autocast(loss, recipe=recipe, rules=rules)

    def call():
        found = []

        def traced(w, x):
            with noting_seen() as notes, first_step():
                loss(w, x)
            found.extend(seen_of(notes, [w]))

        jax.eval_shape(traced, weight(*shape), DATA)
        return found[0]

    first = call()
    assert call() == first
    return first


# --- Bad gradients --------------------------------------------------------------------


def rooted(params, x):
    away_from_zero = jnp.where(jnp.arange(N) == 5, 0.0, 9.0)[None]
    hidden = jnp.tanh(x @ params["first"])
    return jnp.sum(root(away_from_zero + hidden @ params["second"]))


def with_zero_column(w):
    """Of which only one column gets a bad gradient in `rooted`."""
    return w.at[..., 5].set(0)


def run(func, params, x, scaling=None):
    scaling = mpx.init_scaling(func, params, x) if scaling is None else scaling

    @jax.jit
    def step(scaling, params, x):
        return mpx.filter_value_and_grad(func, scaling)(params, x)

    return step(scaling, params, x)


@pytest.mark.parametrize("name", RECIPES)
def test_a_bad_gradient_is_found_wherever_it_is(name):
    func = autocast(rooted, recipe=RECIPES[name])
    params = {"first": weight(N, N), "second": weight(N, N, seed=1)}
    assert run(func, params, DATA).finite
    params["second"] = with_zero_column(params["second"])
    result = run(func, params, DATA)
    assert np.isfinite(result.value)
    assert not result.finite
    if name in SEEING:
        assert np.isnan(result.grads["second"]).all()


def test_what_nobody_checks_is_as_it_was():
    params = {"first": weight(N, N), "second": with_zero_column(weight(N, N, seed=1))}
    scaling = mpx.NoLossScaling(skip=False)
    grads = run(autocast(rooted), params, DATA, scaling).grads
    assert np.isnan(grads["second"]).any(0).tolist() == [i == 5 for i in range(N)]


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_each_piece_that_a_scan_cuts_is_looked_at(name):
    def loss(w, xs):
        def turn(total, row):
            w, x = row
            return total + jnp.sum(root(x @ w)), None

        return jax.lax.scan(turn, 0.0, (w, xs))[0]

    w, xs = weight(3, N, N), jnp.stack([DATA] * 3)
    func = autocast(loss, recipe=RECIPES[name])
    assert run(func, w, xs).finite
    result = run(func, w.at[1].set(with_zero_column(w[1])), xs)
    assert np.isfinite(result.value)
    assert not result.finite
    bad = np.isnan(result.grads).reshape(3, -1)
    assert bad.all(1).tolist() == bad.any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("exponent", [54, 62])
def test_a_gradient_that_may_overflow_is_nan_as_a_whole(name, exponent):
    """Nobody has such gradients; but an infinity among them would not be seen."""
    size = 2.0 ** (exponent / 2)

    def loss(w, x):
        return jnp.sum(x @ w) * (size * 2.0**-9)

    func = autocast(loss, recipe=RECIPES[name])
    x = DATA * (size * 2.0**9 / jnp.max(jnp.abs(DATA)))
    result = run(func, weight(N, N), x)
    assert bool(result.finite) == (exponent < 60)
    assert np.isfinite(result.value)
    assert np.isfinite(result.grads).all() == (exponent < 60)
    assert np.isnan(result.grads).all() == (exponent > 60)


@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4"])
def test_bad_data_is_found(name):
    def loss(w, x):
        return jnp.sum(jnp.where(jnp.arange(N) == 3, 0.0, (x @ w).sum(1)))

    func, w = autocast(loss, recipe=RECIPES[name]), weight(N, N)
    for bad in (np.inf, np.nan):
        x = DATA.at[3, 4].set(bad)
        scaling = mpx.init_scaling(func, w, DATA)
        assert not run(func, w, x, scaling).finite


def test_a_bad_step_changes_nothing_and_a_good_one_goes_on():
    func, optimizer = (
        autocast(rooted, recipe=SEEING["delayed"]),
        optax.sgd(1e-3, momentum=0.9),
    )
    good = {"first": weight(N, N), "second": weight(N, N, seed=1)}
    scaling = mpx.init_scaling(func, good, DATA)

    @jax.jit
    def step(params, state, scaling, x):
        result = mpx.filter_value_and_grad(func, scaling)(params, x)
        return mpx.optimizer_step(params, optimizer, state, result)

    bad = good | {"second": with_zero_column(good["second"])}
    state = optimizer.init(bad)
    params, after, scaling = step(bad, state, scaling, DATA)
    assert eqx.tree_equal(params, bad)
    assert eqx.tree_equal(after, state)
    params, _, scaling = step(good, state, scaling, DATA)
    assert not eqx.tree_equal(params, good)


# --- Who else reads them --------------------------------------------------------------


def test_a_function_around_may_read_more():
    """It has all attributes of the autocast function, and another gradient."""
    func = autocast(lambda w, x: jnp.sum(x @ w))

    @functools.wraps(func)
    def around(w, x):
        return func(w, x) + jnp.sum(root(w))

    w = weight(N, N)
    assert run(around, w, DATA, mpx.NoLossScaling()).finite
    result = run(around, w.at[3, 4].set(0), DATA, mpx.NoLossScaling())
    assert np.isfinite(result.value)
    assert not result.finite


def test_a_model_that_is_called_inside_of_another_is_not_asked():
    inner = autocast(lambda w, x: jnp.sum(x @ w))
    outer = mpx.autocast(lambda w, x: inner(w, x) + jnp.sum(root(w)))
    result = run(outer, weight(N, N).at[3, 4].set(0), DATA, mpx.NoLossScaling())
    assert np.isfinite(result.value)
    assert not result.finite


# --- What is read ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SEEING)
def test_no_gradient_that_was_seen_is_read(name):
    func = autocast(rooted, recipe=RECIPES[name])
    assert sizes_of_checks(func) == {1}


def test_others_are_read():
    func = autocast(rooted, recipe=OTHERS["mxfp8"])
    assert sizes_of_checks(func) == {1, N * N}


def test_on_several_devices_all_are_read():
    """No product there is to wait for an amax of all devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(DATA, NamedSharding(mesh, P("data")))
    assert sizes_of_checks(autocast(rooted), x) == {1, N * N}


def sizes_of_checks(func, x=DATA):
    """How many numbers are asked whether they are finite, at a time."""
    params = {"first": weight(N, N), "second": weight(N, N, seed=1)}
    scaling = mpx.init_scaling(func, params, DATA)

    def step(scaling, params, x):
        return mpx.filter_value_and_grad(func, scaling)(params, x)

    # At its end, in no program within it.
    found = jax.jit(step).trace(scaling, params, x).jaxpr.eqns
    found = [e for e in found if e.primitive.name == "is_finite"]
    return {e.invars[0].aval.size for e in found}


def test_it_leaks_no_tracer():
    func = autocast(rooted)
    params = {"first": weight(N, N), "second": weight(N, N, seed=1)}
    with jax.checking_leaks():
        assert run(func, params, DATA).finite


@pytest.mark.parametrize("scale", [2.0**-21, 2.0**-20, 1.0])
def test_a_scale_may_be_too_small(scale):
    scaling = mpx.StaticLossScaling(scale)
    flags = finite_flags(scaling, jnp.ones(()), [jnp.ones((2, 2))], [0])
    assert flags.tolist() == [True, True, scale >= 2.0**-20]


@pytest.mark.parametrize(("axes", "wanted"), [(None, False), (0, True), (1, False)])
def test_one_number_of_each_product_is_read(axes, wanted):
    grad = jnp.ones((2, 2, 2)).at[1, 0, 0].set(jnp.nan)
    flags = finite_flags(mpx.NoLossScaling(), jnp.ones(()), [grad], [axes])
    assert flags.tolist() == [True, wanted, True]
    assert finite_flags(mpx.NoLossScaling(), jnp.ones(()), [grad[:0]], [axes])[1]
