"""The state of recipes is that of the function, and what a run can reach.

Nothing here compiles a step: functions are traced, and states are made by hand.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

from ..step.cases import same_bits

RECIPE = mpx.DelayedScaling(amax_history_len=4)
ROLES = tuple(mpx.quantization.Role)
W, X = jnp.ones((16, 16)), jnp.ones((16, 16))


def plain(w, x):
    return jnp.mean(x @ w)


def with_recipe(recipe, **options):
    return mpx.autocast(plain, recipe=recipe, **options)


@functools.cache
def state_of(recipe=RECIPE, **options):
    return mpx.init_scaling(with_recipe(recipe, **options), W, X)


def after(scaling, *amaxes):
    """The state after good steps with these amaxes, in every role."""
    for amax in amaxes:
        seen = tuple(
            jnp.asarray(np.full(s.scale.shape, amax, np.float32))
            for s in scaling.scales
        )
        scaling = adjusted(dataclasses.replace(scaling, amaxes=seen))
    return scaling


@jax.jit
def adjusted(scaling):
    return scaling.adjust(True)


def trace(func, scaling, **options):
    call = lambda s: mpx.filter_grad(func, s, **options)(W, X)  # noqa: E731
    return jax.eval_shape(call, scaling)


def most_recent(history):
    return history[0]


CHANGED = {
    "format": mpx.DelayedScaling(fp8_format=mpx.Format.E4M3, amax_history_len=4),
    "margin": mpx.DelayedScaling(margin=1, amax_history_len=4),
    "history": mpx.DelayedScaling(amax_history_len=8),
    "algorithm": mpx.DelayedScaling(
        amax_compute_algo="most_recent", amax_history_len=4
    ),
    "function": mpx.DelayedScaling(amax_compute_algo=most_recent, amax_history_len=4),
    "warm start": mpx.DelayedScaling(warm_start=True, amax_history_len=4),
}


class TestTheStateIsThatOfTheFunction:
    """A state that was made for another recipe is refused, and can be taken over."""

    @pytest.mark.parametrize("name", CHANGED)
    def test_another_option_is_an_error_that_shows_both(self, name):
        func, scaling = with_recipe(CHANGED[name]), state_of()
        with pytest.raises(ValueError) as error:
            trace(func, scaling)
        text = str(error.value)
        field = {"format": "fp8_format", "history": "amax_history_len"}.get(name, "")
        assert "for `mpx.DelayedScaling(" in text and field in text
        assert "made for `mpx.DelayedScaling(amax_history_len=4)`" in text
        assert "mpx.init_scaling(func, model, ...).with_state(scaling)" in text

    @pytest.mark.parametrize("name", CHANGED)
    def test_with_state_takes_the_numbers_over(self, name):
        recipe = CHANGED[name]
        moved = state_of(recipe).with_state(after(state_of(), 2.0, 8.0))
        trace(with_recipe(recipe), moved)
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
        old = after(state_of(mpx.DelayedScaling(amax_history_len=length)), 7.0)
        narrow = mpx.DelayedScaling(amax_history_len=1, fp8_format=mpx.Format.E4M3)
        moved = state_of(narrow).with_state(old).scales[0].scale
        assert np.array_equal(moved, np.full((1, 3), np.float32(448) / np.float32(7)))

    @pytest.mark.parametrize("warm", [False, True])
    def test_a_scale_that_no_amax_made_is_the_first_one(self, warm):
        new = mpx.DelayedScaling(amax_history_len=4, warm_start=warm, margin=2)
        old = mpx.DelayedScaling(amax_history_len=4, warm_start=not warm)
        moved = state_of(new).with_state(state_of(old)).scales[0].scale
        assert np.array_equal(moved, np.full((1, 3), 0.0 if warm else 1.0))

    def test_converted_scales_stay_in_range(self):
        wide = mpx.DelayedScaling(amax_history_len=4, margin=-64)
        old = after(state_of(wide), 1e-20)
        assert float(old.scales[0].scale.max()) == 2.0**126
        moved = state_of(mpx.DelayedScaling(amax_history_len=4, margin=64))
        scale = moved.with_state(old).scales[0].scale
        assert np.all((scale >= 2.0**-126) & (scale <= 2.0**126))
        back = state_of(wide).with_state(moved.with_state(old)).scales[0].scale
        assert np.array_equal(back, old.scales[0].scale)

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
    def test_a_function_without_a_state_is_an_error(self, wrap):
        current = wrap(with_recipe(mpx.Float8CurrentScaling()))
        match = (
            r"made for `mpx.DelayedScaling\(amax_history_len=4\)`, but the function "
            r"quantizes by `mpx.Float8CurrentScaling\(\)`.*init_scaling"
        )
        with pytest.raises(ValueError, match=match):
            trace(current, state_of())

    def test_a_function_without_autocast_is_an_error(self):
        with pytest.raises(ValueError, match="quantizes nothing.*mpx.init_scaling"):
            trace(plain, state_of(), policy="bfloat16")

    def test_a_recipe_of_a_rule_or_a_region_is_compared(self):

        def deep(w, x, context=contextlib.nullcontext):
            with jax.named_scope("inner"), context():
                x = x @ w
            return plain(w, x @ w)

        other = CHANGED["margin"]
        region = functools.partial(mpx.autocast, recipe=other)
        rules = mpx.Rules(mpx.Rule(other, scope="inner"))
        for func in (
            mpx.autocast(lambda w, x: deep(w, x, region), recipe=RECIPE),
            mpx.autocast(deep, recipe=RECIPE, rules=rules),
        ):
            state = mpx.init_scaling(mpx.autocast(deep, recipe=RECIPE), W, X)
            match = r"uses `mpx.DelayedScaling\(margin=1"
            with pytest.raises(ValueError, match=match):
                trace(func, state)

    def test_programs_that_are_kept_are_compared_again(self):
        """A layer that was rewritten for one state is not used with another."""
        layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
        func = mpx.autocast(lambda w, x: jnp.mean(layer(w, x)), recipe=RECIPE)
        mine = mpx.init_scaling(func, W, X)
        trace(func, mine)
        other = mpx.autocast(
            lambda w, x: jnp.mean(layer(w, x)), recipe=CHANGED["margin"]
        )
        with pytest.raises(ValueError, match="with_state"):
            trace(func, mpx.init_scaling(other, W, X))

    def test_switched_off_the_state_stays(self):
        """A control run in full precision, with the state of the run."""
        func = with_recipe(RECIPE)
        with mpx.autocast(enabled=False, ambient=True):
            trace(func, state_of())
        trace(func, state_of(), use_mixed_precision=False)

    def test_calls_that_were_not_foreseen_are_an_error(self):
        func = with_recipe(RECIPE)
        twice = lambda w, x: func(w, x) + func(w, 2 * x)  # noqa: E731
        scaling = mpx.init_scaling(func, W, X)
        with pytest.raises(
            ValueError, match="found 1 autocast calls, this step makes 2"
        ):
            trace(twice, scaling, policy="full")
        assert mpx.inference(twice, after(scaling, 2.0))(W, X).shape == ()

    def test_frozen_scales_are_compared(self):
        scaling = state_of()
        with pytest.raises(ValueError, match=r"margin=1.*made for.*with_state"):
            mpx.inference(with_recipe(CHANGED["margin"]), scaling)(W, X)
        current = with_recipe(mpx.Float8CurrentScaling())
        with pytest.raises(ValueError, match="must have the state of .*directly"):
            mpx.inference(current, scaling)(W, X)
        # In full precision it is the function.
        with mpx.autocast(enabled=False, ambient=True):
            assert mpx.inference(with_recipe(RECIPE), scaling)(W, X) == plain(W, X)


def changed(state, field, index, value):
    """A saved state with another number in its only slot."""
    (name,) = state["slots"]
    array = np.array(state["slots"][name][field])
    array[index] = value
    slot = {**state["slots"][name], field: array}
    return {**state, "slots": {name: slot}}


class TestWithStateTakesWhatARunCanReach:
    """And says what it refuses."""

    @pytest.mark.parametrize(
        "value", [np.nan, 0.0, -0.0, -2.0, np.inf, -np.inf, 2.0**-127, 2.0**127]
    )
    def test_scales(self, value):
        saved = after(state_of(), 3.0).state_dict()
        with pytest.raises(ValueError, match="scales between 2.-126 and 2.126.*slot"):
            state_of().with_state(changed(saved, "scale", 1, value))

    @pytest.mark.parametrize("value", [np.nan, -1.0, np.inf, -np.inf])
    def test_amaxes(self, value):
        saved = after(state_of(), 3.0).state_dict()
        with pytest.raises(ValueError, match="amaxes that are finite and at least 0"):
            state_of().with_state(changed(saved, "amax_history", (2, 1), value))

    @pytest.mark.parametrize(
        "value", [0.0, np.nan, -448.0, np.inf, 1.0, 450.0, 2.0**127]
    )
    def test_largest_numbers(self, value):
        saved = after(state_of(), 3.0).state_dict()
        with pytest.raises(ValueError, match="'largest'; got"):
            state_of().with_state(changed(saved, "largest", 0, value))

    def test_edges_are_taken(self):
        saved = after(state_of(), 3.0).state_dict()
        for value in (2.0**-126, 2.0**126):
            moved = state_of().with_state(changed(saved, "scale", 1, value))
            assert float(moved.scales[0].scale[0, 1]) == value

    def test_a_warm_start_may_wait(self):
        """A scale of 0 stands for the first step, before which nothing was seen."""
        warm = CHANGED["warm start"]
        fresh = state_of(warm)
        assert same_bits(fresh.with_state(fresh), fresh)
        saved = after(fresh, 3.0).state_dict()
        with pytest.raises(ValueError, match="before the first step of a warm start"):
            fresh.with_state(changed(saved, "scale", 1, 0.0))

    @pytest.mark.parametrize("field", ["amax_history", "scale", "largest"])
    def test_a_missing_field_is_named(self, field):
        saved = state_of().state_dict()
        (name,) = saved["slots"]
        del saved["slots"][name][field]
        match = rf"the fields of the slot ' \(16x16\)'.*missing: `{field}`"
        with pytest.raises(ValueError, match=match):
            state_of().with_state(saved)

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

    @pytest.mark.parametrize("dtype", ["float64", "int32", "complex64", "bfloat16"])
    @pytest.mark.parametrize("field", ["amax_history", "scale", "largest"])
    def test_another_dtype_is_refused(self, field, dtype):
        saved = state_of().state_dict()
        (name,) = saved["slots"]
        slot = saved["slots"][name]
        slot[field] = slot[field].astype(jnp.dtype(dtype))
        with pytest.raises(ValueError, match=f"float32 for '{field}'.*{dtype}"):
            state_of().with_state(saved)

    @pytest.mark.parametrize(
        ("field", "shape"),
        [
            ("scale", (2,)),
            ("amax_history", (3,)),
            ("amax_history", (3, 0)),
            ("largest", ()),
        ],
    )
    def test_another_shape_is_refused(self, field, shape):
        saved = state_of().state_dict()
        (name,) = saved["slots"]
        saved["slots"][name][field] = np.ones(shape, np.float32)
        with pytest.raises(ValueError, match="needs arrays of one slot"):
            state_of().with_state(saved)

    @pytest.mark.parametrize("name", ["steps", "skipped", "last_finite"])
    def test_counters(self, name):
        saved = state_of().state_dict()
        saved["loss"][f"record.{name}"] = np.int32(-1)
        with pytest.raises(ValueError, match=f"`record.{name}` -1"):
            state_of().with_state(saved)

    def test_a_state_of_version_1_loses_its_infinities(self):
        """Which an earlier mpx kept, and which held the scale for a whole history."""
        old = changed(
            after(state_of(), 3.0).state_dict(), "amax_history", (0, 3), np.inf
        )
        moved = state_of().with_state({**old, "version": 1})
        assert np.array_equal(moved.scales[0].amax_history[0, 0], [0, 0, 0, 0])
        assert np.array_equal(moved.scales[0].amax_history[0, 1], [0, 0, 0, 3])
        old = changed(old, "amax_history", (0, 3), np.nan)
        with pytest.raises(ValueError, match="amaxes"):
            state_of().with_state({**old, "version": 1})

    def test_it_is_no_mapping(self):
        with pytest.raises(TypeError, match="needs a `RecipeScaling` or its"):
            state_of().with_state([1])


class TestCheck:
    """`mpx.check` looks into the state of recipes, too."""

    def test_the_floor(self):
        scaling = state_of(dtype=jnp.float16)
        floor = mpx.DynamicLossScaling(1.0).adjust(False)
        with pytest.raises(
            FloatingPointError, match="at the floor of the loss scale, 1"
        ):
            mpx.check(dataclasses.replace(scaling, loss=floor))
        mpx.check(scaling)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0])
    def test_scales_that_no_run_can_reach(self, value):
        scaling = state_of()
        bad = dataclasses.replace(
            scaling.scales[0], scale=scaling.scales[0].scale.at[0, 2].set(value)
        )
        with pytest.raises(FloatingPointError, match=r"slot .*16x16"):
            mpx.check(dataclasses.replace(scaling, scales=(bad,)))

    @pytest.mark.parametrize("recipe", [RECIPE, CHANGED["warm start"]])
    def test_is_silent_from_the_start(self, recipe):
        mpx.check(state_of(recipe))
        mpx.check(after(state_of(recipe), 1.0, 0.0, 3e38, 1e-38))
