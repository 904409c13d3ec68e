"""The state of delayed scaling: made by tracing, threaded through steps, and kept."""

import copy
import dataclasses
import functools
import itertools
import pickle
import re

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx
from tests.autocast.counting import relative_error
from tests.helpers import slow_but, unchecked_annotations
from tests.step.cases import same_bits

N = 16
# XLA may keep more digits than bfloat16 has, or not, as it fuses.
ULP = 2.0**-7
RECIPE = mpx.DelayedScaling(amax_history_len=4)
WARM = mpx.DelayedScaling(amax_history_len=4, warm_start=True)
# Also the last product, so that two suffice.
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))
autocast = functools.partial(mpx.autocast, recipe=RECIPE, rules=EVERY)


def forward(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]


@autocast
def loss(params, x):
    return jnp.sum(forward(params, x) ** 2) / N


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    first = jax.random.normal(keys[0], (N, 2 * N)) / 4
    second = jax.random.normal(keys[1], (2 * N, N)) / 4
    return {"first": first, "second": second}, jax.random.normal(keys[2], (2 * N, N))


def step(func, scaling, *args, **options):
    """One step of a training run, jitted: the result of the gradient function."""
    return jitted_step(func, **options)(scaling, args)[0]


@functools.cache
def jitted_step(func, **options):
    """With what leaves no step: the amaxes that it has seen."""

    @jax.jit
    def run(scaling, args):
        result = mpx.filter_value_and_grad(func, scaling, **options)(*args)
        amaxes = getattr(result._parts.get("_scaled"), "amaxes", None)
        return result, amaxes and amaxes[0]

    return run


def amaxes_of(func, *args, **options):
    return jitted_step(func, **options)(mpx.init_scaling(func, *args), args)[1]


@pytest.fixture(scope="module")
def start(inputs):
    return mpx.init_scaling(loss, *inputs)


@pytest.fixture(scope="module")
def amaxes(inputs):
    return amaxes_of(loss, *inputs)


def test_a_scaling_of_the_slots_of_a_function(inputs, start):
    assert isinstance(start, mpx.quantization.RecipeScaling)
    assert isinstance(start.loss, mpx.NoLossScaling)
    scales = start.scales_by_weight()
    assert list(scales) == ["['first'] (16x32)", "['second'] (32x16)"]
    assert all(np.array_equal(x, [1, 1, 1]) for x in scales.values())
    half = mpx.autocast(loss.__wrapped__, jnp.float16, recipe=RECIPE, rules=EVERY)
    scaling = mpx.init_scaling(half, *inputs)
    assert isinstance(scaling.loss, mpx.DynamicLossScaling)
    assert float(scaling.loss_scale) == float(scaling.loss.loss_scale) > 1
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    assert mpx.init_scaling(loss, *shapes).scales_by_weight().keys() == scales.keys()


def test_amaxes_are_those_of_the_arrays(inputs, amaxes):
    params, x = inputs
    hidden = jnp.tanh(x.astype(jnp.bfloat16) @ params["first"].astype(jnp.bfloat16))
    operands = [[x, params["first"]], [hidden, params["second"]]]
    expected = np.float32([[np.abs(a).max() for a in row] for row in operands])
    assert np.allclose(amaxes[:, :2], expected, rtol=2e-2)
    assert np.array_equal(amaxes[:, 1], expected[:, 1])
    assert np.all(amaxes[:, 2] > 0)


def test_histories_of_forty_steps(inputs, start):
    """Against the recipe's own rule, step by step, with bad steps in between."""
    (params, x), scaling, roles = inputs, start, mpx.quantization.Role
    run, update = jitted_step(loss), jax.jit(RECIPE.update, static_argnums=2)
    state = [[RECIPE.init() for _ in roles] for _ in params]
    for i in range(40):
        scale = {7: 0.0, 11: 1e-30, 20: 1e4}.get(i, 1.0 + i % 5)
        bad = i in (3, 25)
        result, seen = run(scaling, (params, x * scale + (np.nan if bad else 0)))
        assert bool(result.finite) is not bad
        if not bad:
            pairs = zip(state, seen, strict=True)
            state = [list(map(update, row, got, roles)) for row, got in pairs]
        scaling = result.scaling
        now = scaling.scales[0]
        assert np.array_equal(now.scale, [[s.scale for s in row] for row in state])
        histories = [[s.amax_history for s in row] for row in state]
        assert np.array_equal(now.amax_history, histories)
    assert int(scaling.skipped) == 2 and int(scaling.record.steps) == 40


