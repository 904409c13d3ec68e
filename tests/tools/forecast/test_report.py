"""A report as sentences, tables, a page, a picture and JSON."""

import dataclasses
import functools
import json
import math
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest

import mpx
from mpx._tools._counter import TARGETS, kernels_of, roof_seconds
from mpx._tools._forecast._forecast_report import (
    Constant,
    Estimate,
    KernelGroup,
    Matmul,
    gain,
    quantized,
)
from mpx._tools._forecast._forecast_views import Forecast, constant_text, tables
from mpx._tools._forecast._steps import (
    ForecastStep as Step,
    Variant as Precision,
    read_precisions,
)

HALF = Estimate(
    target="h100",
    precision="bfloat16",
    memory=10_000_000_000,
    memory_by_part={"weights": 2_000_000_000, "activations": 8_000_000_000},
    traffic=70_000_000_000,
    quantizing=0,
    quantized=0,
    flops={"16 bits": 10**13},
    sent={"bf16": 10**9},
    kernels=100,
    roofline=0.02,
    time=(0.03, 0.05),
    bound={"matmul, 16 bits": 0.8, "elementwise": 0.2},
    by_memory=0.2,
    top=(KernelGroup("elementwise", 10**9, 0, 1e-3, 4, "a<b>", "train.py:3"),),
    batch=8,
)
LESS = {"memory": 9_000_000_000, "quantizing": 10**9, "quantized": 10**9}
LESS |= {"flops": {"8 bits": 10**13}, "time": (0.02, 0.04)}
LESS |= {"pays_from": 4, "largest_batch": 40}
FEW = dataclasses.replace(HALF, precision="delayed", **LESS)


def report(*estimates):
    target = TARGETS["h100"]
    about = {"versions": {"jax": "0.10.2"}, "notes": ("A note.",)}
    about |= {"titles": {"h100": target.title}, "roofs": {"h100": target.roof}}
    constants = (Constant("h100", "reads", "0.9", "given"),)
    return Forecast(name="loss", estimates=estimates, constants=constants, **about)


def test_the_sentence():
    (sentence,) = report(HALF, FEW).sentences
    assert sentence == (
        "On an NVIDIA H100 80GB HBM3 delayed takes 0.75 (0.67 to 0.80) of bfloat16's "
        "time in this step and 0.90 of its memory. Most of the time goes to "
        "16-bit matmuls and elementwise kernels. It would not pay below batch 4."
    )


def test_it_says_what_does_not_pay_and_what_does_not_fit():
    few = functools.partial(dataclasses.replace, FEW)
    slow = report(HALF, few(time=(0.04, 0.06)))
    assert slow.sentences[0].endswith("It does not pay.")
    emulated = report(HALF, few(flops={"16 bits": 10**13}))
    assert "No matmul is in 8 bits" in emulated.sentences[0]
    large = report(HALF, few(memory=90_000_000_000))
    assert "does not fit: it needs 90.0 GB of 85.0 GB" in large.sentences[0]
    never = float("inf")
    nothing = {"memory": None, "memory_by_part": {}, "time": (never, never)}
    refused = few(**nothing, roofline=never)
    found = report(HALF, refused)
    assert "does not fit: it needs more than 85.0 GB" in found.sentences[0]
    assert "too much" in str(found)
    assert Forecast.from_json(found.to_json()) == found
    assert "Infinity" not in found.to_json()
    # Nothing can be said of times beside a baseline that does not fit.
    unfit = dataclasses.replace(refused, precision="bfloat16")
    (modelled,) = (t for t in tables(report(unfit, FEW)) if t.title == "Modelled: time")
    assert "to baseline" not in modelled.heads


def test_text_has_counted_and_modelled_apart_and_json_all():
    found = report(HALF, FEW)
    text = str(found)
    counted, modelled = text.split("Modelled: time")
    assert "quantizing" in counted and "roofline" not in counted
    for name in ("0.75", "train.py:3", "A note.", "jax 0.10.2", "given"):
        assert name in modelled
    assert "float32" not in text
    assert Forecast.from_json(found.to_json()) == found
    data = json.loads(found.to_json())
    for wrong in ([], {}, data | {"version": 0}, data | {"format": "mpx report"}):
        with pytest.raises(ValueError, match="that this version of mpx wrote"):
            Forecast.from_json(json.dumps(wrong))


def test_the_page_is_escaped_and_saved_and_has_the_picture(tmp_path):
    found = report(HALF, FEW)
    page = found.to_html()
    assert "a&lt;b&gt;" in page and "<svg" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    svg = ElementTree.fromstring(found.to_svg())
    bars = svg.findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 2 * 2 + 2 + 2 * 2  # parts, their legend, range and roofline
    found = report(HALF)
    for ending in ("html", "json", "txt", "svg"):
        found.save(tmp_path / f"forecast.{ending}")
        assert (tmp_path / f"forecast.{ending}").stat().st_size > 100
    with pytest.raises(ValueError, match=r"must end with one of .*\.svg"):
        found.save(tmp_path / "forecast.pdf")
    assert "iframe" in found._repr_html_()


