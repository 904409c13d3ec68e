"""Steps whose attention is one kernel, compiled for an H100: models, goals, commits."""

import dataclasses

import jax
import pytest

from benchmarks import results
from benchmarks.counts import attention as attention_counts
from benchmarks.counts.attention import CASES, LAYERS, OURS, OURS_HALF, PEER, SIZES
from benchmarks.models import attention as attention_models


@pytest.mark.third_party
@pytest.mark.parametrize(
    "name", [*attention_models.CALLS, pytest.param("gpt", marks=pytest.mark.slow)]
)
def test_every_case_can_be_traced(name):
    """But casts by hand around JAX's kernel, which needs cuDNN where it is traced."""
    for case in CASES:
        if case.model != name or case.attention == "jax.nn, cudnn":
            continue
        case = dataclasses.replace(case, context=128, batch=2)
        step = attention_models.build(dataclasses.asdict(case))
        _, loss = jax.eval_shape(step.jitted(), step.state, step.batch)
        assert loss.shape == () and loss.dtype == "float32"


@pytest.mark.third_party
@pytest.mark.slow
def test_every_way_to_write_attention_is_the_same():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    full = lambda func, dtype: func  # noqa: E731
    first, *rest = (
        attend(q, k, v, full)
        for name, attend in attention_models.ATTENTION.items()
        if name != "jax.nn, cudnn"
    )
    for other in rest:
        assert abs(other - first).max() < 1e-5


class Compiled:
    def as_text(self):
        return """
        %a = (bf16[8]) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
        %b = (bf16[8]) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
        %c = (bf16[8]) custom-call(%b), custom_call_target="__cudnn$fmhaSoftmaxBackward"
        %d = bf16[8] custom-call(%c), custom_call_target="__cublas$gemm"
        """


def test_calls_of_the_kernel_are_counted(monkeypatch):
    made = attention_counts.program.Counts(1, 1, 1, 1, 1, "x", None, None)
    monkeypatch.setattr(attention_counts.program, "count", lambda _: made)
    count = attention_counts.count(Compiled(), {})
    assert count["calls"] == {"fmhaSoftmax": 2, "fmhaSoftmaxBackward": 1}
    assert attention_counts._kernels(count) == (2, 1)


def record_of(case, memory=100, kernels=1):
    names = {"fmhaSoftmax": kernels, "fmhaSoftmaxBackward": kernels} if kernels else {}
    count = {"memory": memory, "traffic": memory, "arguments": 10, "calls": names}
    return {**dataclasses.asdict(case), "counts": count}


@pytest.mark.parametrize("met", [True, False])
def test_goals_and_tables(met):
    found = results.Results("attention", "test", "compiled for X")
    for case in CASES:
        way = case.arm, case.attention
        kernels = LAYERS if way in (OURS, OURS_HALF, PEER) else 0
        if case.model != "gpt":
            is_used = case.attention == "mpx.nn" and (
                case.model != "dropout" or not met
            )
            kernels = int(is_used)
        memory = 110 if way == OURS_HALF and not met else 100
        found.records.append(record_of(case, memory, kernels))
    missed = [goal.text for goal in attention_counts.goals(found) if not goal.met]
    # Bytes, of two kinds, against casts by hand and a naive cast; and a call.
    assert len(missed) == (0 if met else 2 * 2 * len(SIZES) + 1)
    *gpt, calls = attention_counts.tables(found)
    assert len(gpt) == len(SIZES) and len(calls.rows) == len(attention_models.CALLS)
    by_title = {row[0]: row[1] for row in calls.rows}
    assert by_title["nothing else"] == "`fmhaSoftmax`, `fmhaSoftmaxBackward`"