def scanned(params, x, wrap=lambda f: f):
    """Two layers as a scan over stacked weights, and one weight in every turn."""
    first = jnp.stack([params["first"][:, :N], params["first"][:, N:]])
    body = wrap(lambda x, w: (jnp.tanh(x @ w) @ params["second"][:N], None))
    x, _ = jax.lax.scan(body, x, first)
    return jnp.sum(x**2)


@pytest.fixture(scope="module")
def turns(inputs):
    return amaxes_of(autocast(scanned), *inputs)


def unrolled(params, x):
    for w in (params["first"][:, :N], params["first"][:, N:]):
        x = jnp.tanh(x @ w) @ params["second"][:N]
    return jnp.sum(x**2)


def stacked(params, x):
    layers, shared = params
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ shared, None), x, layers)
    return jnp.sum(x**2)


def layers_of(params, factor):
    return jnp.stack([params["first"][:, :N], factor * params["first"][:, N:]])


def test_layers_of_a_scan_have_slots_of_their_own(inputs, turns):
    """And a weight of all turns has the maximum, not the sum."""
    params, x = inputs
    both = layers, shared = layers_of(params, 2), params["second"][:N]
    func = autocast(stacked)
    scaling = mpx.init_scaling(func, both, x)
    shapes = {name: s.shape for name, s in scaling.scales_by_weight().items()}
    assert shapes == {"[0] (16x16 of 2)": (2, 3), "[1] (16x16)": (3,)}
    seen = amaxes_of(func, both, x)
    assert np.array_equal(seen[:2, 1], np.abs(layers).max((1, 2)))
    assert seen[2, 1] == np.abs(shared).max()
    one_by_one = amaxes_of(autocast(unrolled), *inputs)
    joined = np.stack([np.max(turns[:2], axis=0), turns[2]])
    assert np.allclose(joined, one_by_one, rtol=ULP)


@pytest.mark.slow
def test_nothing_traced_outlives_a_step(inputs, checking_leaks):
    """JAX's caches keep the context in which scales were given, not the scales."""
    params, x = inputs
    both, func = (layers_of(params, 2), params["second"][:N]), autocast(stacked)
    scaling = mpx.init_scaling(func, both, x)

    @jax.jit
    def run(scaling, both, x):
        return mpx.filter_value_and_grad(func, scaling)(both, x).value

    assert np.isfinite(run(scaling, both, x))


def test_a_weight_inside_of_a_scan_and_outside(inputs):
    layers, x = layers_of(inputs[0], 3), inputs[1]

    @autocast
    def both(layers, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ layers[1], layers)
        return jnp.sum(x**2)

    names = list(mpx.init_scaling(both, layers, x).scales_by_weight())
    assert names == [" (16x16)", " (16x16 of 2)"]
    expected = [jnp.abs(w).max() for w in (layers[1], *layers)]
    assert np.array_equal(amaxes_of(both, layers, x)[:, 1], expected)


def test_programs_within_the_program_change_nothing(inputs, turns):
    wrap = lambda body: jax.checkpoint(jax.jit(body))  # noqa: E731
    wrapped = autocast(functools.partial(scanned, wrap=wrap))
    assert np.array_equal(amaxes_of(wrapped, *inputs), turns)


