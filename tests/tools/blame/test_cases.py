"""Faults as they were met, and those that a recipe makes by a product that is zero."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import mpx

from ...helpers import in_two_processes, slow_but
from ...registries import RECIPES
from . import breaks
from .plants import line_of

ROWS, EXPERTS, WIDTH = 12, 3, 8


@jax.custom_vjp
def experts(x, w, sizes):
    """A fused layer whose gradient of a weight is a mean over the expert's rows."""
    return jax.lax.ragged_dot(x, w, sizes)


def pull(kept, cotangent):
    x, w, sizes = kept
    _, vjp = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
    dx, dw = vjp(cotangent)
    rows = sizes.astype(dw.dtype)[:, None, None]
    return dx, (dw * rows) / rows, None


experts.defvjp(lambda *args: (experts(*args), args), pull)


@pytest.mark.slow
def test_a_weight_gradient_that_is_nan_where_an_expert_has_no_rows():
    def loss(model, x, sizes):
        h = jnp.tanh(x @ model["first"])
        with jax.named_scope("experts"):
            h = experts(h, model["experts"], sizes)
        return mpx.force_full_precision(jnp.mean, jnp.float32)(h * h)

    keys = jax.random.split(jax.random.key(0), 3)
    model = {"first": jax.random.normal(keys[0], (WIDTH, WIDTH))}
    model["experts"] = jax.random.normal(keys[1], (EXPERTS, WIDTH, WIDTH))
    x = jax.random.normal(keys[2], (ROWS, WIDTH))
    blame = mpx.blame(loss, mpx.NoLossScaling(), policy="bfloat16")
    assert blame(model, x, jnp.array([4, 4, 4])).verdict is mpx.reports.Verdict.NOTHING
    first = blame(model, x, jnp.array([5, 0, 7])).first
    assert (first.primitive, first.kind) == ("div", "nan")
    assert first.reason == "zero divided by zero"
    assert first.direction == "backward (wgrad)"
    assert first.parameters == ("['experts']",) and first.scope == "experts"


def uninitialised(x, w, sizes):
    out = jax.lax.ragged_dot(x, w, sizes)
    there = jnp.arange(ROWS)[:, None] < jnp.sum(sizes)
    return jnp.where(there, out, jnp.nan)


@pytest.mark.parametrize("by_choice", [False, True])
def test_rows_of_a_ragged_product_that_nobody_wrote(by_choice):
    def loss(w, x, sizes):
        there = (jnp.arange(ROWS)[:, None] < jnp.sum(sizes)).astype(x.dtype)
        out = uninitialised(x, w, sizes)
        return jnp.mean(jnp.where(there > 0, out, 0.0) if by_choice else out * there)

    w, x = jnp.ones((EXPERTS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    step = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())
    report = step(w, x, jnp.array([4, 3, 2]))
    if by_choice:
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

    args = jnp.ones((4, 4)), jnp.full((2, 4), 3.0)
    blame = functools.partial(mpx.blame, mpx.autocast(loss), mpx.NoLossScaling())
    report = blame(above=1e4)(*args)
    assert report.verdict is mpx.reports.Verdict.NOTHING
    assert report.first.primitive == "exp" and report.first.scope == "large"
    assert report.first.reason == "a number above 10000"
    assert blame(above=1e6)(*args).first is None


ABOVE = [("input", 1e3), ("input", 3.9e4), ("weight", 2e4)]
ABOVE += [("constant", 1e3), ("constant", 3.9e4), ("literal", 2e4)]


@pytest.mark.parametrize(("where", "above"), ABOVE)
def test_what_is_given_above_a_limit_is_named(where, above):
    """And does not hide what stands behind it: the limit may be any below."""
    large = jnp.full(4, 4e4)
    w = jnp.full((4, 4), 4e4 if where == "weight" else 1.0)
    x = large if where == "input" else jnp.ones(4)

    def loss(w, x):
        h = 1e-5 * (x @ w)
        h = h + large if where == "constant" else h
        return jnp.sum(1e-9 * (h * 4e4 if where == "literal" else h))

    blame = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False, above=above)
    report = blame(w, x)
    first = "constant" if where in ("constant", "literal") else "input"
    assert report.first.primitive == first
    assert report.first.reason.endswith(f"above {above:g}")
    names = {"input": ("args[1]",), "weight": ("args[0]",)}
    assert report.first.parameters == names.get(where, ())
    head = "blame loss: finite, loss scale 1, with large numbers"
    assert str(report).startswith(head)


