"""Loss scaling: the sequences of the specification, an oracle, and exactness."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful

import mpx

from ..helpers import HALF, assert_same_bits, unscaled
from ..reference.loss_scaling import Oracle

KINDS = {
    "dynamic": lambda: mpx.DynamicLossScaling(2.0**10),
    "static": lambda: mpx.StaticLossScaling(2.0**10),
    "none": mpx.NoLossScaling,
}


def _scales(scaling, pattern):
    out = []
    for step in pattern:
        scaling = scaling.adjust(step == "1")
        out.append(float(scaling.loss_scale))
    return out


# The rows of the table of promises whose result is a sequence of scales.
_AT_16 = {"loss_scaling": 16, "hysteresis": 2}
ROWS = {
    "row2": ({"loss_scaling": 4, "period": 2}, "111111", "4 8 8 16 16 32"),
    "row3": ({"loss_scaling": 16, "period": 3}, "1101111", "16 16 8 8 8 16 16"),
    "row4": ({"loss_scaling": 8, "factor": 2, "backoff": 0.25}, "0", "2"),
    "row5": ({**_AT_16, "period": 3}, "000111100", "16 8 4 4 4 4 8 8 4"),
    "row6": (_AT_16, "010100", "16 16 16 16 16 8"),
    "row7": ({"loss_scaling": 4}, "00000000", "2 1 1 1 1 1 1 1"),
    "row8": (
        {"loss_scaling": 1, "min_loss_scaling": 0.25},
        "0000",
        "0.5 0.25 0.25 0.25",
    ),
    "row8-smallest": (
        {"loss_scaling": 1, "min_loss_scaling": 2.0**-126, "backoff": 2.0**-100},
        "000",
        f"{2.0**-100} {2.0**-126} {2.0**-126}",
    ),
    "row11": ({"loss_scaling": 2.0**15, "period": 1}, "11", "32768 32768"),
    "row11-configured": (
        {"loss_scaling": 2.0**15, "period": 1, "max_loss_scaling": 2.0**17},
        "111",
        "65536 131072 131072",
    ),
}


@pytest.mark.parametrize(("arguments", "pattern", "expected"), ROWS.values(), ids=ROWS)
def test_sequences(arguments, pattern, expected):
    scaling = mpx.DynamicLossScaling(**arguments)
    assert _scales(scaling, pattern) == [float(x) for x in expected.split()]


def test_row7_after_two_hundred_bad_steps_the_scale_recovers():
    """In PyTorch, Keras and jaxamp it is 0 by then, and stays 0."""
    scaling = mpx.DynamicLossScaling(2.0**15, 2.0**-126, period=1)
    scales = _scales(scaling, "0" * 200 + "1" * 3)
    assert scales[141:] == [2.0**-126] * 59 + [2.0**-125, 2.0**-124, 2.0**-123]
    assert 1 / scales[-4] == 2.0**126  # gradients can still be unscaled


@pytest.mark.parametrize("cap", [None, 2.0**126])
def test_row10_stays_finite(cap):
    scaling = mpx.DynamicLossScaling(
        1e38 if cap is None else 8e37, factor=16, period=1, max_loss_scaling=cap
    )
    for scale in _scales(scaling, "11111"):
        assert np.isfinite(scale) and scale <= 2.0**126


@pytest.mark.parametrize(
    ("start", "cap"),
    [(4, 2.0**15), (2.0**15, 2.0**15), (mpx.FLOAT16_MAX, 2.0**15), (2.0**20, 2.0**20)],
)
def test_row11_default_cap_is_a_power_of_two(start, cap):
    scaling = mpx.DynamicLossScaling(start)
    assert float(scaling.max_loss_scaling) == cap
    assert float(scaling.loss_scale) == min(start, cap)


_EXPONENTS = st.integers(-20, 20)
COUNTERS = "steps", "skipped", "skipped_in_a_row", "last_finite"


def _counts(state):
    return [int(getattr(state, name)) for name in COUNTERS]


class _Machine(stateful.RuleBasedStateMachine):
    @stateful.initialize(
        start=_EXPONENTS,
        below=st.integers(0, 6),
        above=st.integers(0, 6),
        growth=st.integers(1, 3),
        backoff=st.integers(1, 3),
        period=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
    )
    def begin(self, start, below, above, growth, backoff, period, hysteresis):
        start, floor, cap = 2.0**start, 2.0 ** (start - below), 2.0 ** (start + above)
        growth, same = 2.0**growth, {"backoff": 2.0**-backoff, "hysteresis": hysteresis}
        same["period"] = period
        self.oracle = Oracle(scale=start, floor=floor, cap=cap, growth=growth, **same)
        self.scaling = mpx.DynamicLossScaling(
            start, floor, growth, max_loss_scaling=cap, **same
        )

    @stateful.rule(pattern=st.lists(st.booleans(), min_size=1, max_size=8))
    def steps(self, pattern):
        for is_finite in pattern:
            self.oracle.step(is_finite)
            self.scaling = self.scaling.adjust(is_finite)
            self.compare(is_finite)

    @stateful.rule(by_place=st.booleans())
    def bad_batch(self, by_place):
        self.oracle.step(False, False)
        said = jnp.array([False, False]) if by_place else None
        loss = None if by_place else False
        self.scaling = self.scaling.adjust(False, places_finite=said, loss_finite=loss)
        self.compare(False)

    @stateful.rule(above=st.integers(0, 3))
    def set_by_hand(self, above):
        value = min(self.oracle.floor * 2.0**above, self.oracle.cap)
        self.oracle.scale, self.oracle.good = value, 0
        self.scaling = self.scaling.with_loss_scale(value)

    @stateful.rule()
    def save_and_load(self):
        state = self.scaling.state_dict()
        self.scaling = mpx.DynamicLossScaling.from_state_dict(state)

    def compare(self, is_finite):
        oracle, scaling = self.oracle, self.scaling
        assert float(scaling.loss_scale) == oracle.scale
        assert bool(scaling.finite) == is_finite
        assert _counts(scaling) == _counts(oracle)
        assert int(scaling.floored) == oracle.floored
        assert int(scaling.bad_losses) == oracle.bad_losses


TestMachine = _Machine.TestCase
TestMachine.settings = hypothesis.settings(stateful_step_count=8)


@pytest.mark.parametrize("kind", KINDS)
def test_row30_counters_are_exact_for_every_kind(kind):
    scaling = KINDS[kind]()
    assert int(scaling.steps) == int(scaling.last_finite) == 0 and bool(scaling.finite)
    seen = []
    for step in "1001":
        scaling = scaling.adjust(step == "1")
        seen.append(_counts(scaling))
        assert bool(scaling.finite) == (step == "1")
    assert seen == [[1, 0, 0, 1], [2, 1, 1, 1], [3, 2, 2, 1], [4, 2, 0, 4]]


def test_row23_disabled_scaling_has_the_same_face_and_scale_one():
    scaling = mpx.NoLossScaling(skip=False)
    assert scaling.adjust(False) is scaling
    assert float(scaling.loss_scale) == 1.0 and scaling.loss_scale.dtype == np.float32
    tree = {"a": jnp.array([1.5, -0.0]), "n": 3}
    assert_same_bits(scaling.scale(tree), tree)
    assert_same_bits(scaling.unscale(tree), tree)
    counting = mpx.NoLossScaling().adjust(False)
    assert int(counting.skipped) == 1 and float(counting.loss_scale) == 1.0


def test_row27_a_scale_set_by_hand_is_a_copy():
    before = mpx.DynamicLossScaling(8.0, period=2).adjust(True)
    after = before.with_loss_scale(64.0)
    assert float(before.loss_scale) == 8.0 and int(before.counter) == 1
    assert float(after.scale(jnp.ones(()))) == 64.0
    assert _scales(after, "11") == [64.0, 128.0]
    for value in (0.5, 2.0**16, np.nan, -1.0):
        with pytest.raises(ValueError, match="scal"):
            before.with_loss_scale(value)


@pytest.mark.parametrize("exponent", [-20, 0, 7, 15])
@hypothesis.given(value=st.floats(2.0**-60, 2.0**60, width=32), negative=st.booleans())
def test_row1_powers_of_two_are_exact(exponent, value, negative):
    scaling = mpx.StaticLossScaling(2.0**exponent)
    x = jnp.array(-value if negative else value, jnp.float32)
    assert_same_bits(scaling.unscale(scaling.scale(x)), x)
    assert float(scaling.scale(x)) == float(x) * 2.0**exponent


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_scaled(kind):
    scaling = KINDS[kind]()
    s = float(scaling.loss_scale)
    tree = {
        "half": jnp.array([6e4, -0.0], jnp.float16),
        "numpy": np.array([1.5], np.float32),
        "complex": jnp.array([1 + 2j, complex(np.inf, 0)], jnp.complex64),
        "int": jnp.arange(2),
        "key": jax.random.key(0),
        "f8": jnp.ones(2, jnp.float8_e5m2),
        "text": "text",
        "f": abs,
        "none": None,
    }
    for out, factor in ((scaling.scale(tree), s), (scaling.unscale(tree), 1 / s)):
        half = np.asarray(tree["half"]).astype(np.float32)
        np.testing.assert_array_equal(out["half"], half * np.float32(factor))
        assert np.signbit(out["half"][1])
        assert out["half"].dtype == out["numpy"].dtype == np.float32
        assert float(out["numpy"][0]) == 1.5 * factor
        assert out["complex"].dtype == np.complex64
        assert complex(out["complex"][0]) == (1 + 2j) * factor
        # An infinite number has no NaN for an imaginary part.
        assert complex(out["complex"][1]) == complex(np.inf, 0)
        for name in ("int", "key", "f8", "text", "f", "none"):
            assert out[name] is tree[name]


@unscaled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_row20_what_is_unscaled_already_is_refused(method, kind):
    """The result of a gradient function holds a scaling; its gradients are unscaled."""
    scaling = KINDS[kind]()
    result = mpx.filter_value_and_grad(jnp.sum, scaling)(jnp.ones(2))
    match = rf"`{method}`.*{type(scaling).__name__}.*`result.grads` unchanged"
    for tree in (result, (result.grads, scaling), scaling):
        with pytest.raises(TypeError, match=match):
            getattr(scaling, method)(tree)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 0.0])
def test_special_values_stay(value):
    x, scaling = jnp.array(value, jnp.float32), mpx.StaticLossScaling(2.0**10)
    assert_same_bits(scaling.unscale(scaling.scale(x)), x)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        scaling = mpx.StaticLossScaling(8.0)
        x = jnp.array(1 / 3, jnp.float64)
        assert scaling.scale(x).dtype == np.float64
        assert_same_bits(scaling.unscale(scaling.scale(x)), x)


@pytest.mark.parametrize("half", HALF)
def test_scaled_functions_give_float32(half):
    scaling = mpx.StaticLossScaling(2.0**20)  # more than float16 can hold
    call = mpx.scaled(lambda x: (x.sum(), {"n": x}), scaling, has_aux=True)
    value, aux = call(jnp.ones(2, half))
    assert value.dtype == np.float32 and float(value) == 2.0**21
    assert aux["n"].dtype == jnp.dtype(half)
    assert float(mpx.scaled(jnp.sum, scaling)(jnp.ones(2))) == 2.0**21


def test_vmapped_states_are_independent():
    def run(scale, period, pattern):
        def body(scaling, finite):
            scaling = scaling.adjust(finite)
            return scaling, scaling.loss_scale

        return jax.lax.scan(body, mpx.DynamicLossScaling(scale, period=period), pattern)

    patterns = jnp.array([[1, 1, 1, 1], [1, 0, 1, 1]], bool)
    starts = jnp.array([4.0, 16.0]), jnp.array([2, 3])
    states, scales = jax.vmap(run)(*starts, patterns)
    np.testing.assert_array_equal(scales, [[4, 8, 8, 16], [16, 8, 8, 8]])
    assert states.skipped.tolist() == [0, 1]
    stepped = jax.vmap(lambda s, f: s.adjust(f))(states, jnp.array([False, True]))
    assert stepped.loss_scaling.tolist() == [8.0, 16.0]


def test_row15_several_scalings_are_independent():
    a, b = mpx.DynamicLossScaling(8.0), mpx.DynamicLossScaling(8.0)
    c, d = a.adjust(False), b.adjust(True)
    assert float(c.loss_scale) == 4.0 and float(d.loss_scale) == 8.0
    assert float(a.loss_scale) == 8.0 and int(a.steps) == 0


def test_no_retrace_for_other_numbers():
    traces = []

    @jax.jit
    def step(scaling, finite):
        traces.append(None)
        return scaling.adjust(finite)

    for arguments in ({}, {"period": 3}, {"factor": 4.0}, {"hysteresis": 2}):
        scaling = mpx.DynamicLossScaling(8.0, **arguments)
        for finite in (True, False):
            scaling = step(scaling, jnp.asarray(finite))
    step(scaling.with_loss_scale(64.0), jnp.asarray(True))
    assert len(traces) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_structure_and_types_never_change(kind):
    scaling = KINDS[kind]()
    after = scaling.adjust(True, places_finite=jnp.array([True, False]))
    assert jax.tree.structure(after) == jax.tree.structure(scaling)
    for x, y in zip(jax.tree.leaves(scaling), jax.tree.leaves(after), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


def test_every_field_is_an_array_that_no_filter_drops():
    scaling = mpx.DynamicLossScaling()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(scaling))
    assert len(jax.tree.leaves(scaling)) == len(scaling.state_dict()) - 2


@pytest.mark.parametrize("kind", KINDS)
def test_x64_changes_no_dtype_of_the_state(kind):
    expected = jax.tree.map(lambda x: x.dtype, KINDS[kind]())
    with jax.enable_x64(True):
        start = KINDS[kind]()
        bad = start.adjust(False, places_finite=jnp.array([True, False]))
        for scaling in (start, bad):
            assert jax.tree.map(lambda x: x.dtype, scaling) == expected
            assert scaling.loss_scale.dtype == np.float32
            assert scaling.unscale(jnp.ones(2, jnp.float16)).dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_places_of_the_last_bad_step_are_remembered(kind):
    flags = jnp.array([True] + [False] * 10)
    bad = KINDS[kind]().adjust(False, places_finite=flags)
    good = bad.adjust(True, places_finite=~flags)
    for scaling in (bad, good):
        assert scaling.record.places.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    scaling = good.adjust(False, places_finite=flags[:2])
    assert scaling.record.places.tolist() == [1] + [-1] * 7


@pytest.mark.usefixtures("checking_leaks")
def test_no_leaks():
    jax.jit(lambda s, f: s.adjust(f))(mpx.DynamicLossScaling(), jnp.asarray(True))