@pytest.mark.slow
def test_uses_of_one_weight_are_joined_by_maximum(inputs, amaxes):
    params, x = inputs

    def twice(params, x):
        return loss.__wrapped__(params, x) + loss.__wrapped__(params, 3 * x)

    seen = amaxes_of(autocast(twice), params, x)
    assert float(seen[0, 0]) == float(jnp.bfloat16(3 * np.abs(x).max()))
    assert np.array_equal(seen[:, 1], amaxes[:, 1])
    # Two calls of an autocast function are no different.
    calls = lambda p, x: loss(p, x) + loss(p, 3 * x)  # noqa: E731
    assert mpx.init_scaling(calls, params, x).calls == 2
    assert np.array_equal(amaxes_of(calls, params, x, policy="full"), seen)


@pytest.mark.slow
def test_micro_batches_are_joined_by_maximum(inputs):
    params, x = inputs
    parts = [amaxes_of(loss, params, x[i::4]) for i in range(4)]
    seen = amaxes_of(loss, params, x, accumulate=4)
    assert np.allclose(seen, np.max(parts, axis=0), rtol=1e-2)
    assert np.array_equal(seen[:, 1], parts[0][:, 1])


@pytest.mark.parametrize("kind", slow_but(["unchecked"], ["explicit", "unchecked"]))
def test_eight_devices_see_what_one_sees(inputs, amaxes, kind):
    params, x = inputs
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    if kind == "explicit":
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        params = jax.device_put(params, NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            assert np.allclose(amaxes_of(loss, params, x), amaxes, rtol=ULP)
        return

    def inner(params, x):
        return jax.lax.psum(loss.__wrapped__(params, x), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    sharded = autocast(lambda *args: jax.shard_map(inner, mesh=mesh, **specs)(*args))
    assert np.allclose(amaxes_of(sharded, params, x), amaxes, rtol=ULP)


def test_a_step_within_shard_map(inputs, start, amaxes):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    def run(params, x, scaling):
        return jitted_step(loss)(scaling, (params, x))[1]

    assert np.allclose(run(*inputs, start), amaxes, rtol=ULP)


@pytest.mark.slow
def test_each_model_of_an_ensemble_has_a_state_of_its_own():
    """Made in a vmap that returns it; made inside of the one that trains, all share."""
    x = jnp.ones((N, N))

    @functools.partial(mpx.autocast, recipe=RECIPE, rules=EVERY)
    def loss(w, x):
        return jnp.mean((x @ w) ** 2)

    def init(seed):
        w = jax.random.normal(jax.random.key(seed), (N, N))
        return w, mpx.init_scaling(loss, w, x)

    def step(w, scaling):
        scaling, _, grads = mpx.filter_grad(loss, scaling)(w, x)
        return w - grads, scaling

    seeds = jnp.arange(3)
    every = jax.jit(jax.vmap(step))(*jax.vmap(init)(seeds))
    one = jax.jit(step)(*init(1))
    for a, b in zip(jax.tree.leaves(every), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-5)
    with pytest.raises(ValueError, match=r"For separate models.*jax.vmap\(init\)"):
        jax.vmap(lambda seed: step(*init(seed)))(seeds)


def two_recipes(params, x):
    w = params["first"][:, :N]
    y = x @ w
    with mpx.autocast(recipe=mpx.DelayedScaling(margin=1)):
        return jnp.sum((y @ w) @ w)


def batched(params, x):
    return jnp.mean(jax.vmap(loss, (None, 0))(params, x.reshape(2, N, N)))


def in_turns(params, x):
    return jnp.sum(jax.lax.map(lambda x: loss(params, x), x.reshape(2, N, N)))


def while_it_is_small(params, x):
    once_more = lambda c: c + loss(params, x)  # noqa: E731
    return jax.lax.while_loop(lambda c: c < 1, once_more, jnp.zeros(()))


def called_twice(params, x, jitted=jax.jit(loss)):  # noqa: B008
    return jitted(params, x) + jitted(params, 2 * x)


@pytest.mark.parametrize(
    ("func", "match"),
    [
        (autocast(two_recipes), "two recipes with a state"),
        pytest.param(batched, "outside vmap", marks=pytest.mark.slow),
        # JAX would sum the amaxes of a loop's turns.
        (in_turns, "called in the scan.*sum the amaxes"),
        (while_it_is_small, "called in the while.*sum the amaxes"),
        (called_twice, "called 2 times but traced 1 times"),
    ],
)
def test_calls_of_which_a_scaling_cannot_tell_the_amaxes(inputs, func, match):
    with pytest.raises(ValueError, match=match):
        mpx.init_scaling(func, *inputs)


@pytest.mark.slow
def test_vmap_outside_is_an_error_in_a_step_and_inside_is_none(inputs, start):
    with pytest.raises(ValueError, match="outside vmap"):
        step(batched, start, *inputs, policy="full")
    mapped = jax.vmap(loss.__wrapped__, (None, 0))
    inside = autocast(lambda p, x: jnp.mean(mapped(p, x)))
    args = inputs[0], inputs[1].reshape(2, N, N)
    assert step(inside, mpx.init_scaling(inside, *args), *args).finite


@pytest.mark.slow
def test_a_weight_is_used_in_a_while_and_behind_it(inputs):
    """The loop has the scales of the moment: it could not say what it saw."""

    @mpx.autocast(recipe=mpx.DelayedScaling())
    def settled(params, x):
        w = params["w"]
        state = jax.lax.stop_gradient((w, x))
        _, y = jax.lax.while_loop(
            lambda state: jnp.max(state[1]) > 1e3,
            lambda state: (state[0], jnp.tanh(state[1] @ state[0])),
            state,
        )
        return jnp.sum((jnp.tanh((x + y) @ w) @ w).astype(jnp.float32))

    args = {"w": jax.random.normal(jax.random.key(0), (N, N))}, inputs[1]
    found = step(settled, mpx.init_scaling(settled, *args), *args)
    assert found.finite and jnp.any(found.grads["w"])
    assert list(found.scaling.scales_by_weight()) == [f"['w'] ({N}x{N})"]
    low = [o for o in mpx.explain(settled)(*args).operations if o.rule == "low"]
    assert ["while" in str(o.inside) for o in low] == [1, 0]
    assert "Float8CurrentScaling" in low[0].reason
    assert "DelayedScaling" in low[1].reason


def test_a_jitted_call_that_is_made_once_has_scales(inputs):
    once = mpx.init_scaling(jax.jit(loss), *inputs)
    assert once.scales_by_weight().keys()


def test_calculate_scaled_grad_would_lose_the_amaxes_of_a_recipe(inputs, start):
    with pytest.raises(TypeError, match="recipe's amaxes would be lost"):
        mpx.calculate_scaled_grad(loss, start)(*inputs)


def test_a_state_of_another_model_is_an_error(inputs, start):
    params, x = inputs
    wider = {**params, "second": jnp.ones((2 * N, 2 * N))}
    match = r"state of this model.*`\['second'\]`.*\(32, 16\)"
    with pytest.raises(ValueError, match=match):
        step(loss, start, wider, x)
    weights = params["first"], params["second"]
    renamed = mpx.init_scaling(autocast(lambda w, x: x @ w[0] @ w[1]), weights, x)
    match = r"exactly the slots of this program; missing: .*'first'.*; unknown: .*\[0\]"
    with pytest.raises(ValueError, match=f"{match}.*strict=False"):
        start.with_state(renamed)


@pytest.mark.slow
def test_what_a_changed_model_still_has_is_taken_over(inputs, start):
    params, x = inputs
    _, learned, _ = train(start, params, x, steps=2)
    grown = autocast(lambda params, x: loss.__wrapped__(params, x @ params["new"]))
    params = {**params, "new": jnp.eye(x.shape[-1])}
    fresh = mpx.init_scaling(grown, params, x)
    with pytest.raises(ValueError, match=r"missing: `\['new'\] [^`]*`; unknown: none"):
        fresh.with_state(learned)
    for state in (learned, learned.state_dict()):
        taken = fresh.with_state(state, strict=False)
        assert taken.record.steps == 2
        for read in ("scales_by_weight", "amaxes_by_weight"):
            own, old = getattr(fresh, read)(), getattr(learned, read)()
            for name, found in getattr(taken, read)().items():
                np.testing.assert_array_equal(found, {**own, **old}[name])
    step(grown, taken, params, x)
    # And back again: what is gone is left out.
    back = start.with_state(taken, strict=False)
    assert eqx.tree_equal(back.scales, learned.scales)


def train(scaling, params, x, steps, recipe=RECIPE):
    one, value = training_step(recipe), None
    for _ in range(steps):
        params, scaling, value = one(params, scaling, x)
    return params, scaling, value


@functools.cache
def training_step(recipe):
    func = mpx.autocast(loss.__wrapped__, recipe=recipe, rules=EVERY)
    optimizer = optax.sgd(1e-2)

    @jax.jit
    def one(params, scaling, x):
        result = step(func, scaling, params, x)
        state = optimizer.init(params)
        params, _, scaling = mpx.optimizer_step(params, optimizer, state, result)
        return params, scaling, result.value

    return one


KEEPERS = {
    "pickle": lambda s, _: pickle.loads(pickle.dumps(s)),
    "deepcopy": lambda s, _: copy.deepcopy(s),
    "state_dict": lambda s, new: new.with_state(s.state_dict()),
    "leaves": lambda s, new: jax.tree.structure(new).unflatten(jax.tree.leaves(s)),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_run_goes_on_bit_for_bit(inputs, start, name):
    params, x = inputs
    whole = train(start, params, x, 5)
    params, scaling, _ = train(start, params, x, 2)
    again = train(KEEPERS[name](scaling, start), params, x, 3)
    assert same_bits(again, whole)


@pytest.mark.slow
def test_a_run_goes_on_with_another_recipe(inputs, start):
    params, scaling, _ = train(start, *inputs, 3)
    x = inputs[1]
    longer = mpx.DelayedScaling(amax_history_len=8, margin=1)
    func = mpx.autocast(loss.__wrapped__, recipe=longer, rules=EVERY)
    moved = mpx.init_scaling(func, *inputs).with_state(scaling)
    assert moved.scales[0].amax_history.shape == (2, 3, 8)
    # Scaled to half as much: the margin.
    assert np.array_equal(moved.scales[0].scale, scaling.scales[0].scale / 2)
    history = scaling.scales[0].amax_history
    assert np.array_equal(moved.scales[0].amax_history[..., -3:], history[..., 1:])
    _, after, value = train(moved, params, x, 2, longer)
    assert np.isfinite(value)
    # And to one without a state, which has nothing to keep.
    current = mpx.autocast(loss.__wrapped__, recipe=mpx.Float8CurrentScaling())
    without = mpx.init_scaling(current, *inputs)
    assert without.scales == () and type(without.loss) is mpx.NoLossScaling
    assert np.isfinite(step(current, after.loss, params, x).value)


@pytest.mark.slow
def test_scales_of_another_format_are_converted(inputs, start):
    """Else all gradients would saturate: 448 is 2^-7 of 57344."""
    params, scaling, _ = train(start, *inputs, 3)
    x = inputs[1]
    narrow = mpx.DelayedScaling(amax_history_len=4, fp8_format=mpx.Format.E4M3)
    func = mpx.autocast(loss.__wrapped__, recipe=narrow, rules=EVERY)
    moved = mpx.init_scaling(func, *inputs).with_state(scaling)
    factors = np.asarray(moved.scales[0].scale) / scaling.scales[0].scale
    assert np.array_equal(factors, [[1, 1, 2.0**-7]] * 2)
    grads = step(func, moved, params, x).grads
    exact = jax.jit(jax.grad(loss.__wrapped__))(params, x)
    assert relative_error(grads, exact) < 0.1
    untouched = mpx.init_scaling(func, *inputs).with_state(start)
    assert same_bits(untouched.loss, start.loss)
    assert np.array_equal(untouched.scales[0].scale, np.ones((2, 3)))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "cannot read a state with the keys none"),
        ({"kind": "RecipeScaling", "version": 4, "slots": {}}, "Install a newer"),
        ({"kind": "NoLossScaling", "version": 1}, "missing: `record.finite`"),
    ],
)
def test_bad_states(start, state, message):
    with pytest.raises(ValueError, match=message):
        start.with_state(state)


