"""Whole steps of large models: their arms agree, and what is committed is today's."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import results
from benchmarks.counts import cost, whole_steps
from benchmarks.models import roads, whole_steps as models
from benchmarks.models.weights import by_slices, shapes_of
from tests.helpers import slow_but

# Each model and each kind of weights once or twice; those of `make test` are cheap.
STEPS = [
    ("tiny ffn", "float32"),
    ("tiny GPT", "masters"),
    ("tiny scan", "masters"),
    ("tiny Llama", "float32"),
    ("tiny LoRA", "frozen"),
    ("tiny slices", "float32"),
]


def losses(whole, weights, arm, count=2, of=None):
    case = models.Case("h100", whole, weights, arm, portable=True)
    step = models.build(case, seed=0, whole=of)
    state, found, train = step.state, [], jax.jit(step.function)
    for _ in range(count):
        state, loss = train(state, step.batch)
        found.append(float(loss))
    return found


@pytest.mark.third_party
@pytest.mark.parametrize(("whole", "weights"), slow_but(STEPS[:1], STEPS))
def test_a_step_of_mpx_has_the_losses_of_the_naive_one(whole, weights):
    naive, ours = (losses(whole, weights, arm) for arm in (models.NAIVE, "bfloat16"))
    assert ours == pytest.approx(naive, rel=0.01)
    assert naive[1] < naive[0]


_SIZES = models.Sizes(32, 64, 32, layers=2, heads=4)
_TEXTS, _IMAGE, _ENDS = {"rows": 4, "context": 16}, ((2, 8, 8, 4), 0), ((40,), 16)
_WINDOWS = dataclasses.replace(_SIZES, layers=1, kernel=True, chunks=4)
_NODES = ((16, 8), 0), ((40, 4), 0), _ENDS, _ENDS, ((16,), 32)
_TEXT, _PATCHES = ((2, 5, 8), 0), ((2, 16, 16), 0)
ROADS = {
    "micro-batches": models.Whole(models.llama, _SIZES, accumulate=2, **_TEXTS),
    "lookup": models.Whole(
        models.llama, dataclasses.replace(_SIZES, gathers=True), **_TEXTS
    ),
    "long": models.Whole(
        models.llama, _WINDOWS, rows=1, context=2048, attention=roads.by_windows
    ),
    "U-Net": models.Whole(
        *(roads.unet, _SIZES),
        parts=(_IMAGE, _IMAGE, ((2,), 1000), _TEXT),
        optimizer=roads.averaged,
    ),
    "residual blocks": models.Whole(
        roads.residual_blocks, _SIZES, parts=(_IMAGE, ((2, 16), 0))
    ),
    "DiT": models.Whole(
        roads.transformer,
        _SIZES,
        parts=(_PATCHES, _PATCHES, ((2,), 1000), ((2,), 32)),
        optimizer=roads.averaged,
    ),
    "SSD": models.Whole(
        *(roads.state_space, dataclasses.replace(_SIZES, tied=True)),
        rows=1,
        context=512,
    ),
    "LSTM": models.Whole(roads.lstm, _SIZES, **_TEXTS),
    "graph": models.Whole(roads.graph, _SIZES, parts=_NODES),
}


@pytest.mark.third_party
@pytest.mark.parametrize("name", slow_but(["residual blocks"], ROADS))
def test_a_step_of_another_kind_has_the_losses_of_the_naive_one(name):
    arms = models.NAIVE, "bfloat16"
    naive, ours = (losses("", "float32", arm, of=ROADS[name]) for arm in arms)
    assert ours == pytest.approx(naive, rel=0.03)
    assert naive[1] < naive[0]


@pytest.mark.third_party
def test_a_loss_in_chunks_or_by_a_gather_is_the_same():
    found = [
        losses(
            "", "float32", "float32", of=dataclasses.replace(ROADS["lookup"], sizes=of)
        )
        for of in (_SIZES, ROADS["lookup"].sizes, dataclasses.replace(_SIZES, chunks=4))
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


ARMS = [models.FLAX if number % 2 == 0 else "delayed" for number in range(len(STEPS))]
IN_8_BITS = [(arm, *step) for arm, step in zip(ARMS, STEPS, strict=True)]


@pytest.mark.third_party
@pytest.mark.parametrize(
    ("arm", "whole", "weights"), slow_but(IN_8_BITS[:1], IN_8_BITS)
)
def test_a_step_in_8_bits_trains(arm, whole, weights):
    # Flax scales its first gradients without having seen any.
    first, *_, last = losses(whole, weights, arm, count=8)
    assert last < first


@pytest.mark.third_party
def test_linear_layers_can_be_stored_in_8_bits():
    case = models.Case("h100", "tiny Llama", "masters", models.STORED, portable=True)
    step = models.build(case)
    leaves = jax.tree.leaves((step.state[0], step.batch))
    stored = [leaf for leaf in leaves if leaf.dtype == jnp.float8_e4m3fn]
    assert len(stored) == 2 * 7
    _, loss = jax.eval_shape(step.jitted(), step.state, step.batch)
    assert loss.dtype == jnp.float32


@pytest.mark.third_party
@pytest.mark.parametrize("arm", [models.NAIVE, "delayed"])
def test_only_adapters_of_a_frozen_model_are_trained(arm):
    step = models.build(models.Case("h100", "tiny LoRA", "frozen", arm, portable=True))
    trained, *_ = step.state
    frozen, _ = step.batch
    assert {leaf.dtype.name for leaf in jax.tree.leaves(trained)} == {"float32"}
    paths = jax.tree_util.tree_leaves_with_path(trained)
    assert len(paths) == 2 * 2 * 7
    assert all("adapter" in path[-1].key for path, _ in paths)
    matrices = [leaf for leaf in jax.tree.leaves(frozen) if leaf.ndim > 1]
    assert len(matrices) == 2 + 2 * 7
    assert all(leaf.dtype == jnp.bfloat16 for leaf in matrices)


@pytest.mark.third_party
@pytest.mark.parametrize(
    ("whole", "millions"),
    [("Llama", 542), ("GPT", 419), ("Llama of 4 in a scan, scores in half", 337)],
)
def test_the_models_have_the_sizes_that_the_page_says(whole, millions):
    one = models.WHOLE[whole]
    data = jax.eval_shape(one.random_data, jax.random.key(0))
    shapes = shapes_of(one.model(one.sizes, one.order), data).tree
    sizes = [jnp.prod(jnp.array(leaf.shape)) for leaf in jax.tree.leaves(shapes)]
    assert round(float(sum(sizes)) / 1e6) == millions


def test_a_loop_over_slices_is_a_scan():
    def turn(x, weights):
        return x * weights["a"] + weights["b"], None

    stacked = {"a": jnp.arange(3.0), "b": jnp.ones(3)}
    expected = jax.lax.scan(turn, jnp.float32(2), stacked)
    assert by_slices(turn, jnp.float32(2), stacked) == expected


@pytest.mark.parametrize(("share", "met"), [(0.5, True), (2.0, False)])
def test_goals_and_tables(share, met):
    found = results.Results("whole-steps", "test", "compiled for X")
    for case in whole_steps.CASES:
        is_ours = case.arm not in (models.NAIVE, *models.PEERS)
        one = share if is_ours else 1.0
        counts = {"traffic": one, "roof": one, "memory": one * 1e9, "kernels": one}
        counts |= {"tiny": 1, "calls": 4, "default_calls": 4 if met else 3}
        found.records.append({**dataclasses.asdict(case), "counts": counts})
    missed = [goal for goal in whole_steps.goals(found) if not goal.met]
    assert not missed if met else len(missed) > 40
    side_by_side, every = whole_steps.tables(found)
    assert len(every.rows) == len(whole_steps.CASES)
    assert "B200, ffn, float32" in [row[0] for row in side_by_side.rows]
    moved = f"mpx with the *lookup* moves {share:.2f} of naive's bytes without it."
    assert every.notes[-1].endswith(moved)
    cells = [row[1] for row in side_by_side.rows]
    assert set(cells) == {"0.50" if met else "**2.00**"}
    assert not list(whole_steps.tables(results.Results("whole-steps", "", "")))


CALL = """HloModule step

ENTRY %main (a: f8e5m2[64,32], b: f8e4m3fn[32,16]) -> bf16[64,16] {
  %a = f8e5m2[64,32]{1,0} parameter(0)
  %b = f8e4m3fn[32,16]{1,0} parameter(1)
  ROOT %call = bf16[64,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("target", "fails", "calls"),
    [("h100", False, 1), ("h100", True, None), ("b200", False, None)],
)
def test_products_in_8_bits_are_counted_under_default_flags_too(
    target, fails, calls, monkeypatch
):
    asked = []

    def program_of(lowered, target, devices, flags):
        asked.append(flags)
        if fails and flags:
            raise jax.errors.JaxRuntimeError("no tiling")
        return cost.counter.Program(CALL, 0, 0)

    monkeypatch.setattr(cost.counter, "compile_only_devices", lambda target: [])
    monkeypatch.setattr(cost.counter, "program_of", program_of)
    _, more = cost.compile_twice(None, {"target": target})
    assert more == {"default_calls": calls}
    assert len(asked) == (2 if target == "h100" else 1)
