"""Recipes compiled for other devices: models, counts, tables, and what is committed."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from benchmarks import processes, recipe_counts, recipe_models, recipe_time, results
from examples.gpt.config import ModelConfig
from mpx._contract._hlo import parse
from mpx._contract._operations import products

TINY = ModelConfig(context=16, width=32, hidden=48, blocks=1, heads=2)
CASE = recipe_models.Case("Equinox", "current", "h100")


@pytest.mark.third_party
@pytest.mark.parametrize("name", recipe_models.FRAMEWORKS)
def test_linear_flops_are_those_of_the_model(name):
    """All products of the plain gradient, less attention's of data with data."""
    initial, loss, _ = recipe_models.FRAMEWORKS[name](TINY)

    def gradient(key, texts):
        weights, rest = eqx.partition(initial(key), eqx.is_inexact_array)
        return jax.grad(lambda w: loss(eqx.combine(w, rest), texts))(weights)

    texts = jnp.zeros((recipe_models.BATCH, TINY.context + 1), jnp.int32)
    lowered = jax.jit(gradient).lower(jax.random.key(0), texts)
    found = products(parse(lowered.as_text(dialect="hlo")))
    # Scores and values, each with two gradients.
    tokens = recipe_models.BATCH * TINY.context
    attention = 2 * 3 * 2 * TINY.blocks * tokens * TINY.context * TINY.width
    total = sum(product.flops for product in found)
    assert total - attention == recipe_models.linear_flops(TINY, head=True)
    head = 3 * 2 * tokens * TINY.width * 256
    assert total - attention - head == recipe_models.linear_flops(TINY, head=False)


PROGRAM = """HloModule step

ENTRY %main (a: f8e5m2[64,32], b: f8e4m3fn[32,16]) -> f32[] {
  %a = f8e5m2[64,32]{1,0} parameter(0)
  %b = f8e4m3fn[32,16]{1,0} parameter(1)
  %half = bf16[64,32]{1,0} convert(%a)
  %one = f32[] constant(1)
  %plain = (bf16[64,16]{1,0}, s8[8]{0}) custom-call(%a, %b, %one, %one), custom_call_target="__cublas$lt$matmul$f8"
  %a3 = f8e5m2[64,4,8]{2,1,0} bitcast(%a)
  %b3 = f8e4m3fn[4,8,16]{2,1,0} bitcast(%b)
  %parts = (f32[4,64,16]{2,1,0}, s8[8]{0}) custom-call(%a3, %b3, %one, %one), custom_call_target="__cublas$lt$matmul$f8"
  ROOT %other = (bf16[64,64]{1,0}, s8[8]{0}) custom-call(%half, %half), custom_call_target="__cublas$lt$matmul"
}
"""  # noqa: E501


def test_calls_are_counted_by_their_sizes():
    counts = recipe_counts.count_text(PROGRAM, CASE)
    assert counts["fast_flops"] == 2 * (2 * 64 * 32 * 16)  # a sum in parts is no more
    assert counts["products"] == {
        "__cublas$lt$matmul bfloat16 x bfloat16": 1,
        "__cublas$lt$matmul$f8 float8_e5m2 x float8_e4m3fn": 2,
    }
    on_tpu = dataclasses.replace(CASE, target="tpu7x")
    assert recipe_counts.count_text(PROGRAM, on_tpu)["fast_flops"] > 0
    in_blocks = dataclasses.replace(CASE, recipe="mxfp8", target="b200")
    assert recipe_counts.count_text(PROGRAM, in_blocks)["fast_flops"] == 0


@pytest.mark.parametrize(("fast", "kept", "met"), [(90, 51, True), (89, 53, False)])
def test_goals_and_tables(fast, kept, met):
    products = {f"{recipe_counts.FP8_CALL} float8": 3, "dot bfloat16": 2}
    counts = {"linear_flops": 90, "fast_flops": fast, "products": products}
    found = results.Results("recipe-counts", "test", "compiled for X")
    found.records = [{**dataclasses.asdict(CASE), "program": "x", "counts": counts}]
    for stack in recipe_counts.STACKS:
        for recipe, limit in recipe_counts.LIMITS.items():
            size = {"bytes": kept * limit, "bfloat16": 52}
            found.records.append({"stack": stack, "recipe": recipe, **size})
    goals = recipe_counts.goals(found)
    assert len(goals) == 5 and {goal.met for goal in goals} == {met}
    units, bytes_kept = recipe_counts.tables(found)
    assert units.rows[0][-3:] == ["100.0%" if met else "98.9%", "3", "2"]
    assert len(bytes_kept.rows) == 4