def test_a_state_of_the_wrong_shape(start):
    state = start.state_dict()
    name = next(iter(state["slots"]))
    whole = state["slots"][name]
    stacked = {k: np.stack([v, v]) for k, v in whole.items() if k != "largest"}
    state["slots"][name] = {**whole, **stacked}
    with pytest.raises(ValueError, match=r"is of \(3,\); got scales of \(2, 3\)"):
        start.with_state(state)
    for kind in (mpx.quantization.RecipeScaling, mpx.AbstractLossScaling):
        with pytest.raises(ValueError, match="init_scaling.*with_state"):
            kind.from_state_dict(start.state_dict())


def test_a_state_goes_with_batches_of_one_row_and_more(inputs):
    """Whichever it was made with; one row is not quantized, and moves no scale."""
    params, x = inputs
    scaling, of_one = (mpx.init_scaling(loss, params, b) for b in (x, x[:1]))
    assert jax.tree.structure(scaling) == jax.tree.structure(of_one)
    after = step(loss, scaling, params, x).scaling
    with pytest.warns(UserWarning, match="data has at most one row here"):
        again = step(loss, after, params, x[:1])
    assert again.finite and np.isfinite(again.value)
    old, new = after.scales_by_weight(), again.scaling.scales_by_weight()
    assert old and jax.tree.all(jax.tree.map(np.array_equal, old, new))
    assert relative_error(again.value, loss.__wrapped__(params, x[:1])) < 0.02