def test_micro_batches_are_a_loop_and_independent_faults_are_both_named():
    w, x = jnp.ones((4, 2)), jnp.ones((8, 4)).at[5].set(0.0)
    loss = mpx.autocast(lambda w, x: jnp.mean(jnp.log(x @ w)))
    report = mpx.blame(loss, mpx.NoLossScaling(), accumulate=4)(w, x)
    assert report.first.primitive == "log" and report.rows == (5,)
    assert report.first.inside == ("scan, iteration 1 of 4",)  # of every four rows
    f = lambda w, x: jnp.log(x[0]) * w[0] + jnp.sqrt(x[1]) * w[1]  # noqa: E731
    w, x = jnp.ones((2, 4)), jnp.array([[0.0] * 4, [-1.0] * 4])
    loss = mpx.autocast(lambda w, x: jnp.sum(f(w, x)))
    report = mpx.blame(loss, mpx.NoLossScaling())(w, x)
    assert {culprit.primitive for culprit in report.culprits} == {"log", "sqrt"}


@pytest.mark.slow
def test_two_processes_name_what_one_device_did():
    found = in_two_processes("-m", "tests.tools.blame.two_processes", devices=4)
    verdict, inside = mpx.reports.Verdict.DATA.value, ["scan, iteration 0 of 3"]
    for as_one, by_hand in found:
        assert as_one == ["div", "plant", inside, [], [6], verdict]
        assert by_hand == ["div", "plant", inside, [6], [6], verdict]


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
    return jax.lax.ragged_dot(x, w, jnp.array([6, 6]))


def by_window(x, w):
    options = {"dimension_numbers": ("NWC", "WIO", "NWC")}
    return jax.lax.conv_general_dilated(x[None], w[:1], (1,), "VALID", **options)[0]


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


TARGETS = [
    (breaks.attention, "current", "H100"),
    (breaks.quotient, "mxfp8", "B200"),
    (breaks.rule, "current", "TPU v7x"),
]
# Finite in bfloat16 and in float32. Together they are many, and each compiles several
# programs: one of each kind runs always, the rest before a release.
CASES = [*itertools.product(breaks.FAULTS, RECIPES, [None]), *TARGETS]
QUICK_RECIPES = [(breaks.mean_of_some, "current", None)]
SLOW = [(breaks.attention, "nvfp4", None), TARGETS[0]]


def _marks(case):
    if case in QUICK_RECIPES:
        return ()
    return (pytest.mark.slow,) if case in SLOW else (pytest.mark.exhaustive,)


@pytest.mark.parametrize(
    ("fault", "recipe", "target"),
    [pytest.param(*case, marks=_marks(case)) for case in CASES],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_what_a_recipe_breaks_is_named(fault, recipe, target):
    w, x = breaks.weights_of([fault]), breaks.batch()
    loss = breaks.loss_of([fault])
    loss = mpx.autocast(loss, recipe=RECIPES[recipe], target=target)
    scaling = mpx.init_scaling(loss, w, x)
    report = mpx.blame(loss, scaling)(w, x)
    first = report.first
    assert report.verdict is mpx.reports.Verdict.PRECISION
    assert first.line == line_of(fault, "# here")
    assert first.primitive not in ("constant", "input")


def equal_products(w, x):
    h = x @ w["first"]
    h = h @ w["second"]  # here
    return jnp.mean(h.astype(jnp.float32))


@pytest.mark.slow
def test_of_products_of_one_shape_the_one_that_overflows_is_named():
    w = {"first": jnp.eye(32), "second": jnp.full((32, 32), 100.0)}
    loss = mpx.autocast(equal_products, "float16", recipe=RECIPES["current"])
    x = jnp.full((32, 32), 100.0)
    scaling = mpx.init_scaling(loss, w, x).with_loss(mpx.StaticLossScaling(1.0))
    first = mpx.blame(loss, scaling)(w, x).first
    assert first.line == line_of(equal_products, "# here")
    assert first.primitive == "dot_general" and first.parameters == ("['second']",)