def test_nothing_of_the_picture_is_cut_or_needs_scrolling():
    parts = ("weights", "optimizer", "other arguments", "activations", "gradients")
    sizes = dict.fromkeys((*parts, "working memory"), 10**9)
    found = report(HALF, dataclasses.replace(FEW, memory_by_part=sizes))
    svg = ElementTree.fromstring(found.to_svg())
    *_, wide, high = map(int, svg.attrib["viewBox"].split())
    for one in svg.iter():
        if "x" not in one.attrib:
            continue
        # A letter of 14 px is at most 8 px wide, on average.
        size = float(one.get("width", 8 * len(one.text or "")))
        assert float(one.attrib["x"]) + size <= wide
        assert float(one.attrib["y"]) + float(one.get("height", 0)) <= high
    # 400 px of a phone leave letters that can be read.
    assert wide <= 520
    assert "svg { width: 100%; max-width" in found.to_html()


def test_constants_have_units():
    peaks = "32 bits: 494.5 TFLOP/s; 16 bits: 989 TFLOP/s; 8 bits: 1979 TFLOP/s"
    wanted = {"peaks": peaks, "bandwidth": "3.35 TB/s", "link": "450 GB/s"}
    wanted |= {"memory": "84.98 GB", "start": "0 us to 2 us", "matmul": "0.78 to 0.6"}
    roof = TARGETS["h100"].roof
    assert {name: constant_text(roof, name) for name in wanted} == wanted
    for target in TARGETS.values():
        for name in target.sources:
            assert constant_text(target.roof, name)


@pytest.mark.slow
@pytest.mark.third_party
def test_rules_hold_for_what_they_name():
    def loss(w, x):
        return jnp.mean((x @ w["large"] @ w["small"] @ w["out"]) ** 2)

    shapes = {"large": (4096, 4096), "small": (4096, 256), "out": (256, 4096)}
    w = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    x = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
    recipe = mpx.Float8CurrentScaling()
    step = Step(loss, optax.sgd(1.0), False, (w, x), {})
    matmuls = quantized(step, Precision("current", {"recipe": recipe}), "h100")
    large, small = matmuls
    assert large.shapes == "512x4096 by 4096x4096"
    assert small.shapes == "512x4096 by 4096x256"
    assert large.multiplications == 512 * 4096**2
    assert small.numbers == 512 * 4096 + 4096 * 256 + 512 * 256
    assert small.source.endswith(f":{loss.__code__.co_firstlineno + 1}")
    few = dataclasses.replace(FEW, matmuls=matmuls, quantizing=4 * 10**9)
    rules = report(HALF, few).where_it_pays("delayed")
    assert "4096x256" in repr(rules)
    assert "4096x4096" not in repr(rules)
    # The rules, given to the loss, leave what they name in half precision.
    ruled = mpx.autocast(loss, recipe=recipe, rules=rules, target="h100")
    low = [one for one in mpx.explain(ruled)(w, x).operations if one.is_low]
    assert [one.outputs for one in low] == [("bfloat16[512,4096]",)]


TPUS = ("v5e", "v5p", "v6e", "tpu7x")
INT8 = """ENTRY %main (a: s8[256,512], b: s8[512,128]) -> s32[256,128] {
  %a = s8[256,512]{1,0} parameter(0)
  %b = s8[512,128]{1,0} parameter(1)
  ROOT %dot = s32[256,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}"""


def test_integers_of_8_bits_multiply_at_their_own_peak():
    (kernel,) = kernels_of(INT8)
    peaks = {"v5e": 393e12, "v5p": 918e12, "v6e": 1836e12, "tpu7x": 1153.5e12}
    peaks |= {"h100": 1979e12, "b200": 4.5e15}
    for name, peak in peaks.items():
        roof = dataclasses.replace(TARGETS[name].roof, bandwidth=math.inf)
        time = 2 * 256 * 512 * 128 / peak
        assert roof_seconds([kernel], roof) == pytest.approx(time)
    few, integers = read_precisions(("row-wise", "int8"), {})
    assert few.options == {"recipe": mpx.Float8RowwiseScaling()}
    assert integers.options == {"recipe": mpx.Int8CurrentScaling()}


def test_rules_where_it_pays():
    roof = TARGETS["h100"].roof
    wide, narrow = 8192**3, 8192 * 64 * 64
    assert gain(wide, 3 * 8192**2, 3.0, roof) > 0
    assert gain(narrow, 8192 * 128 + 64 * 64, 3.0, roof) < 0
    # Of TPUs without FP8 it is integers that gain; those of TPU7x are FP8's.
    gains = [gain(wide, 3 * 8192**2, 3.0, TARGETS[name].roof) for name in TPUS]
    assert min(gains) > 0
    roof = TARGETS["b200"].roof
    assert gain(wide, 3 * 8192**2, 3.0, roof, 4) > gain(wide, 3 * 8192**2, 3.0, roof, 8)
    small = Matmul("train.py:3", "head", "8192x64 by 64x64", narrow, 8192 * 128 + 64**2)
    large = Matmul("train.py:9", "", "8192x8192 by 8192x8192", wide, 3 * 8192**2)
    few = dataclasses.replace(FEW, matmuls=(large, small))
    found = report(HALF, few)
    assert Forecast.from_json(found.to_json()) == found
    rules = found.where_it_pays("delayed")
    assert "loses: train.py:3 head, 8192x64 by 64x64>" in repr(rules)
    assert "train.py:9" not in repr(rules)
    (rule,) = rules.rules
    assert str(rule) == "half for primitive dot_general, when QuantizingLoses"
    none = report(HALF, dataclasses.replace(FEW, matmuls=(large,)))
    assert none.where_it_pays("delayed") == mpx.Rules()
    with pytest.raises(ValueError, match="8 bits or less; got 'bfloat16' on 'h100'"):
        report(HALF, FEW).where_it_pays("bfloat16")