def test_frozen_scales_for_evaluation(inputs, start):
    params, scaling, _ = train(start, *inputs, 3)
    x = inputs[1]
    evaluate = jax.jit(lambda s, x: mpx.inference(loss, s)(params, x))
    value = evaluate(scaling, x)
    assert value == pytest.approx(float(step(loss, scaling, params, x).value), rel=1e-2)
    assert float(evaluate(start, x)) != float(value)
    refused = pytest.raises(TypeError, match="loss scaling of a run; got")
    with unchecked_annotations(), refused:
        mpx.inference(loss, 8.0)


@pytest.mark.parametrize("recipe", [None, mpx.Float8CurrentScaling()])
def test_one_line_evaluates_in_every_precision(recipe, inputs):
    """Where a recipe keeps no state, a frozen function is the function."""
    rules = None if recipe is None else EVERY
    func = mpx.autocast(loss.__wrapped__, recipe=recipe, rules=rules)
    scaling = mpx.init_scaling(func, *inputs)
    frozen = mpx.inference(func, scaling)
    assert same_bits(*jax.jit(lambda *x: (frozen(*x), func(*x)))(*inputs))
    programs = [str(jax.make_jaxpr(f)(*inputs)) for f in (frozen, func)]
    assert programs[0] == programs[1]


