"""The state of recipes is that of the function, and what a run can reach.

Functions are traced, but for one step that is compiled; states are made by hand.
"""

import contextlib
import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..helpers import unchecked_annotations
from ..step.cases import same_bits

RECIPE = mpx.DelayedScaling(amax_history_len=4)
ROLES = tuple(mpx.quantization.Role)
W, X = jnp.ones((16, 16)), jnp.ones((16, 16))


def plain(w, x):
    return jnp.mean(x @ w)


@functools.cache
def state_of(recipe=RECIPE, **options):
    return mpx.init_scaling(mpx.autocast(plain, recipe=recipe, **options), W, X)


def after(scaling, *amaxes):
    for amax in amaxes:
        shapes = (s.scale.shape for s in scaling.scales)
        seen = tuple(jnp.asarray(np.full(s, amax, np.float32)) for s in shapes)
        scaling = adjusted(dataclasses.replace(scaling, amaxes=seen))
    return scaling


@jax.jit
def adjusted(scaling):
    return scaling.adjust(True)


def trace(func, scaling, **options):
    call = lambda s: mpx.filter_grad(func, s, **options)(W, X)  # noqa: E731
    return jax.eval_shape(call, scaling)


with_recipe = functools.partial(mpx.autocast, plain)
delayed = functools.partial(mpx.DelayedScaling, amax_history_len=4)


def most_recent(history):
    return history[0]


CHANGED = {
    "format": delayed(fp8_format=mpx.Format.E4M3),
    "margin": delayed(margin=1),
    "history": delayed(amax_history_len=8),
    "algorithm": delayed(amax_compute_algo="most_recent"),
    "function": delayed(amax_compute_algo=most_recent),
    "warm start": delayed(warm_start=True),
}
CURRENT = mpx.Float8CurrentScaling()


