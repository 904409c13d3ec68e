"""Recipes compiled for other devices: models, counts, tables, and what is committed."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from benchmarks import our_arms, results
from benchmarks.counts import recipes as recipe_counts
from benchmarks.models import frameworks as recipe_models, layers as linear_layers
from benchmarks.peers import layers as flax_layers
from examples.gpt import ModelConfig
from mpx._contract._hlo import parse
from mpx._contract._operations import products
from tests.helpers import slow_but

TINY = ModelConfig(context=16, width=32, hidden=48, blocks=1, heads=2)
CASE = recipe_models.Case("Equinox", "current", "h100")


@pytest.mark.third_party
@pytest.mark.parametrize("name", slow_but(["Equinox"], recipe_models.FRAMEWORKS))
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
    goals = list(recipe_counts.goals(found))
    assert len(goals) == 5 and {goal.met for goal in goals} == {met}
    units, bytes_kept = recipe_counts.tables(found)
    assert units.rows[0][-3:] == ["100.0%" if met else "98.9%", "3", "2"]
    assert len(bytes_kept.rows) == 4


# --- Stacks of linear layers ----------------------------------------------------------


@pytest.mark.third_party
@pytest.mark.parametrize(
    "arm", slow_but(["delayed"], ["autocast bfloat16", "delayed", "current"])
)
def test_all_products_of_a_stack_are_quantized(arm):
    step = linear_layers.build(arm, 32, (16, 48, 16), target="sm_90")
    traced = step.jitted().trace(step.state, step.batch)
    lowered = traced.lower(lowering_platforms=("cuda",))
    found = products(parse(lowered.as_text(dialect="hlo")))
    # Forward, and both gradients, of both layers.
    assert sum(x.flops for x in found) == linear_layers.flops(32, (16, 48, 16))
    kind = "float8" if arm in our_arms.RECIPES else "bfloat16"
    assert all(dtype.startswith(kind) for x in found for dtype in x.dtypes)


@pytest.mark.third_party
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=[pytest.mark.slow] if "fp" in arm else [])
        for arm in (*linear_layers.ARMS, *flax_layers.ARMS)
    ],
)
def test_a_stack_has_the_gradients_of_float32(arm):
    """Of random weights of its own where it is of others; as large, then."""
    for package in flax_layers.ARMS.get(arm, ()):
        pytest.importorskip(package)
    module = flax_layers if arm in flax_layers.ARMS else linear_layers
    sizes = []
    for one, built_by in (("float32", linear_layers), (arm, module)):
        step = built_by.build(one, 32, (32, 64, 32), seed=0)
        state, train = step.state, step.jitted()
        for _ in range(2):
            state, (_, grads) = train(state, step.batch)
        sizes.append(sum(float(jnp.sum(jnp.abs(g))) for g in jax.tree.leaves(grads)))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