def test_another_loss_scaling_leaves_what_recipes_learned(inputs, start):
    params, scaling, _ = train(start, *inputs, 3)
    wanted = mpx.DynamicLossScaling(4.0)
    changed = scaling.with_loss(wanted)
    assert float(changed.loss_scale) == 4 and int(changed.steps) == 0
    assert same_bits(changed.scales, scaling.scales)
    values = [step(loss, s, params, inputs[1]).value for s in (changed, scaling)]
    assert same_bits(*values)
    assert mpx.NoLossScaling().with_loss(wanted) is wanted
    for wrong, owner in itertools.product((scaling, 4.0), (scaling, wanted)):
        refused = pytest.raises(TypeError, match="without a state")
        with unchecked_annotations(), refused:
            owner.with_loss(wrong)


def test_one_trace_for_many_steps(inputs):
    params, x = inputs
    traces = []

    @autocast
    def func(params, x):
        traces.append(1)
        return forward(params, x).sum()

    scaling = mpx.init_scaling(func, params, x)
    traces.clear()
    run = jax.jit(lambda s, x: step(func, s, params, x).scaling)
    for _ in range(3):
        scaling = run(scaling, x)
    assert len(traces) == 1 and int(scaling.record.steps) == 3


@pytest.mark.slow
def test_a_warm_start_is_current_scaling(inputs):
    cold, warm, current = (
        step(func, mpx.init_scaling(func, *inputs), *inputs)
        for func in (
            mpx.autocast(loss.__wrapped__, recipe=recipe, rules=EVERY)
            for recipe in (RECIPE, WARM, mpx.Float8CurrentScaling())
        )
    )
    assert same_bits(warm.grads, current.grads)
    assert not same_bits(cold.grads, current.grads)
    # From the second step on there is no difference.
    after = [result.scaling.scales[0].scale for result in (cold, warm)]
    assert np.allclose(*after, rtol=0.1) and np.all(after[1] > 0)