class TestTheStateIsThatOfTheFunction:
    @pytest.mark.parametrize("name", CHANGED)
    def test_another_option_is_an_error_that_shows_both(self, name):
        with pytest.raises(ValueError) as error:
            trace(with_recipe(recipe=CHANGED[name]), state_of())
        text = str(error.value)
        field = {"format": "fp8_format", "history": "amax_history_len"}.get(name, "")
        assert "for `mpx.DelayedScaling(" in text and field in text
        assert "made for `mpx.DelayedScaling(amax_history_len=4)`" in text
        assert "mpx.init_scaling(func, model, ...).with_state(scaling)" in text

    @pytest.mark.parametrize("name", CHANGED)
    def test_with_state_takes_the_numbers_over(self, name):
        recipe = CHANGED[name]
        moved = state_of(recipe).with_state(after(state_of(), 2.0, 8.0))
        trace(with_recipe(recipe=recipe), moved)
        # What a run of this recipe would have now, but for the history's length.
        own = after(state_of(recipe), 2.0, 8.0).scales[0].scale
        if name not in ("algorithm", "function"):
            assert same_bits(moved.scales[0].scale, own)
        assert same_bits(after(moved, 4.0).scales, after(moved, 4.0).scales)
        history = moved.scales[0].amax_history[..., -2:]
        assert np.array_equal(history, np.broadcast_to([2.0, 8.0], history.shape))

    @pytest.mark.parametrize("length", [1, 4])
    def test_a_scale_is_converted_also_without_a_history(self, length):
        """A history of one amax is empty after each step."""
        old = after(state_of(delayed(amax_history_len=length)), 7.0)
        narrow = delayed(amax_history_len=1, fp8_format=mpx.Format.E4M3)
        moved = state_of(narrow).with_state(old).scales[0].scale
        assert np.array_equal(moved, np.full((1, 3), np.float32(448) / np.float32(7)))

    @pytest.mark.parametrize("warm", [False, True])
    def test_a_scale_that_no_amax_made_is_the_first_one(self, warm):
        new, old = delayed(warm_start=warm, margin=2), delayed(warm_start=not warm)
        moved = state_of(new).with_state(state_of(old)).scales[0].scale
        assert np.array_equal(moved, np.full((1, 3), 0.0 if warm else 1.0))

    def test_converted_scales_stay_in_range(self):
        wide = state_of(delayed(margin=-64))
        old = after(wide, 1e-20)
        assert float(old.scales[0].scale.max()) == 2.0**126
        moved = state_of(delayed(margin=64)).with_state(old)
        scale = moved.scales[0].scale
        assert np.all((scale >= 2.0**-126) & (scale <= 2.0**126))
        back = wide.with_state(moved).scales[0].scale
        assert np.array_equal(back, old.scales[0].scale)

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
    def test_a_function_without_a_state_is_an_error(self, wrap):
        match = (
            r"made for `mpx.DelayedScaling\(amax_history_len=4\)`, but the function "
            r"quantizes by `mpx.Float8CurrentScaling\(\)`.*init_scaling"
        )
        with pytest.raises(ValueError, match=match):
            trace(wrap(with_recipe(recipe=CURRENT)), state_of())

    def test_a_function_without_autocast_is_an_error(self):
        with pytest.raises(ValueError, match="quantizes nothing.*mpx.init_scaling"):
            trace(plain, state_of(), policy="bfloat16")

    def test_a_recipe_of_a_rule_or_a_region_is_compared(self):
        def deep(w, x, context=contextlib.nullcontext):
            with jax.named_scope("inner"), context():
                x = x @ w
            return plain(w, x @ w)

        autocast = functools.partial(mpx.autocast, recipe=RECIPE)
        region = functools.partial(mpx.autocast, recipe=CHANGED["margin"])
        rules = mpx.Rules(mpx.Rule(CHANGED["margin"], scope="inner"))
        state = mpx.init_scaling(autocast(deep), W, X)
        by_region = autocast(lambda w, x: deep(w, x, region))
        for func in (by_region, autocast(deep, rules=rules)):
            with pytest.raises(ValueError, match=r"uses `mpx.DelayedScaling\(margin=1"):
                trace(func, state)

    def test_programs_that_are_kept_are_compared_again(self):
        """A layer that was rewritten for one state is not used with another."""
        layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
        func, other = (
            mpx.autocast(lambda w, x: jnp.mean(layer(w, x)), recipe=recipe)
            for recipe in (RECIPE, CHANGED["margin"])
        )
        trace(func, mpx.init_scaling(func, W, X))
        with pytest.raises(ValueError, match="with_state"):
            trace(func, mpx.init_scaling(other, W, X))

    def test_switched_off_the_state_stays(self):
        """A control run in full precision, with the state of the run."""
        func = with_recipe(recipe=RECIPE)
        with mpx.autocast(enabled=False, ambient=True):
            trace(func, state_of())
            # A frozen function is the function then.
            assert mpx.inference(func, state_of())(W, X) == plain(W, X)
        trace(func, state_of(), use_mixed_precision=False)

    def test_calls_that_were_not_foreseen_are_an_error(self):
        func = with_recipe(recipe=RECIPE)
        twice = lambda w, x: func(w, x) + func(w, 2 * x)  # noqa: E731
        match = "found 1 autocast calls, this step makes 2"
        with pytest.raises(ValueError, match=match):
            trace(twice, state_of(), policy="full")
        assert mpx.inference(twice, after(state_of(), 2.0))(W, X).shape == ()

    def test_frozen_scales_are_compared(self):
        with pytest.raises(ValueError, match=r"margin=1.*made for.*with_state"):
            mpx.inference(with_recipe(recipe=CHANGED["margin"]), state_of())(W, X)
        with pytest.raises(ValueError, match="must have the state of .*directly"):
            mpx.inference(with_recipe(recipe=CURRENT), state_of())(W, X)


def having(field, index, value):
    def change(slot):
        array = np.array(slot[field])
        array[index] = value
        slot[field] = array

    return change


def with_another_dtype(field, dtype):
    return lambda slot: slot.update({field: slot[field].astype(jnp.dtype(dtype))})


def with_another_shape(field, shape):
    return lambda slot: slot.update({field: np.ones(shape, np.float32)})


