"""Whole steps on TPUs: their models train, and what is counted of a program."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from benchmarks import results
from benchmarks.counter import TARGETS, counter
from benchmarks.counts import whole_steps_tpu as part
from benchmarks.fingerprint import fingerprint
from benchmarks.models import on_tpu, whole_steps as models
from tests.helpers import slow_but

is_missing = counter.why_missing(TARGETS["v5e"]) is not None
_SIZES = models.Sizes(32, 64, 32, layers=2, heads=4, kernel=True)
_IMAGES = {"rows": 4, "context": 0, "attention": models.WHOLE["ViT-B"].attention}
_TEXTS = {"rows": 4, "context": 16}
TINY = {
    "vit": models.Whole(on_tpu.vit, _SIZES, image=(9, 12), **_IMAGES),
    "experts": models.Whole(
        on_tpu.dispatched, _SIZES, attention=on_tpu.SCORES["float32"], **_TEXTS
    ),
    "scan": models.Whole(
        models.WHOLE["state space of 2, float32 scan"].model, _SIZES, **_TEXTS
    ),
    "unet": models.Whole(on_tpu.unet, _SIZES, image=(8, 8, 4), **_IMAGES),
}


@pytest.mark.third_party
@pytest.mark.parametrize("name", slow_but(["vit"], TINY))
def test_the_arms_have_the_losses_of_float32(name):
    def losses(arm):
        case = models.Case("v5e", name, "float32", arm)
        step = models.build(case, seed=0, whole=TINY[name])
        train, state = jax.jit(step.function), step.state
        state, first = train(state, step.batch)
        return float(first), float(train(state, step.batch)[1])

    expected = losses(part.FLOAT32)
    assert expected[0] != expected[1]
    for arm in part.ARMS[1:]:
        assert losses(arm) == pytest.approx(expected, rel=0.03), arm


@pytest.mark.parametrize(("share", "met"), [(0.5, True), (2.0, False)])
def test_goals_and_tables(share, met):
    found = results.Results("whole-steps-tpu", "test", "compiled for X")
    assert not list(part.tables(found))
    for case in part.CASES:
        one = 1e9 * (1 if case.arm == part.NAIVE else share)
        counts = dict.fromkeys(("memory", "traffic", "all"), one)
        few = {"s8 x s8 > s32": 12 if met else 11}
        counts |= {"kernels": 3, "products": {"bf16 x bf16 > bf16": 2, **few}}
        found.records.append({**dataclasses.asdict(case), "counts": counts})
    goals = list(part.goals(found))
    assert len(goals) >= len(part.LIMITS) and {goal.met for goal in goals} == {met}
    (table,) = part.tables(found)
    assert len(table.rows) == len(part.STEPS) + 3  # v5p, v6e and TPU7x
    shares = {cell for row in table.rows for cell in row[2:]}
    assert shares == {"", " / ".join([f"{share:.2f}"] * 3)}


PROGRAM = """HloModule step

%body (a: bf16[64,32], b: f32[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  ROOT %c = f32[64,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[64,32], b: f32[32,16]) -> f32[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %s = (bf16[64,32]{1,0}, bf16[64,32]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%a)
  %here = bf16[64,32]{1,0:S(1)} copy-done(%s)
  ROOT %d = f32[64,16]{1,0} fusion(%here, %b), kind=kOutput, calls=%body
}
"""


def test_all_bytes_are_those_of_kernels_and_no_copies():
    of_a, of_b, of_result = 2 * 64 * 32, 4 * 32 * 16, 4 * 64 * 16
    found = part.count(SimpleNamespace(text=PROGRAM, memory=7), {})
    assert found["traffic"] == of_a + of_b + of_result
    assert found["all"] == of_a + of_b + of_result
    assert found["products"] == {"bf16 x f32 > f32": 1} and found["memory"] == 7
    on_chip = PROGRAM.replace("%b = f32[32,16]{1,0}", "%b = f32[32,16]{1,0:S(1)}")
    found = part.count(SimpleNamespace(text=on_chip, memory=7), {})
    assert found["all"] - found["traffic"] == of_b


@pytest.mark.skipif(is_missing, reason="needs libtpu")
def test_a_pallas_kernel_of_a_tpu_has_one_fingerprint():
    """It has lines of code and paths in it, and the version of who compiles it."""

    def call(*each):
        return on_tpu.by_pallas(*each)

    def traced(length, **place):
        shape = jax.ShapeDtypeStruct((1, length, 1, 128), "bfloat16", **place)
        return jax.jit(lambda *each: call(*each)).trace(*[shape] * 3)

    anywhere, other = (
        traced(length).lower(lowering_platforms=("tpu",)) for length in (128, 256)
    )
    (device,) = counter.compile_only_devices(TARGETS["v5e"])
    sharding = jax.sharding.SingleDeviceSharding(device)
    here = traced(128, sharding=sharding).lower()
    assert here.as_text() != anywhere.as_text()
    assert fingerprint(here) == fingerprint(anywhere) != fingerprint(other)