@functools.cache
def deep(length):
    def loss(p, x, size):
        return size * jnp.mean(jax.lax.scan(layer, x, p["layers"])[0] @ p["out"]) ** 2

    def layer(x, w):
        return jnp.tanh(x @ w), None

    recipe = mpx.DelayedScaling(amax_history_len=length)
    keys = jax.random.split(jax.random.key(0), 3)
    layers = jax.random.normal(keys[0], (12, N, N)) / N**0.5
    p = {"layers": layers, "out": jax.random.normal(keys[1], (N, 1)) / N**0.5}
    x = jax.random.normal(keys[-1], (4 * N, N))
    func, exact = mpx.autocast(loss, recipe=recipe), jax.grad(loss)

    @jax.jit
    def step(scaling, size):
        result = mpx.value_and_grad(func, scaling)(p, x, size)
        found, right = (g["layers"][0] for g in (result.grads, exact(p, x, size)))
        error = jnp.linalg.norm(found - right) / jnp.linalg.norm(right)
        return result.scaling, error

    return mpx.init_scaling(func, p, x, 1.0), step


@pytest.mark.parametrize("length", [4, 1])
def test_small_gradients_arrive_in_all_layers_in_the_second_step(length):
    scaling, step = deep(length)
    errors = []
    for size in [1e-6] * 3 + [1e-16] * 8:  # too small for all scales that are known
        scaling, error = step(scaling, size)
        errors.append(float(error))
    assert errors[0] == 1  # it is zero
    assert max(errors[1:3]) < 0.5
    if length > 1:
        # As soon as the amaxes of larger gradients have left the histories.
        assert errors[3] > 0.99 and max(errors[-3:]) < 0.5


def test_a_step_without_gradients_changes_no_scale():
    scaling, step = deep(4)
    for size in [1e-6] * 2 + [0.0] * 6:
        before, (scaling, _) = scaling, step(scaling, size)
    of_gradients = (s.scales[0].scale[:, 2] for s in (scaling, before))
    assert same_bits(*of_gradients)
    assert (scaling.scales[0].scale[:, 2] > 1e6).all()


def test_full_precision_control_keeps_the_state(inputs, start):
    result = step(loss, start, *inputs, use_mixed_precision=False)
    np.testing.assert_allclose(result.value, jax.jit(loss.__wrapped__)(*inputs), 1e-6)
    assert same_bits(result.scaling.scales, start.scales)
    assert int(result.scaling.record.steps) == 1


def test_weights_are_quantized_once_for_all_micro_batches(inputs, start):
    """XLA takes what does not change out of the loop: nothing of a weight's shape."""
    compiled = jax.jit(lambda s: step(loss, s, *inputs, accumulate=4).grads)
    text = compiled.lower(start).compile().as_text()
    programs = dict(re.findall(r"^(%[\w.-]+) [^\n]*{\n(.*?)^}", text, re.S | re.M))
    waiting = re.findall(r"body=(%[\w.-]+)", text)
    assert waiting
    inside = ""
    while waiting:
        program = programs.pop(waiting.pop(), "")
        inside += program
        waiting += re.findall(r"(?:calls|to_apply|body)=(%[\w.-]+)", program)
    rounded = set(re.findall(r"u8\[([\d,]+)\]", inside))
    assert rounded >= {f"{N // 2},{N}", f"{N // 2},{2 * N}"}
    assert not rounded & {f"{N},{2 * N}", f"{2 * N},{N}", f"{N},{N}"}


