"""Reports as text, as JSON and as files."""

import dataclasses
import functools
import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from rich.console import Console

import mpx
from mpx._quantize._formats._target import target_from
from mpx._tools._inspect._report import (
    bytes_text,
    count_text,
    flops_text,
    is_low,
    share_text,
    short_type,
)
from mpx._tools._inspect._views import headline


def loss(w, x):
    def body(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    x = jax.lax.scan(body, x, w.astype(jnp.bfloat16))[0]
    x = jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x)
    return jnp.sum(jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x + 1, x))


@pytest.fixture(scope="module")
def report():
    w = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    return mpx.explain(loss)(w, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16))


def test_json_round_trip(report):
    text = report.to_json()
    again = mpx.reports.Report.from_json(text)
    assert again == report
    assert again.to_json() == text
    data = json.loads(text)
    assert data["totals"]["flops"] == report.totals.flops
    assert data["operations"][0]["primitive"] == "convert_element_type"
    match = r"needs a report that this version of mpx wrote"
    for text in ("[]", "{}", '{"format": "mpx report", "version": 0}'):
        with pytest.raises(ValueError, match=match):
            mpx.reports.Report.from_json(text)
    for part in (report, report.totals, report.operations[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.name = part.number = part.flops = 0


def test_save(report, tmp_path):
    whole = report.table(limit=None, width=None)
    texts = {"html": report.to_html(), "json": report.to_json(), "txt": whole}
    for suffix, expected in texts.items():
        report.save(tmp_path / f"report.{suffix}")
        found = (tmp_path / f"report.{suffix}").read_text(encoding="utf-8")
        assert found == expected + "\n"
    with pytest.raises(ValueError, match=r"must end with one of .html.*'report.pdf'"):
        report.save(tmp_path / "report.pdf")


def test_a_table_has_totals_and_operations_and_says_how_to_see_all(report):
    lines = report.table(width=None).splitlines()
    assert lines[0] == "loss: 97.2 % of FLOPs in bfloat16; 2 findings"
    assert lines[1].endswith(flops_text(report.totals.flops, "FLOPs"))
    assert any(line.startswith("  bfloat16") and "#" in line for line in lines)
    assert any(line.split()[:3] == ["FLOPs", "bytes", "runs"] for line in lines)
    (product,) = (line for line in lines if " dot_general " in line)
    for text in ("12.3 k", "bf16[8,16] bf16[16,16] -> bf16[8,16]", "layer", "args[0]"):
        assert text in product
    assert repr(report) == str(report) == report.table()
    short, whole = report.table(limit=3), report.table(limit=None)
    assert "3 of " in short
    assert "report.table(limit=None, width=None)" in short
    assert 'report.save("report.html")' in short
    assert "report.save" not in whole
    assert len(short.splitlines()) < len(whole.splitlines())
    assert short.count("dot_general") == 1  # what costs most is there


def leaking(x, w, scale):
    with jax.named_scope("a_scope_with_a_name_that_takes_a_third_of_a_line"):
        return jnp.exp((x * scale) @ w)


@pytest.mark.third_party  # promotes
def test_the_table_fits_the_width_and_findings_come_first_and_whole():
    shapes = [((64, 512), "bfloat16"), ((512, 512), "bfloat16"), ((512,), "float32")]
    found = mpx.explain(leaking)(*(jax.ShapeDtypeStruct(*pair) for pair in shapes))
    for width in (88, 100):
        text = found.table(limit=3, width=width)
        assert max(map(len, text.splitlines())) <= width
        rows = text.partition("why")[2].splitlines()
        assert rows[1].endswith("! see below")
        assert rows[1].split()[2] == found.findings[0].primitive
        assert found.findings[0].reason in " ".join(text.split())
    assert max(map(len, found.table(width=None).splitlines())) > 180
    assert [line for line in str(found).splitlines() if len(line) > 100] == []


LOW = [
    (mpx.Float8CurrentScaling(), "FP8", "H100"),
    (mpx.DelayedScaling(), "FP8", "H100"),
    (mpx.MXFP8BlockScaling(), "MXFP8", "B200"),
    (mpx.NVFP4BlockScaling(), "NVFP4", "B200"),
]


@functools.cache
def quantized(recipe, target="cpu"):
    def loss(w, x):
        return jnp.mean((x @ w[0] @ w[1]).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    func = mpx.autocast(loss, recipe=recipe, target=target)
    return mpx.explain(jax.grad(func))([x, x], x)


@pytest.mark.parametrize("target", ["cpu", "cpu bf16"])
@pytest.mark.parametrize(("recipe", "name", "gpu"), LOW)
def test_emulated_products_count_under_the_format_of_their_recipe(
    recipe, name, gpu, target
):
    inner = "bfloat16" if target_from(target).wants_cpu_form else "float32"
    report = quantized(recipe, target)
    products = [o for o in report.operations if o.is_low]
    assert {(o.format, o.precision) for o in products} == {(name, inner)}
    assert all(o.is_emulated for o in products)
    flops = report.totals.flops_by_format
    assert flops[name] == sum(o.flops for o in products)
    assert flops[inner] == report.totals.flops_by_precision[inner] - flops[name]
    assert report.totals.low_flops_share == flops[name] / report.totals.flops
    text = report.table()
    share = share_text(report.totals.low_flops_share)
    first = f"loss: {share} of FLOPs in {name} (emulated on this CPU), "
    assert text.startswith(first)
    assert " in float32" in " ".join(text.partition("operations")[0].split())
    (bar,) = (x for x in text.splitlines() if x.startswith(f"  {name} "))
    assert "#" in bar and bar.endswith("emulated on this CPU")
    assert f'`mpx.autocast(..., target="{gpu}")`' in " ".join(text.split())
    assert [x for x in text.splitlines() if len(x) > 100] == []


@pytest.mark.parametrize(("recipe", "name", "gpu"), LOW)
def test_products_on_units_count_under_the_same_format(recipe, name, gpu):
    report = quantized(recipe, gpu)
    products = [o for o in report.operations if o.is_low]
    assert len(products) == 3  # of one weight; the other is the final projection
    assert {o.format for o in products} == {name}
    assert not any(o.is_emulated for o in products)
    assert report.table().partition(", ")[0].endswith(f"of FLOPs in {name}")
    assert "emulated" not in str(report) and "target=" not in str(report)
    # A row says what is computed in.
    row = rf"dot_general( \(backward\))?\s+{name}\s"
    assert not re.search(row, report.table(width=None))
    assert re.search(row, quantized(recipe).table(width=None))


@pytest.mark.parametrize("target", ["A100", "TPU v5e", "TPU v6e"])
def test_a_device_without_units_says_what_it_computes_in(target):
    report = quantized(mpx.Float8CurrentScaling(), target)
    assert {o.format for o in report.operations if o.is_low} == {"bfloat16"}
    assert report.totals.low_flops_share == 0
    assert "FP8" not in headline(report)


@pytest.mark.parametrize("target", ["cpu", "H100", "B200", "TPU7x"])
def test_products_that_no_device_has_units_for_are_none_of_a_format(target):
    """XLA has no product of blocks of 128, and so it says on a CPU, too."""
    report = quantized(mpx.Float8BlockScaling(), target)
    assert report.totals.low_flops_share == 0
    (found,) = report.findings
    assert "XLA has no fast matmul for blocks of 128" in found.reason


def convolved(w, x):
    x = jax.lax.conv(jnp.tanh(x), w, (1, 1), "SAME")
    return jnp.mean(jax.lax.conv(jnp.tanh(x), w, (1, 1), "SAME"))


def sent_to_experts(w, x):
    x, sizes = x.reshape(128, 8), jnp.array([100, 28], jnp.int32)
    x = jax.lax.ragged_dot(jnp.tanh(x), w.reshape(8, 8, 9)[:2], sizes)
    return jnp.mean(jnp.sin(x) ** 2)


NOWHERE = [
    (convolved, mpx.DelayedScaling(), target)
    for target in ("cpu", "H100", "B200", "TPU v5e", "TPU v6e", "TPU7x")
] + [(sent_to_experts, mpx.MXFP8BlockScaling(), target) for target in ("cpu", "B200")]


@pytest.mark.parametrize(("func", "recipe", "target"), NOWHERE)
def test_what_no_device_multiplies_in_8_bits_never_counts_as_such(func, recipe, target):
    w, x = jnp.ones((8, 8, 3, 3)), jnp.ones((2, 8, 8, 8))
    low = mpx.autocast(func, recipe=recipe, target=target)
    report = mpx.explain(jax.grad(low))(w, x)
    products = [o for o in report.operations if o.is_low and o.phase == "forward"]
    assert products and [*report.findings] == products
    assert all("have no FP8 form" in o.reason for o in products)
    for text in (headline(report), "".join(report.totals.flops_by_format)):
        assert "FP8" not in text and "float8" not in text
    assert report.totals.low_flops_share == 0
    assert "emulated" not in report.table().partition("\n\n")[0]


def test_a_product_whose_scales_go_in_before_it_is_in_8_bits():
    """As one is that devices sum: XLA takes the scales into the call."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) @ w)

    w, recipe = jnp.ones((32, 32)), mpx.Float8CurrentScaling()
    low = mpx.autocast(loss, recipe=recipe, target="H100")
    scaling = mpx.init_scaling(low, w, w)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        report = mpx.explain(lambda w, s: mpx.filter_grad(low, s)(w, w))(w, scaling)
    products = [o for o in report.operations if o.is_low]
    assert [o.inputs[0].partition("[")[0] for o in products][2:] == ["float32"]
    assert {o.format for o in products} == {"FP8"}
    assert not any(o.is_emulated for o in products)
    assert "of FLOPs in FP8, " in headline(report)


def test_a_backward_pass_in_high_precision_is_none_of_the_format():
    recipe = mpx.Float8CurrentScaling(backward_override="high_precision")
    products = [o for o in quantized(recipe).operations if o.leg]
    found = [(o.leg, o.format, o.is_low) for o in products]
    others = [(leg, "float32", False) for leg in ("dgrad", "wgrad")]
    assert found == [("forward", "FP8", True), *others]


BY_LEG = mpx.quantization.RecipeByLeg(
    dgrad=mpx.Float8CurrentScaling(), wgrad=mpx.Int8CurrentScaling()
)


@pytest.mark.parametrize(
    ("target", "formats"),
    [
        ("TPU7x", ("bfloat16", "FP8", "bfloat16")),
        ("TPU v6e", ("bfloat16", "bfloat16", "INT8")),
        ("cpu", ("float32", "FP8", "INT8")),
    ],
)
def test_each_leg_counts_under_its_own_format(target, formats):
    report = quantized(BY_LEG, target)
    products = {o.leg: o for o in report.operations if o.leg}
    legs = ("forward", "dgrad", "wgrad")
    assert tuple(products[leg].format for leg in legs) == formats
    assert len({o.flops for o in products.values()}) == 1
    few = sum(o.flops for o in products.values() if is_low(o.format))
    assert report.totals.low_flops_share == few / report.totals.flops
    assert "RecipeByLeg, forward: not quantized; dgrad" in products["dgrad"].reason
    text, page = report.table(width=None), report._repr_html_()
    assert "dot_general (dgrad)" in text and "dot_general (wgrad)" in text
    assert type(report).from_json(report.to_json()) == report and "wgrad" in page
    found = [o.leg for o in report.findings]
    assert found == {"TPU7x": ["wgrad"], "TPU v6e": ["dgrad"], "cpu": []}[target]


def test_integers_of_8_bits_count_as_flops_and_others_do_not():
    def loss(w, x):
        y = jax.lax.dot_general(
            x.astype(jnp.int8),
            w.astype(jnp.int8),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.int32,
        )
        return y, x.astype(jnp.int32) @ w.astype(jnp.int32)

    report = mpx.explain(loss)(jnp.ones((8, 4)), jnp.ones((2, 8)))
    products = [o for o in report.operations if o.primitive == "dot_general"]
    found = [(o.precision, o.flops, o.leg) for o in products]
    assert found == [("int8", 128, ""), ("int32", 0, "")]
    assert "100.0 % of FLOPs in int8" in headline(report)


def test_marks_of_legs_are_not_in_a_lowered_program():
    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w))

    low = mpx.autocast(loss, recipe=BY_LEG, target="cpu")
    lowered = jax.jit(jax.grad(low)).lower(jnp.ones((32, 32)), jnp.ones((8, 32)))
    assert "quantized_wgrad" not in lowered.as_text()
    assert "quantized_wgrad" in lowered.as_text(debug_info=True)


def test_findings_are_shown_however_cheap_and_equal_operations_are_one_line():
    def f(x, y):
        for _ in range(40):
            x = x @ x
            y = jnp.tanh(x) + y
        return x, jnp.exp(y[0, 0].astype(jnp.bfloat16))

    x = jax.ShapeDtypeStruct((8, 8), jnp.float16)
    assert "! exp in bfloat16" in mpx.explain(f)(x, x).table(limit=2)
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    chain = lambda weights, x: functools.reduce(jnp.matmul, weights, x)  # noqa: E731
    report = mpx.explain(chain)([x] * 5, x)
    assert len(report.operations) == 5
    (line,) = (x for x in report.table(width=None).splitlines() if " dot_general " in x)
    assert line.split()[:5] == ["640", "960", "B", "5", "dot_general"]
    assert "[0] +4" in line
    sentence = str(mpx.explain(lambda x: x)(x)).splitlines()[0]
    assert sentence.endswith(": no FLOPs; no findings")


def test_a_report_prints_the_same_with_and_without_rich(report, monkeypatch, capsys):
    texts = {}
    for width in (250, 100):
        out = io.StringIO()
        Console(file=out, width=width).print(report)
        texts[width] = out.getvalue()
    assert "dot_general" in texts[250] and "bf16[8,16]" in texts[250]
    assert texts[250].splitlines()[0].rstrip() == str(report).splitlines()[0]
    assert "bf16[8,16]" not in texts[100]
    assert {"operation", "dtype", "why"} <= set(texts[100].split())
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report.show(limit=5)
    assert capsys.readouterr().out == report.table(limit=5) + "\n"


def test_numbers_are_readable():
    counts = {0: "0", 999: "999", 1000: "1.00 k", 9994: "9.99 k", 9996: "10.0 k"}
    counts |= {123456: "123 k", 999_600: "1.00 M", 5 * 10**21: "5000 E"}
    assert {count: flops_text(count) for count in counts} == counts
    assert bytes_text(1536) == "1.54 kB" and bytes_text(3) == "3 B"
    assert flops_text(2_000_000, "FLOPs") == "2.00 MFLOPs"
    assert count_text(12345) == "12,345"
    shares = {0.5: "50.0 %", 0.99999: "99.9 %", 1.0: "100.0 %"}
    assert {share: share_text(share) for share in shares} == shares
    types = ("bfloat16[2]", "float8_e4m3fn[]", "uint8", "bool", "key<fry>[]")
    short = ["bf16[2]", "f8_e4m3fn[]", "u8", "bool", "key<fry>[]"]
    assert list(map(short_type, types)) == short