FEW = [
    case
    for case in recipe_counts.CASES
    if (case.recipe, case.target, case.head) == ("delayed", "h100", False)
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FEW, id="every framework"),
        pytest.param(
            [case for case in recipe_counts.CASES if case not in FEW],
            id="all others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_committed_counts_are_of_todays_programs(cases):
    found = results.read("recipe-counts")
    assert found is not None
    names = [field.name for field in dataclasses.fields(recipe_models.Case)]
    programs = {
        tuple(record[name] for name in names): record["program"]
        for record in found.records
        if "program" in record
    }
    assert set(programs) == {dataclasses.astuple(case) for case in recipe_counts.CASES}
    request = {"task": "lower", "steps": "recipes"}
    request["cases"] = [dataclasses.asdict(case) for case in cases]
    versions, *answers = processes.ask("ours", request, None)
    for package in ("jax", "flax", "equinox"):
        if versions["versions"][package] != found.versions["ours"][package]:
            pytest.skip("other versions lower to other text")
    changed = [
        answer["case"]
        for answer in answers
        if answer["program"] != programs[tuple(answer["case"].values())]
    ]
    assert not changed, (
        "recipe-counts.json is older than the code; run "
        "`python -m benchmarks recipe-counts docs --out benchmarks/results`"
    )


def test_the_committed_counts_meet_their_goals():
    found = results.read("recipe-counts")
    assert found is not None
    missed = [goal.text for goal in recipe_counts.goals(found) if not goal.met]
    assert not missed


# --- The time of an MLP block ---------------------------------------------------------


@pytest.mark.slow
def test_the_mlp_block_is_timed_in_rounds():
    shape = {"tokens": 32, "width": 16, "hidden": 32}
    request = {"task": "recipe time", "rounds": 2, "chain": 2, "shape": shape}
    _, device, *rounds = processes.ask("ours", {**request, "platform": "cpu"}, None)
    assert device == {"device": "cpu"} and len(rounds) == 2
    for answer in rounds:
        assert [sample["arm"] for sample in answer["round"]] == list(recipe_time.ARMS)
        assert all(sample["seconds"] > 0 for sample in answer["round"])


@pytest.mark.third_party
@pytest.mark.parametrize("arm", recipe_time.ARMS)
def test_all_products_of_the_mlp_block_are_quantized(arm):
    step = recipe_time.build(arm, tokens=32, width=16, hidden=48, target="sm_90")
    traced = step.jitted().trace(step.state, step.batch)
    lowered = traced.lower(lowering_platforms=("cuda",))
    found = products(parse(lowered.as_text(dialect="hlo")))
    # Forward, and both gradients, of both layers.
    assert sum(x.flops for x in found) == 2 * 3 * 2 * 32 * 16 * 48
    kind = "bfloat16" if arm == "bfloat16" else "float8"
    assert all(dtype.startswith(kind) for x in found for dtype in x.dtypes)
    if arm == "delayed":
        state, train = step.state, step.jitted()
        for _ in range(2):
            state, (loss, grads) = train(state, step.batch)
        assert math.isfinite(loss) and all(map(jnp.any, jax.tree.leaves(grads)))


def test_the_table_pairs_the_rounds():
    found = results.Results("recipe-time", "test", "measured on NVIDIA H200")
    found.records = recipe_time.records(
        {
            "round": [
                {"arm": "bfloat16", "seconds": base},
                {"arm": "delayed", "seconds": base / 1.7},
                {"arm": "current", "seconds": base / 1.5},
            ]
        }
        for base in (0.01, 0.03, 0.02)
    )
    (table,) = recipe_time.tables(found)
    assert [row[-1] for row in table.rows] == ["1.00", "1.70", "1.50"]
    assert [goal.met for goal in recipe_time.goals(found)] == [True, False]
    found.device = "measured on another GPU"
    assert recipe_time.goals(found) == []
