"""Faults as they were met: in experts, in a mask, in one device, in a value."""

import jax
import jax.numpy as jnp
import pytest

import mpx

from ...helpers import slow_but
from .plants import line_of

ROWS, EXPERTS, WIDTH = 12, 3, 8


def sizes_of(counts):
    return jnp.asarray(counts, jnp.int32)


@jax.custom_vjp
def experts(x, w, sizes):
    """A fused layer whose gradient of a weight is a mean over the expert's rows."""
    return jax.lax.ragged_dot(x, w, sizes)


def keep(x, w, sizes):
    return experts(x, w, sizes), (x, w, sizes)


def pull(kept, cotangent):
    x, w, sizes = kept
    _, vjp = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
    dx, dw = vjp(cotangent)
    rows = sizes.astype(dw.dtype)[:, None, None]
    return dx, (dw * rows) / rows, None


experts.defvjp(keep, pull)


@pytest.mark.slow
def test_a_weight_gradient_that_is_nan_where_an_expert_has_no_rows():
    def loss(model, x, sizes):
        h = jnp.tanh(x @ model["first"])
        with jax.named_scope("experts"):
            h = experts(h, model["experts"], sizes)
        return mpx.force_full_precision(jnp.mean, jnp.float32)(h * h)

    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "first": jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "experts": jax.random.normal(keys[1], (EXPERTS, WIDTH, WIDTH)),
    }
    x = jax.random.normal(keys[2], (ROWS, WIDTH))
    blame = mpx.blame(loss, mpx.NoLossScaling(), policy="bfloat16")
    assert blame(model, x, sizes_of([4, 4, 4])).verdict is mpx.reports.Verdict.NOTHING
    first = blame(model, x, sizes_of([5, 0, 7])).first
    assert (first.primitive, first.kind) == ("div", "nan")
    assert first.reason == "zero divided by zero"
    assert first.direction == "backward (wgrad)"
    assert first.parameters == ("['experts']",) and first.scope == "experts"


def uninitialised(x, w, sizes):
    out = jax.lax.ragged_dot(x, w, sizes)
    there = jnp.arange(ROWS)[:, None] < jnp.sum(sizes)
    return jnp.where(there, out, jnp.nan)


def by_factor(out, there):
    return out * there


def by_choice(out, there):
    return jnp.where(there > 0, out, 0.0)


@pytest.mark.parametrize("mask", [by_factor, by_choice])
def test_rows_of_a_ragged_product_that_nobody_wrote(mask):
    def loss(w, x, sizes):
        there = (jnp.arange(ROWS)[:, None] < jnp.sum(sizes)).astype(x.dtype)
        return jnp.mean(mask(uninitialised(x, w, sizes), there))

    w, x = jnp.ones((EXPERTS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    step = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())
    report = step(w, x, sizes_of([4, 3, 2]))
    if mask is by_choice:
        assert report.verdict is mpx.reports.Verdict.NOTHING
        return
    assert report.verdict is mpx.reports.Verdict.DATA
    assert report.first.primitive == "select_n"
    assert report.first.reason == "its condition chooses a constant that is nan"
    assert report.first.line == line_of(uninitialised)


def test_a_value_that_is_finite_and_too_large_is_named_on_request():
    def loss(w, x):
        h = x @ w
        with jax.named_scope("large"):
            h = jnp.exp(h)
        return jnp.mean(h / (h + 1.0))

    w, x = jnp.ones((4, 4)), jnp.full((2, 4), 3.0)
    loss = mpx.autocast(loss)
    report = mpx.blame(loss, mpx.NoLossScaling(), above=1e4)(w, x)
    assert report.verdict is mpx.reports.Verdict.NOTHING
    assert report.first.primitive == "exp" and report.first.scope == "large"
    assert report.first.reason == "a number above 10000"
    nothing = mpx.blame(loss, mpx.NoLossScaling(), above=1e6)(w, x)
    assert nothing.first is None


@pytest.mark.parametrize(
    ("where", "above"),
    [
        ("input", 1e3),
        ("input", 3.9e4),
        ("weight", 2e4),
        ("constant", 1e3),
        ("constant", 3.9e4),
        ("literal", 2e4),
    ],
)
def test_what_is_given_above_a_limit_is_told(where, above):
    """And does not hide what stands behind it: the limit may be any below."""
    large = jnp.full(4, 4e4)
    w = jnp.full((4, 4), 4e4 if where == "weight" else 1.0)
    x = large if where == "input" else jnp.ones(4)

    def loss(w, x):
        h = 1e-5 * (x @ w)
        if where == "constant":
            h = h + large
        return jnp.sum(1e-9 * (h * 4e4 if where == "literal" else h))

    blame = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False, above=above)
    report = blame(w, x)
    first = "constant" if where in ("constant", "literal") else "input"
    assert report.first.primitive == first
    assert report.first.reason.endswith(f"above {above:g}")
    names = {"input": ("args[1]",), "weight": ("args[0]",)}
    assert report.first.parameters == names.get(where, ())
    assert str(report).startswith(
        "blame loss: finite, loss scale 1, with large numbers"
    )


