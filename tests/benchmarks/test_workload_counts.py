"""Wide steps in 8 bits, others in half precision: kernels, arms, what is committed."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mpx
from benchmarks import processes, results, steps
from benchmarks.counter import counter as kernels
from benchmarks.counts import eight_bits, half, products as product_counts
from benchmarks.models import eight_bits as models, layers, various
from benchmarks.models.weights import Weights, random_weights
from benchmarks.peers import eight_bits as peers
from mpx._contract._hlo import parse
from mpx._contract._operations import products
from tests.helpers import slow_but

PROGRAM = """HloModule step

%sliced (whole: f32[4,100], at: s32[]) -> f32[100] {
  %whole = f32[4,100]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,100]{1,0} dynamic-slice(%whole, %at, %zero), dynamic_slice_sizes={1,100}
  ROOT %row = f32[100]{0} bitcast(%slice)
}

%written (whole.1: f32[4,100], row.1: f32[100], at.1: s32[]) -> f32[4,100] {
  %whole.1 = f32[4,100]{1,0} parameter(0)
  %row.1 = f32[100]{0} parameter(1)
  %at.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %as_one = f32[1,100]{1,0} bitcast(%row.1)
  ROOT %update = f32[4,100]{1,0} dynamic-update-slice(%whole.1, %as_one, %at.1, %zero.1)
}

