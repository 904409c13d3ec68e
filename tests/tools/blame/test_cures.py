"""What a report offers: the narrowest rule, rows with their number, each fault once."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpx

from ...helpers import slow_but

ONE = mpx.StaticLossScaling(1.0)
WIDTH = 64
WEIGHTS = {k: jnp.full((WIDTH, WIDTH), 1e-2) for k in ("first", "hot", "last")}
WEIGHTS["hot"] = jnp.full((WIDTH, WIDTH), 3000.0)
X = jnp.ones((8, WIDTH))


def by_scope(w, x):
    x = jnp.tanh(x @ w["first"])
    with jax.named_scope("hot"):
        x = jnp.sqrt(x @ w["hot"])
    return jnp.mean((x @ w["last"]) ** 2)


def by_weight(w, x):
    x = jnp.tanh(x @ w["first"])
    return jnp.mean((jnp.sqrt(x @ w["hot"]) @ w["last"]) ** 2)


def by_reader(w, x):  # the square does not fit, and is a cast's operand
    x = jnp.square(300 * jnp.ones_like(x)) * jnp.tanh(x @ w["first"]) + 1e5
    return jnp.mean(jnp.sqrt(x @ w["last"]) * 1e-3) + jnp.mean(x) * 1e-6


def by_line(w, x):
    x = jnp.tanh(x @ w["first"]) * 3000
    scores = jax.nn.softmax(x @ x.T)
    return jnp.mean(((scores @ jnp.tanh(x)) @ w["last"]) ** 2)


@functools.cache
def blamed(loss):
    return mpx.blame(mpx.autocast(loss, "float16"), ONE)(WEIGHTS, X)


PLACES = [
    (by_scope, 'scope="hot"'),
    (by_reader, "parameter=\"['last']\""),
    (by_line, "when=lambda operation: operation.line.endswith("),
]


@pytest.mark.parametrize(("loss", "place"), slow_but(PLACES[:2], PLACES))
def test_the_narrowest_rule_comes_with_its_share_and_cures(loss, place):
    report = blamed(loss)
    assert report.verdict is mpx.reports.Verdict.PRECISION
    is_cast = loss is by_reader
    product = "convert_element_type" if is_cast else "dot_general"
    assert report.first.primitive == product
    code = json.loads(report.to_json())["rule"]
    assert place in code and 'primitive="dot_general"' in code
    rule = eval(code, {"mpx": mpx})
    for one in report.rule, rule:
        cured = mpx.autocast(loss, "float16", rules=mpx.Rules(one))
        step = lambda s, w, f=cured: mpx.filter_grad(f, s)(w, X).finite  # noqa: E731
        assert jax.jit(step)(ONE, WEIGHTS)
    explained = mpx.explain(cured)(WEIGHTS, X)
    own = sum(o.flops for o in explained.operations if o.rule == str(rule))
    share = float(re.search(r"for (\S+) % of the FLOPs", report.advice)[1])
    assert share == pytest.approx(100 * own / explained.totals.flops, abs=0.3)
    assert share < (60 if is_cast else 50)


def unless_rounded(w, x):  # 1 + 2^-9 is 1 in bfloat16, and not in float16
    near_one = jnp.full((8, WIDTH), 1 + 2.0**-9) * x @ jnp.eye(WIDTH)
    return 1 / jnp.mean(near_one - 1)


@pytest.mark.slow
def test_a_leg_of_a_quantized_matmul_is_named():
    """Its sums cancel forward, and overflow in the gradient of its input."""
    signs = jnp.where(jnp.arange(WIDTH) % 2, 1.0, -1.0)
    w = WEIGHTS | {"hot": jnp.outer(signs, jnp.full(WIDTH, 3000.0))}

    def loss(w, x):
        return jnp.sum((jnp.tanh(x @ w["first"]) @ w["hot"]) @ w["last"])

    recipe = mpx.quantization.RecipeByLeg(dgrad=mpx.Float8CurrentScaling())
    report = mpx.blame(mpx.autocast(loss, "float16", recipe=recipe), ONE)(w, X)
    assert report.verdict is mpx.reports.Verdict.PRECISION
    first = report.first
    assert (first.phase, first.gradient, first.kind) == ("backward", "dgrad", "inf")
    assert first.parameters == ("['hot']",)


def test_bfloat16_is_offered_where_it_would_do():
    text = 'it is finite without the rule: `mpx.autocast(loss, "bfloat16")`'
    report = blamed(by_weight)
    assert text in " ".join(report.advice.split())
    rounded = lambda w, x: by_weight(w, x) + unless_rounded(w, x)  # noqa: E731
    report = mpx.blame(mpx.autocast(rounded, "float16"), ONE)(WEIGHTS, X)
    assert text not in " ".join(report.advice.split())


def behind_a_mask(w, x):  # by an infinite product one divides: the log of 0 is bad
    hot = jax.lax.stop_gradient(jnp.tanh(x @ w["first"]) @ w["hot"])
    return jnp.mean(jnp.log(jnp.minimum(1e5 / hot, 1.0)) + x @ w["last"])


@pytest.mark.parametrize("is_wide_enough", [True, False])
def test_a_rule_for_the_whole_function_is_not_offered(is_wide_enough):
    def loss(w, x):
        extra = 0.0 if is_wide_enough else unless_rounded(w, x)
        return behind_a_mask(w, x) + extra

    report = mpx.blame(mpx.autocast(loss, "float16"), ONE)(WEIGHTS, X)
    assert report.verdict is mpx.reports.Verdict.PRECISION
    assert report.rule is None and "Rule(" not in str(report)
    text = " ".join(report.advice.split())
    assert ("beyond the range of float16" in text) == is_wide_enough
    assert ('finite: `mpx.autocast(loss, "bfloat16")`' in text) == is_wide_enough
    assert ("mpx.autocast(loss, enabled=False)" in text) != is_wide_enough


@pytest.mark.parametrize("literal", [jnp.inf, jnp.nan])
def test_a_literal_and_its_copy_in_the_backward_pass_are_one_fault(literal):
    loss = mpx.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) * literal))
    report = mpx.blame(loss, mpx.NoLossScaling())(X.T @ X, X)
    assert [c.primitive for c in report.culprits] == ["constant"]
    assert report.first.phase == "forward"
    assert "Independent" not in str(report)


def test_the_verdict_comes_first_and_then_what_is_bad():
    report = blamed(by_weight)
    lines = str(report).splitlines()
    assert lines[0] == "blame by_weight: precision"
    assert lines[1].startswith("Finite in float32, and with this rule, for ")
    assert lines[2].startswith("  mpx.Rule(")
    starts = ("non-finite, loss scale 1: the loss", "First bad value: ")
    bad, first = ([line.startswith(s) for line in lines].index(True) for s in starts)
    assert 2 < bad < first
    assert max(map(len, lines)) <= 100


def log_of(rows, bad):
    def loss(w, x):
        return jnp.mean(jnp.log(x) @ w)

    x = jnp.ones((rows, 2)).at[jnp.array(bad), 0].set(0)
    blame = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False)
    return blame(jnp.ones((2, 1)), x)


def test_all_rows_that_do_it_are_counted():
    report = log_of(128, range(40))
    assert report.rows == tuple(range(40)) and report.untried_rows == 0
    text = "14, 15 and 24 more, 40 in all"
    assert text in str(report) and text in report.to_html()
    assert "rows        0, 1, " in str(report)
    report = log_of(512, range(0, 512, 2))
    assert 16 < len(report.rows) < 256
    last = max(report.rows)
    assert last + 2 + report.untried_rows in (512, 513, 514)
    text = f"; {report.untried_rows} more were not tried"
    assert text in " ".join(str(report).split()) and text in report.to_html()


@pytest.mark.slow
def test_where_every_row_does_it_no_row_is_named():
    assert log_of(32, range(32)).rows == ()


def test_sums_over_devices_are_tried_where_they_cancel():
    """They travel in half precision, and what goes bad is the logarithm behind them."""

    def variance(w, x):
        h = x @ w
        mean = jax.lax.pmean(h, "data")
        return jax.lax.pmean(h * h, "data") - mean**2

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    on_devices = jax.shard_map(variance, mesh=mesh, **specs)

    def loss(w, x):
        return jnp.sum(jnp.log(on_devices(w, x)))

    # Their sum, 8 + 5 / 128, is not in bfloat16: it becomes 8 + 8 / 128.
    x = jnp.ones((8, 8)).at[:5].add(2.0**-7)
    report = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())(jnp.eye(8), x)
    assert report.verdict is mpx.reports.Verdict.PRECISION
    assert report.first.primitive == "log"
    assert str(report.rule) == "full for primitive psum_invariant"
    assert "of the FLOPs:\n  mpx.Rule(mpx.Precision.FULL, primitive=" in str(report)