def test_two_independent_faults_are_both_named():
    def loss(w, x):
        return jnp.sum(jnp.log(x[0]) * w[0]) + jnp.sum(jnp.sqrt(x[1]) * w[1])

    w, x = jnp.ones((2, 4)), jnp.array([[0.0] * 4, [-1.0] * 4])
    report = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())(w, x)
    assert {culprit.primitive for culprit in report.culprits} == {"log", "sqrt"}


def test_micro_batches_are_a_loop():
    def loss(w, x):
        return jnp.mean(jnp.log(x @ w))

    w, x = jnp.ones((4, 2)), jnp.ones((8, 4)).at[5].set(0.0)
    step = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling(), accumulate=4)
    report = step(w, x)
    assert report.first.primitive == "log" and report.rows == (5,)
    assert report.first.inside == ("scan, iteration 1 of 4",)  # of every four rows


@pytest.mark.parametrize("reverse", [False, True])
def test_a_turn_is_named_by_its_place_in_what_is_scanned(reverse):
    """From 0 on, also where the scan begins at the end."""

    def loss(w, x):
        def turn(kept, row):
            kept = kept - row @ w
            return kept, jnp.log(kept)

        return jax.lax.scan(turn, 3.5, x, reverse=reverse)[1].sum()

    w, x = jnp.full(4, 0.25), jnp.ones((5, 4))  # below zero in the fourth turn
    report = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())(w, x)
    assert report.first.primitive == "log"
    assert report.first.inside == (f"scan, iteration {1 if reverse else 3} of 5",)


def test_a_while_loop_that_ends_for_each_example_apart_is_gone_into():
    def grow(w, x, turns):
        def turn(state):
            i, h = state
            return i + 1, 10.0 * (h @ w)

        return jax.lax.while_loop(lambda state: state[0] < turns, turn, (0, x))[1]

    def loss(b, w, x):
        grown = jax.vmap(grow, (None, 0, 0))(w, x, jnp.array([1, 2, 5]))
        return jnp.sum(b) * jnp.max(jax.lax.stop_gradient(grown))

    args = jnp.ones(2), jnp.eye(4), jnp.full((3, 4), 0.1)
    blame = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False, above=500.0)
    first = blame(*args).first
    assert (first.primitive, first.inside) == ("mul", ("while, iteration 3",))


def by_experts(x, w):
    return jax.lax.ragged_dot(x, w, sizes_of([6, 6]))


def by_window(x, w):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x[None], w[:1], (1,), "VALID", dimension_numbers=numbers
    )[0]


@pytest.mark.parametrize(
    "product", slow_but([], [by_experts, by_window, lambda x, w: x @ w[0]])
)
def test_half_precision_is_tried_for_each_product_that_a_recipe_quantizes(product):
    def loss(model, x):
        with jax.named_scope("large"):
            h = product(x, model["w"])
        return jnp.mean((h.astype(jnp.float32) * 1e-5) @ model["head"])

    # Of eight bits 1.07 is 1.125, and the sum beyond the largest number of float16.
    x = jnp.full((12, 128), 1.07).at[:, 0].set(1.75)
    model = {"w": jnp.full((2, 128, 128), 464.0), "head": jnp.ones((128, 32))}
    recipe = mpx.Float8CurrentScaling()
    made = mpx.autocast(loss, "float16", recipe=recipe)
    scaling = mpx.init_scaling(made, model, x).with_loss(mpx.StaticLossScaling(1.0))
    report = mpx.blame(made, scaling)(model, x)
    assert report.rule is not None
    assert report.rule.precision is mpx.Precision.HALF
    assert report.rule.primitive == report.first.primitive
