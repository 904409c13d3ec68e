"""Steps that recompute islands, compiled for other devices: models, goals, commits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx
from benchmarks import our_arms, results
from benchmarks.counts import residuals as residual_counts
from benchmarks.models import (
    plain as residual_models,
    transformers,
)
from benchmarks.models.problems import PROBLEMS
from tests.helpers import slow_but

PROGRAM = """HloModule step

%fused (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  ROOT %inside = bf16[8,8]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %one = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %two = (bf16[8,8]{1,0}, s8[8]{0}) custom-call(%one), custom_call_target="__cublas$gemm"
  %sum = bf16[8,8]{1,0} add(%one, %a), metadata={op_name="dot_general"}
  %other = bf16[8,8]{1,0} custom-call(%sum), custom_call_target="Sharding"
  ROOT %result = bf16[8,8]{1,0} fusion(%other), kind=kLoop, calls=%fused
}
"""  # noqa: E501


def test_products_are_counted_wherever_they_stand():
    assert residual_counts.products_of(PROGRAM) == 3


@pytest.mark.third_party
def test_the_gpt_is_causal_and_scans_alike():
    model = transformers.GPT(16, 32, 2, 8, 2, jax.random.key(0), scan=True)
    text = jnp.arange(8)
    run = eqx.filter_jit(lambda model, text: model(text))
    logits, changed = run(model, text), run(model, text.at[5].set(99))
    assert logits.shape == (8, 256)
    assert jnp.array_equal(logits[:5], changed[:5])
    assert not jnp.array_equal(logits[5:], changed[5:])
    plain = transformers.GPT(16, 32, 2, 8, 2, jax.random.key(0))
    assert jnp.allclose(logits, run(plain, text), atol=1e-5)


@pytest.mark.third_party
def test_the_vit_drops_at_three_places():
    model = transformers.ViT(PROBLEMS["tiny"], 1, 0.5, jax.random.key(0))
    image = jnp.ones((8, 8, 1))
    text = str(jax.make_jaxpr(lambda key: model(image, key))(jax.random.key(1)))
    assert text.count("name=_bernoulli") == 3


@pytest.mark.third_party
@pytest.mark.parametrize(
    "name",
    slow_but([residual_counts.KEPT, residual_counts.DEFAULT], residual_counts.OUR_ARMS),
)
def test_every_arm_of_the_benchmark_can_be_traced(name):
    case = residual_models.Case("h100", "tiny", 1, 4, name)
    step = residual_models.build(our_arms.ARMS[name], case)
    (_, loss) = jax.eval_shape(step.jitted(), step.state, step.batch)
    assert loss.dtype == "float32"


def count_of(memory, traffic, products=85):
    return {"memory": memory, "traffic": traffic, "products": products}


@pytest.mark.parametrize("met", [True, False])
def test_goals_and_tables(met):
    setup = ("h100", "desktop", 4, 256)
    names = ("target", "model", "blocks", "batch")
    arms = {
        residual_counts.FLOAT32: count_of(200, 200),
        residual_counts.KEPT: count_of(150, 150),
        residual_counts.DEFAULT: count_of(100, 100, 85 if met else 86),
        residual_counts.HALF: count_of(100 if met else 110, 100),
    }
    found = results.Results("residuals", "test", "compiled for X")
    found.records = [
        {**dict(zip(names, setup, strict=True)), "arm": arm, "counts": count}
        for arm, count in arms.items()
    ]
    missed = [goal for goal in residual_counts.goals(found) if not goal.met]
    assert len(missed) == (0 if met else 2)
    (table,) = residual_counts.tables(found)
    assert [row[2] for row in table.rows][:3] == ["1.00", "1.33", "2.00"]


@pytest.mark.parametrize(("traffic", "met"), [(90, True), (91, False)])
def test_on_a_tpu_autocast_is_compared_with_the_peer(traffic, met):
    setup = {"target": "v5e", "model": "desktop", "blocks": 2, "batch": 256}
    arms = {
        residual_counts.FLOAT32: count_of(200, 200),
        residual_counts.KEPT: count_of(90, 90),
        residual_counts.DEFAULT: count_of(90, traffic),
        residual_counts.HALF: count_of(80, 80),
        residual_counts.PEER: count_of(90, 90),
    }
    found = results.Results("residuals", "test", "compiled for X")
    found.records = [
        {**setup, "arm": arm, "counts": count} for arm, count in arms.items()
    ]
    missed = [goal.text for goal in residual_counts.goals(found) if not goal.met]
    assert len(missed) == (0 if met else 1)


@pytest.mark.third_party
@pytest.mark.parametrize("model", slow_but([], ["gpt", "desktop", "base"]))
def test_recomputing_takes_few_floating_point_operations(model):
    found = {}
    for arm in (residual_counts.KEPT, residual_counts.DEFAULT):
        case = residual_models.Case("h100", model, 2, 16, arm)
        step = residual_models.build(our_arms.ARMS[arm], case)
        found[arm] = mpx.explain(step.function)(step.state, step.batch).totals.flops
    ratio = found[residual_counts.DEFAULT] / found[residual_counts.KEPT]
    assert 1 < ratio <= 1.02