%body (carry: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %carry = (s32[], f32[4,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %all = f32[4,100]{1,0} get-tuple-element(%carry), index=1
  %one = f32[100]{0} fusion(%all, %i), kind=kLoop, calls=%sliced
  %new = f32[4,100]{1,0} fusion(%all, %one, %i), kind=kLoop, calls=%written
  ROOT %next = (s32[], f32[4,100]{1,0}) tuple(%i, %new)
}

%more (state: (s32[], f32[4,100])) -> pred[] {
  %state = (s32[], f32[4,100]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f8e5m2[2,64,32], b: f8e4m3fn[2,32,16], x: (s32[], f32[4,100])) -> f32[] {
  %a = f8e5m2[2,64,32]{2,1,0} parameter(0)
  %b = f8e4m3fn[2,32,16]{2,1,0} parameter(1)
  %x = (s32[], f32[4,100]{1,0}) parameter(2)
  %call = (bf16[2,64,16]{2,1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(step)/dot_general"}, backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}
  %loop = (s32[], f32[4,100]{1,0}) while(%x), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %end = f32[] constant(0)
}
"""  # noqa: E501


def test_kernels_and_roof_of_a_program_by_hand():
    call, read, written = kernels.kernels_of(PROGRAM)
    assert call.operations == 2 * (2 * 64 * 32 * 16) and call.bits == 8
    assert call.bytes == 2 * (64 * 32 + 32 * 16 + 2 * 64 * 16)  # not what it works in
    assert call.source == "jit(step)/dot_general" and not read.source
    assert (read.times, read.bytes) == (4, 400 + 4 + 400)  # a slice, where, and a row
    assert (written.times, written.bytes) == (4, 400 + 4 + 400)
    roof = kernels.Roof(bandwidth=1e3, peaks={8: 1e4})
    by_operations, by_bytes = call.operations / 1e4, 4 * 2 * 804 / 1e3
    assert call.bytes / 1e3 < by_operations
    found = kernels.roof_seconds([call, read, written], roof)
    assert found == pytest.approx(by_operations + by_bytes)


def test_a_program_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="needs an HLO module with an ENTRY"):
        kernels.kernels_of("HloModule empty")


def test_fp8_by_hand_has_the_gradients_of_float32():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((4, 32, 64), (64, 48), (4, 32, 48))
    x, weight, gradient = map(jax.random.normal, keys, shapes)
    found, exact = (
        jax.tree.leaves(jax.vjp(product, x, weight)[1](gradient))
        for product in (peers.by_hand, jnp.matmul)
    )
    for ours, theirs in zip(found, exact, strict=True):
        # E5M2 has 2 bits behind the leading one: 1/8 at most, about 0.04 on average.
        assert jnp.linalg.norm(ours - theirs) < 0.08 * jnp.linalg.norm(theirs)


@pytest.mark.third_party
@pytest.mark.parametrize(
    "arm", slow_but(["FP8 by hand", "current"], ["FP8 by hand", "Flax fp8", "current"])
)
def test_all_linear_layers_of_a_workload_are_in_8_bits(arm):
    case = models.Case("h100", "tiny llama", arm)
    with mpx.autocast(target="h100", ambient=True):
        step = models.build(case)
        traced = step.jitted().trace(step.state, step.batch)
    lowered = traced.lower(lowering_platforms=("cuda",))
    found = products(parse(lowered.as_text(dialect="hlo")))
    quantized = [x for x in found if all("float8" in dtype for dtype in x.dtypes)]
    workload = models.WORKLOADS[case.workload]
    assert sum(x.flops for x in quantized) == workload.linear_operations


@pytest.mark.third_party
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped():
    case = models.Case("cpu", "tiny ffn", models.NAIVE)
    step = models.build(case, seed=0)
    x, labels = step.batch
    train = jax.jit(step.function)
    for bad in (jnp.inf, 0.0):
        state, _ = train(step.state, (x.at[0, 0].add(bad), labels))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), state, step.state)
        assert all(jax.tree.leaves(same)) == bool(bad)


@pytest.mark.third_party
@pytest.mark.slow
def test_a_scan_has_the_loss_of_its_blocks_one_after_the_other():
    sizes = models.WORKLOADS["tiny llama"].sizes
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, sizes.classes)
    loss = various.llama_in("unrolled", sizes)

    def unrolled(layers, tokens):
        return loss(layers, tokens, 2)

    weights = random_weights(unrolled, tokens, jax.random.key(1))
    expected = float(unrolled(Weights(weights), tokens))
    blocks = [weights.pop(f"block{index}") for index in range(2)]
    weights["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    for way in ("scan", "checkpoint"):
        found = various.llama_in(way, sizes)(Weights(weights), tokens, 2)
        assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("traffic", "met"), [(0.89, True), (2.0, False)])
def test_goals_and_tables(traffic, met):
    found = results.Results("workloads", "test", "compiled for X")
    for case in eight_bits.CASES:
        share = traffic if "naive" not in case.arm else 1.0
        peers_here = eight_bits.PEERS[case.target, case.workload]
        share = 3.0 if case.arm in peers_here else share
        counts = dict.fromkeys(("kernels", "calls"), 1)
        counts |= {"traffic": share, "roof": share / 3, "on_units": 1.0}
        counts |= {"temporaries": 1, "compile": 1.0}
        if case.arm == models.NAIVE:
            counts["roof"] = 1.0
        found.records.append({**dataclasses.asdict(case), "counts": counts})
    for case in half.CASES:
        share = 1.0 if case.arm == half.NAIVE else traffic
        counts = {"temporaries": share, "traffic": share}
        found.records.append({**dataclasses.asdict(case), "counts": counts})
    for case in product_counts.CASES:
        roof = 1.0 if case.product == layers.NAIVE else traffic
        counts = {"roof": roof, "traffic": roof, "kernels": 1}
        found.records.append({**dataclasses.asdict(case), "counts": counts})
    parts = eight_bits, half, product_counts
    goals = [goal for part in parts for goal in part.goals(found)]
    setups = len(half.SETUPS) + len(half.TPU_SETUPS)
    compared = sum(map(len, eight_bits.PEERS.values()))
    of_limits = sum(1 + (least > 0) for _, least in eight_bits.LIMITS.values())
    assert len(goals) == of_limits + compared + 4 * setups + 6
    missed = [goal.text for goal in goals if not goal.met]
    assert not missed if met else len(missed) > 40
    (wide,), (small,), (single,) = (part.tables(found) for part in parts)
    assert len(single.rows) == len(product_counts.SIZES)
    assert ("**" in single.rows[0][1]) != met
    assert len(wide.rows) == len(eight_bits.CASES)
    assert len(small.rows) == setups
    assert steps.CHECKED.name == wide.rows[0][1]


def test_the_page_of_low_precision_shows_the_committed_bytes():
    counts = eight_bits._counts(results.read("workloads"))["b200", "ffn gelu"]
    naive = counts[eight_bits.NAIVE]["traffic"]
    page = (processes.REPOSITORY / "docs/low-precision.md").read_text()
    for name, arms in {
        "MXFP8": (eight_bits.MXFP8, eight_bits.MXFP8_KERNEL),
        "NVFP4": (eight_bits.NVFP4, eight_bits.NVFP4_KERNEL),
    }.items():
        cells = " | ".join(f"{counts[arm]['traffic'] / naive:.2f}" for arm in arms)
        assert f"| {name} | {cells} |" in page


def test_the_page_says_where_the_committed_bytes_are():
    """The parts, counted by hand from the kernels,  add up to the counts."""
    counts = eight_bits._counts(results.read("workloads"))["h100", "ffn silu"]
    page = (processes.REPOSITORY / "docs/benchmark-details.md").read_text()
    section = page.split("## Where the bytes of 8 bits are")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines()]
    numbers = [list(map(float, row[1:])) for row in rows if row[-1][-3:-2] == "."]
    *parts, total = numbers
    arms = (eight_bits.NAIVE, eight_bits.DELAYED, eight_bits.CURRENT)
    assert total == [round(counts[arm]["traffic"] / 1e9, 2) for arm in arms]
    assert [round(sum(part), 2) for part in zip(*parts, strict=True)] == total