# --- A recipe of somebody else --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Own(mpx.quantization.AbstractRecipe):
    """Has a state as `mpx.DelayedScaling` has one, and does not inherit from it."""

    has_state = True
    warm_start = RECIPE.warm_start
    amax_compute_algo = RECIPE.amax_compute_algo
    init, update = RECIPE.init, RECIPE.update
    _scale, _without_state = RECIPE._scale, RECIPE._without_state

    def _quantizer(self, role, leg):
        return RECIPE.quantizer(role, leg=leg)


def in_a_loop(params, x):
    square, x_in = jax.lax.stop_gradient((params["square"], x))
    turn = lambda c: (c[0] + 1, c[1] @ square)  # noqa: E731
    _, y = jax.lax.while_loop(lambda c: c[0] < 2, turn, (0, x_in))
    return jnp.sum(forward(params, x) ** 2) / N + jnp.sum(y)


def test_a_recipe_with_a_state_need_not_inherit_from_delayed_scaling(inputs):
    params, x = inputs
    args = params | {"square": jnp.eye(N)}, x
    recipes = RECIPE, Own()
    funcs = [mpx.autocast(in_a_loop, recipe=r, rules=EVERY) for r in recipes]
    scalings = [mpx.init_scaling(f, *args) for f in funcs]
    for _ in range(2):
        results = [step(f, s, *args) for f, s in zip(funcs, scalings, strict=True)]
        scalings = [result.scaling for result in results]
        assert same_bits(*(result.grads for result in results))
        assert same_bits(*(scaling.state_dict() for scaling in scalings))
    with pytest.raises(ValueError, match="`Own`.*needs a state"):
        funcs[1](*args)
    assert np.isfinite(mpx.inference(funcs[1], scalings[1])(*args))


# --- Targets, through which no gradient goes ------------------------------------------


def looping(q):
    turn = lambda c: (c[0] + 1, 0.9 * c[1])  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < 3, turn, (0, q))[1]


def in_scan(q):
    return jax.lax.scan(lambda c, _: (c + looping(q), None), q, length=2)[0]


SEARCHES = {
    "callback": lambda q: jax.pure_callback(np.sin, jax.typeof(q), q),
    "equinox": eqxi.nondifferentiable_backward,
    "checkpoint": jax.checkpoint(looping),
    "scan": in_scan,
}


@pytest.mark.parametrize("search", slow_but([], SEARCHES))
def test_products_of_stopped_weights_go_into_what_has_no_derivative(inputs, search):
    def target(params, x):
        return SEARCHES[search](forward(jax.lax.stop_gradient(params), x))

    def loss_to(target):
        loss = lambda *a: jnp.sum((forward(*a) - target(*a)) ** 2) / N  # noqa: E731
        return mpx.autocast(loss, recipe=WARM, rules=EVERY)

    of_the_moment = mpx.autocast(target, recipe=mpx.Float8CurrentScaling(), rules=EVERY)
    known = of_the_moment(*inputs)
    results = []
    for func in (loss_to(target), loss_to(lambda params, x: known)):
        first = step(func, mpx.init_scaling(func, *inputs), *inputs)
        results.append((first.grads, first.scaling.scales_by_weight()))
        step(func, first.scaling, *inputs)
    assert results[0][1].keys() == results[1][1].keys()
    assert relative_error(*results) < 2 * ULP


def test_a_gradient_through_a_while_loop_is_an_error_as_without_a_recipe(inputs):
    func = autocast(lambda params, x: jnp.sum(looping(forward(params, x))))
    scaling = mpx.init_scaling(func, *inputs)
    with pytest.raises(ValueError, match="does not work for lax.while_loop"):
        mpx.filter_grad(func, scaling)(*inputs)