def saved(change=lambda slot: None, scaling=None):
    state = (after(state_of(), 3.0) if scaling is None else scaling).state_dict()
    (slot,) = state["slots"].values()
    change(slot)
    return state


SCALES = np.nan, 0.0, -0.0, -2.0, np.inf, -np.inf, 2.0**-127, 2.0**127
LARGEST = 0.0, np.nan, -448.0, np.inf, 1.0, 450.0, 2.0**127
FIELDS = "amax_history", "scale", "largest"
DTYPES = "float64", "int32", "complex64", "bfloat16"
SHAPES = [("scale", (2,)), ("amax_history", (3,)), ("amax_history", (3, 0))]
SHAPES += [("largest", ())]
UNREACHED = [
    *((having("scale", 1, x), "scales between 2.-126 and 2.126.*slot") for x in SCALES),
    *(
        (having("amax_history", (2, 1), x), "amaxes that are finite and at least 0")
        for x in (np.nan, -1.0, np.inf, -np.inf)
    ),
    *((having("largest", 0, x), "'largest'; got") for x in LARGEST),
    *(
        (
            lambda slot, field=field: slot.pop(field),
            rf"the fields of the slot ' \(16x16\)'.*missing: `{field}`",
        )
        for field in FIELDS
    ),
    *(
        (with_another_dtype(field, dtype), f"float32 for '{field}'.*{dtype}")
        for field in FIELDS
        for dtype in DTYPES
    ),
    *((with_another_shape(*case), "needs arrays of one slot") for case in SHAPES),
]


class TestWithStateTakesWhatARunCanReach:
    @pytest.mark.parametrize(("change", "match"), UNREACHED)
    def test_what_no_run_reaches(self, change, match):
        state = saved(change)
        with pytest.raises(ValueError, match=match):
            state_of().with_state(state)

    def test_edges_are_taken(self):
        for value in (2.0**-126, 2.0**126):
            moved = state_of().with_state(saved(having("scale", 1, value)))
            assert float(moved.scales[0].scale[0, 1]) == value

    def test_a_warm_start_may_wait(self):
        """A scale of 0 stands for the first step, before which nothing was seen."""
        fresh = state_of(CHANGED["warm start"])
        assert same_bits(fresh.with_state(fresh), fresh)
        state = saved(having("scale", 1, 0.0), after(fresh, 3.0))
        with pytest.raises(ValueError, match="before the first step of a warm start"):
            fresh.with_state(state)

    @pytest.mark.parametrize("key", ["loss", "slots"])
    def test_a_missing_part_is_named(self, key):
        saved = state_of().state_dict()
        for state in ({k: v for k, v in saved.items() if k != key}, {**saved, key: 3}):
            with pytest.raises(ValueError, match=key):
                state_of().with_state(state)

    @pytest.mark.parametrize("value", [None, 3, np.ones(3)])
    def test_a_slot_is_a_dictionary(self, value):
        saved = state_of().state_dict()
        (name,) = saved["slots"]
        with pytest.raises(ValueError, match="a dictionary for the slot"):
            state_of().with_state({**saved, "slots": {name: value}})

    @pytest.mark.parametrize("name", ["steps", "skipped", "last_finite"])
    def test_counters(self, name):
        saved = state_of().state_dict()
        saved["loss"][f"record.{name}"] = np.int32(-1)
        with pytest.raises(ValueError, match=f"`record.{name}` -1"):
            state_of().with_state(saved)

    def test_a_state_of_version_1_loses_its_infinities(self):
        """Which an earlier mpx kept, and which held the scale for a whole history."""
        old = saved(having("amax_history", (0, 3), np.inf)) | {"version": 1}
        moved = state_of().with_state(old)
        assert np.array_equal(moved.scales[0].amax_history[0, 0], [0, 0, 0, 0])
        assert np.array_equal(moved.scales[0].amax_history[0, 1], [0, 0, 0, 3])
        old = saved(having("amax_history", (0, 3), np.nan)) | {"version": 1}
        with pytest.raises(ValueError, match="amaxes"):
            state_of().with_state(old)

    def test_it_is_no_mapping(self):
        refused = pytest.raises(TypeError, match="needs a loss scaling or its")
        with unchecked_annotations(), refused:
            state_of().with_state([1])


