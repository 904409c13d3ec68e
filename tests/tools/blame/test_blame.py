"""`mpx.blame` names the operation that made a step bad, and why it did."""

import html
import json

import jax
import jax.numpy as jnp
import pytest

import mpx
from tests.helpers import slow_but, unchecked_annotations

from ..inspect.test_page import read
from . import corpus
from .plants import line_of

FAULTS = corpus.faults(10, seed=1)
del FAULTS[3:5]  # others are like them
QUICK = [FAULTS[0], FAULTS[2]]


@pytest.mark.parametrize("fault", slow_but(QUICK, FAULTS), ids=lambda f: f.name)
def test_what_is_planted_is_named(fault):
    report = fault.step().blame()
    assert fault.mistakes(report) == []
    assert max(map(len, str(report).splitlines())) <= 100


def test_a_rule_has_its_own_lines_where_the_casts_are_explicit():
    """They are run from a program, for which JAX gives rules the line of the call."""
    named = "large_factor | custom_jvp | forward | explicit float16"
    fault = next(f for f in corpus.faults(40, seed=0) if named in f.name)
    assert fault.mistakes(fault.step().blame()) == []


def test_without_a_fault_nothing_is_named():
    (fault,) = corpus.faults(1, seed=2)
    report = fault.step(with_fault=False).blame()
    assert report.verdict is mpx.reports.Verdict.NOTHING and report.first is None
    assert "nothing is bad" in str(report)


def masked_loss(w, x, mask):
    scores = x @ w @ x.T + mask
    seen = jnp.where(mask > -1.0, scores, -jnp.inf)
    return jnp.mean(jax.nn.softmax(seen) @ x)


def test_infinities_in_weights_and_float64():
    with jax.enable_x64(True):
        loss = lambda w: jnp.sum(w * 1e300)  # noqa: E731
        replay = mpx.blame(loss, mpx.NoLossScaling(), use_mixed_precision=False)
        assert replay(jnp.ones(3, jnp.float64)).verdict.value == "nothing is bad"
        report = replay(jnp.array([1.0, jnp.inf, 1.0], jnp.float64))
    assert report.first.primitive == "input"
    # A weight that is not finite is named.
    model = {"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf])}
    loss = lambda m, x: jnp.sum(m["a"]) * x + jnp.sum(m["b"])  # noqa: E731
    report = mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())(model, 1.0)
    assert report.first.parameters == ("['b']",)
    assert "an input of the step" in report.first.reason
    assert report.first.kind == "inf" and report.first.results[0].infinities == 0.5
    assert "inf in input" in str(report) and "value       f32[2]" in str(report)


def test_a_mask_is_named_where_all_of_a_row_is_masked():
    w, x = jnp.eye(4), jnp.ones((3, 4))
    mask = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), 0.0, -jnp.inf)
    step = mpx.blame(mpx.autocast(masked_loss), mpx.NoLossScaling())
    assert step(w, x, mask).verdict is mpx.reports.Verdict.NOTHING
    report = step(w, x, jnp.full_like(mask, -jnp.inf))
    assert report.verdict is mpx.reports.Verdict.DATA
    assert report.first.primitive == "sub" and "jax.nn.softmax" in report.first.code
    assert report.first.reason == "infinity minus infinity"
    assert report.first.made_by == "select_n"
    assert report.first.made_at == line_of(masked_loss, "seen")


def test_a_scale_that_is_too_large_is_said_to_be():
    def loss(w, x):
        return mpx.force_full_precision(jnp.mean, jnp.float32)((x @ w) ** 2)

    scaling = mpx.DynamicLossScaling(2.0**30, max_loss_scaling=2.0**30)
    w = x = jnp.ones((4, 4))
    result = mpx.filter_value_and_grad(loss, scaling)(w, x)
    assert not result.finite and int(result.scaling.record.last_bad) == 1
    report = mpx.blame(loss, result.scaling.of_bad_step())(w, x)
    assert report.verdict is mpx.reports.Verdict.SCALE
    assert report.loss_scale == 2.0**30 and report.first.phase == "backward"


def test_a_rule_that_cures_it_is_tried_and_printed():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.mean((x @ w).astype(jnp.float32))

    made = mpx.autocast(loss, "float16")
    w, x = jnp.full((4, 4), 200.0), jnp.full((2, 4), 200.0)
    report = mpx.blame(made, mpx.StaticLossScaling(1.0))(w, x)
    assert report.verdict is mpx.reports.Verdict.PRECISION
    assert 'mpx.Rule(mpx.Precision.FULL, primitive="dot_general"' in str(report)
    kept = json.loads(report.to_json())["rule"]
    assert kept == 'mpx.Rule(mpx.Precision.FULL, primitive="dot_general", scope="head")'
    assert html.escape(kept) in report.to_html()
    cured = mpx.autocast(loss, "float16", rules=mpx.Rules(report.rule))
    again = mpx.blame(cured, mpx.StaticLossScaling(1.0))(w, x)
    assert again.verdict is mpx.reports.Verdict.NOTHING


ZEROS = [
    ("log_of_small", "explicit float16", "exp", "underflowed to it in float16"),
    ("one_minus", "explicit bfloat16", "sub", "rounded to it in bfloat16"),
]


@pytest.mark.parametrize(
    ("plant", "precision", "maker", "reason"), slow_but(ZEROS[:1], ZEROS)
)
def test_what_made_a_zero_is_named(plant, precision, maker, reason):
    fault = corpus.Fault(plant, "unrolled", "forward", precision, (1,))
    report = fault.step().blame()
    assert fault.mistakes(report) == []
    first = report.first
    assert first.made_by == maker and first.made_at == first.line
    assert first.reason.endswith(reason)


@pytest.fixture(scope="module")
def report():
    def loss(w, x):
        with jax.named_scope("</h2><script>"):
            return jnp.mean(jnp.log(x) @ w)

    x = jnp.ones((16, 4)).at[3, 2].set(0)
    return mpx.blame(mpx.autocast(loss), mpx.NoLossScaling())(jnp.ones((4, 2)), x)


def test_a_page_says_what_the_text_says(report):
    page = read(report.to_html())
    assert "script" not in page.tags, "a name of the user's is text"
    first = report.first
    wanted = {"Verdict: data or mathematics", first.reason, first.scope}
    assert wanted | {"3", "f32[16,4]"} <= set(page.texts)
    shown = " ".join(page.texts)
    for line in str(report).splitlines()[1:]:
        for word in line.split():
            assert word.rstrip(",") in shown or not word[0].isalpha(), word
    assert 'srcdoc="' in report._repr_html_()


def test_a_report_is_saved_as_its_name_says(report, tmp_path):
    for suffix in ("html", "json", "txt"):
        report.save(tmp_path / f"report.{suffix}")
    assert (tmp_path / "report.txt").read_text() == f"{report}\n"
    text = (tmp_path / "report.json").read_text()
    data = json.loads(text, parse_constant=pytest.fail)
    assert (data["format"], data["version"]) == ("mpx blame", 1)
    assert data["verdict"] == "data or mathematics"
    assert data["culprits"][0]["primitive"] == "log"
    assert data["rows"] == [3] and data["rule"] is None
    with pytest.raises(ValueError, match=r"must end with one of .html, .json, .txt"):
        report.save(tmp_path / "report.md")
    # A good step has a page, too.
    report = mpx.blame(mpx.autocast(jnp.sum), mpx.NoLossScaling())(jnp.ones(3))
    assert "nothing is bad" in report.to_html()
    assert json.loads(report.to_json())["culprits"] == []


def test_it_wants_arrays():
    step = mpx.blame(jnp.sum, mpx.NoLossScaling())
    with pytest.raises(TypeError, match=r"`mpx.blame` replays a step.*float32\[3\]"):
        step(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(TypeError, match="Call it outside `jax.jit`"):
        jax.jit(lambda w: step(w) and w)(jnp.ones(3))


@pytest.mark.parametrize("of", ["mpx.blame", "mpx.nnx.blame"])
@pytest.mark.parametrize(
    ("above", "error", "match"),
    [
        ("1", TypeError, "`above` of `{}` must be a number"),
        (True, TypeError, "must be a number"),
        (-1.0, ValueError, "must be positive; got -1"),
        (float("nan"), ValueError, "must be positive"),
    ],
)
def test_a_limit_is_a_positive_number(of, above, error, match):
    blame = mpx.blame if of == "mpx.blame" else mpx.nnx.blame
    with unchecked_annotations(), pytest.raises(error, match=match.format(of)):
        blame(jnp.sum, mpx.NoLossScaling(), above=above)