class TestCheck:
    def test_the_floor(self):
        scaling = state_of(dtype=jnp.float16)
        floor = mpx.DynamicLossScaling(1.0).adjust(False)
        match = "at the floor of the loss scale, 1"
        with pytest.raises(FloatingPointError, match=match):
            mpx.check(dataclasses.replace(scaling, loss=floor))
        mpx.check(scaling)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0])
    def test_scales_that_no_run_can_reach(self, value):
        (scales,) = state_of().scales
        bad = dataclasses.replace(scales, scale=scales.scale.at[0, 2].set(value))
        with pytest.raises(FloatingPointError, match=r"slot .*16x16"):
            mpx.check(dataclasses.replace(state_of(), scales=(bad,)))

    @pytest.mark.parametrize("recipe", [RECIPE, CHANGED["warm start"]])
    def test_is_silent_from_the_start(self, recipe):
        mpx.check(state_of(recipe))
        mpx.check(after(state_of(recipe), 1.0, 0.0, 3e38, 1e-38))


# --- A loss scaling that holds no scales ----------------------------------------------


@mpx.autocast(recipe=mpx.DelayedScaling())
def loss(weights, x):
    return jnp.mean((x @ weights[0] @ weights[1]) ** 2)


def ambient_loss(layer, x):
    with mpx.autocast(recipe=mpx.DelayedScaling(), ambient=True):
        return jnp.sum(jax.vmap(layer)(x) ** 2)


@pytest.mark.parametrize(
    ("call", "make", "is_ambient"),
    [
        ("mpx.filter_grad", mpx.filter_grad, False),
        ("mpx.filter_grad", mpx.filter_grad, True),
        ("mpx.filter_value_and_grad", mpx.filter_value_and_grad, True),
        ("mpx.calculate_scaled_grad", mpx.calculate_scaled_grad, False),
        ("mpx.inference", mpx.inference, True),
        ("mpx.blame", mpx.blame, False),
    ],
)
def test_a_loss_scaling_without_scales_is_named(call, make, is_ambient):
    scaling = mpx.NoLossScaling() if is_ambient else mpx.DynamicLossScaling()
    func, args = loss, ((W, W), W)
    if is_ambient:
        layer = mpx.nn.Linear(16, 16, key=jax.random.key(0))
        func, args = ambient_loss, (layer, W)
    name = type(scaling).__name__
    match = f"`scaling` of `{call}` must contain"
    with pytest.raises(ValueError, match=match) as caught:
        make(func, scaling)(*args)
    text = str(caught.value)
    assert f"got `mpx.{name}`, which has none." in text
    assert "\n    scaling = mpx.init_scaling(func, model, ...)\n" in text
    assert (
        "    scaling = mpx.init_scaling(func, model, ...).with_state(scaling)\n" in text
    )
    if make is mpx.filter_grad:
        repaired = mpx.init_scaling(func, *args).with_state(scaling)
        assert eqx.filter_jit(lambda s: make(func, s)(*args).finite)(repaired)


def test_the_line_is_the_users_and_not_that_of_a_library():
    layer = eqx.nn.Linear(16, 16, key=jax.random.key(0))

    @mpx.autocast(recipe=mpx.DelayedScaling())
    def squared(layer, x):
        return jnp.mean(jax.vmap(jax.vmap(layer))(jnp.stack([x, x])) ** 2)

    with pytest.raises(ValueError, match=r"DelayedScaling` at \S*test_recipe_state"):
        squared(layer, W)


def test_rules_see_the_users_line_of_a_layer():
    layer = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    seen = []

    def is_here(operation):
        seen.append(operation.line)
        return False

    rule = mpx.Rule(mpx.Precision.FULL, primitive="dot_general", when=is_here)
    rules = mpx.Rules(rule)
    mpx.autocast(lambda m, x: jax.vmap(m)(x), rules=rules)(layer, W)
    assert seen and all("test_recipe_state.py:" in line for line in seen)
