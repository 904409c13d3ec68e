"""A run that changes its recipe: as if it had had the slots of both from the start."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from tests.helpers import slow_but, unchecked_annotations
from tests.step.cases import same_bits

N = 16
DELAYED = functools.partial(mpx.DelayedScaling, amax_history_len=4)
EVERY = mpx.Rules(mpx.Rule(mpx.Precision.LOW, primitive="dot_general"))
HEAD = mpx.Rules(mpx.Rule(DELAYED(warm_start=True), scope="head"))


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    with jax.named_scope("head"):
        return jnp.sum((jnp.tanh(x @ params["head"]) @ params["out"]) ** 2) / N


PROGRAMS = {
    "bfloat16": mpx.autocast(loss),
    "float16": mpx.autocast(loss, jnp.float16),
    "some": mpx.autocast(loss, recipe=DELAYED()),
    "every": mpx.autocast(loss, recipe=DELAYED(), rules=EVERY),
    "narrow": mpx.autocast(loss, recipe=DELAYED(fp8_format=mpx.Format.E4M3, margin=1)),
    "longer": mpx.autocast(loss, recipe=DELAYED(amax_history_len=9)),
    "nvfp4": mpx.autocast(loss, recipe=mpx.NVFP4BlockScaling()),
    "mixed": mpx.autocast(loss, recipe=mpx.NVFP4BlockScaling(), rules=HEAD),
}
CHANGES = [
    "some every some",
    "every nvfp4 every",
    "float16 some bfloat16 some",
    "bfloat16 nvfp4 some bfloat16",
    "nvfp4 mixed nvfp4 mixed",
    "longer narrow longer",
]
STEPS = 11


def model(scale=0.25):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"layers": (2, N, N), "head": (N, N), "out": (N, N)}
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: scale * jax.random.normal(key, s) for (name, s), key in pairs}


def new(name, func=None):
    return mpx.init_scaling(func or PROGRAMS[name], model(), jnp.ones((2 * N, N)))


@functools.cache
def compiled(name):
    return jax.jit(lambda s, *x: mpx.filter_value_and_grad(PROGRAMS[name], s)(*x))


def train(name, scaling, phase):
    """Steps with weights and batches of their own, of which the seventh is skipped."""
    found = []
    for i in range(phase * STEPS, (phase + 1) * STEPS):
        x = jax.random.normal(jax.random.key(i), (2 * N, N))
        x = x.at[0, 0].set(np.nan if i % STEPS == 6 else 0)
        result = compiled(name)(scaling, model(0.2 + 0.01 * i), x)
        scaling = result.scaling
        assert i % STEPS != 6 or not result.finite
        found.append((result.value, result.grads, scaling.loss_scale, scaling.record))
    return scaling, found


def slots_of(scaling):
    return scaling.state_dict().get("slots", {})


@pytest.mark.parametrize("changes", slow_but(CHANGES[:3], CHANGES))
def test_a_run_with_the_slots_of_both_from_the_start(changes):
    """Also across a checkpoint. Each state has the structure of its program's first."""
    names = changes.split()
    carried = both = new(names[0])
    for name in names[::-1]:
        both = new(name).with_state(both)
    structures = {}
    for phase, name in enumerate(names):
        saved = pickle.loads(pickle.dumps(carried.state_dict()))
        carried = new(name).with_state(saved if phase % 2 else carried)
        both = new(name).with_state(both)
        first = structures.setdefault(name, jax.tree.structure(both))
        assert jax.tree.structure(both) == first
        before = slots_of(both)
        carried, found = train(name, carried, phase)
        both, expected = train(name, both, phase)
        assert same_bits(found, expected)
        after, live = slots_of(both), getattr(both, "scales_by_weight", dict)()
        for slot in before.keys() - live.keys():
            assert same_bits(after[slot], before[slot])
        assert all(np.any(after[slot]["amax_history"]) for slot in live)
        for slot, x in slots_of(carried).items():
            assert same_bits(x, after[slot])
    assert int(carried.steps) == STEPS * len(names)
    assert int(carried.skipped) >= len(names)


def test_a_run_goes_on_after_a_change_and_back_as_without():
    """And stochastic rounding draws as in a run that was in NVFP4 from the start."""
    scaling, _ = train("every", new("every"), 0)
    other, noisy = train("nvfp4", new("nvfp4").with_state(scaling), 1)
    back, found = train("every", new("every").with_state(other), 2)
    whole, expected = train("every", scaling, 2)
    assert same_bits([x[:2] for x in found], [x[:2] for x in expected])
    assert same_bits(slots_of(back), slots_of(whole))
    always, _ = train("nvfp4", new("nvfp4"), 0)
    assert same_bits(train("nvfp4", always, 1)[1], noisy)
    afresh = train("nvfp4", new("nvfp4"), 1)[1]
    assert not same_bits(afresh[0][1], noisy[0][1])


def test_scales_for_another_format_are_those_of_the_history():
    scaling, _ = train("longer", new("longer"), 0)
    moved = slots_of(new("narrow").with_state(scaling))
    for name, slot in slots_of(scaling).items():
        amax = slot["amax_history"].max(-1)
        assert same_bits(moved[name]["scale"], np.float32(448) / amax / 2)


def test_the_loss_scaling_of_the_next_program():
    dynamic, none = mpx.DynamicLossScaling(8.0, period=5), mpx.NoLossScaling()
    old = none.adjust(False).adjust(True)
    started = dynamic.with_state(old.state_dict())
    assert float(started.loss_scale) == 8 and same_bits(started.record, old.record)
    for of in (none, mpx.StaticLossScaling(2.0), new("every")):
        goes_on = of.with_state(dynamic.adjust(False))
        assert same_bits(getattr(goes_on, "loss", goes_on), dynamic.adjust(False))
    by_loss = mpx.NoLossScaling("loss").adjust(True)
    assert same_bits(none.with_state(by_loss), by_loss)
    checked = new("every").with_state(by_loss).loss  # a step would refuse the other
    assert checked.skip is True and same_bits(checked.record, by_loss.record)
    refused = pytest.raises(TypeError, match="needs the dictionary from `state_dict")
    with unchecked_annotations(), refused:
        none.with_state(3.0)


def test_inference_and_guard_after_a_change():
    x = jax.random.normal(jax.random.key(9), (2 * N, N))
    scaling, _ = train("some", new("some"), 0)
    half = mpx.guard(new("bfloat16").with_state(scaling))
    infer = lambda name, s: jax.jit(  # noqa: E731
        lambda s: mpx.inference(PROGRAMS[name], s)(model(), x)
    )(s)
    assert same_bits(infer("bfloat16", half), infer("bfloat16", mpx.NoLossScaling()))
    again = new("some").with_state(half)
    assert same_bits(infer("some", again), infer("some", scaling))
    half.kept["['head'] (head 16x16)"]["scale"] = jnp.full(3, 2.0**127)
    with pytest.raises(FloatingPointError, match="scales between.*'head'"):
        mpx.guard(half)


def test_another_model_is_no_change_of_recipe():
    learned, _ = train("every", new("every"), 0)

    def renamed(params, x):
        with jax.named_scope("trunk"):
            return loss(params, x)

    scoped = new("every", mpx.autocast(renamed, recipe=DELAYED(), rules=EVERY))
    match = r"exactly the slots.*missing: .*\(trunk.*; unknown: .*\(head 16x16\)"
    with pytest.raises(ValueError, match=match):
        scoped.with_state(learned)
    assert slots_of(scoped).keys().isdisjoint(slots_of(learned).keys())
    taken = scoped.with_state(learned, strict=False)
    assert slots_of(taken).keys() == slots_of(scoped).keys() | slots_of(learned).keys()
    # A dictionary of version 2 does not know the weights without slots.
    old = {k: v for k, v in new("some").state_dict().items() if k != "weights"}
    with pytest.raises(ValueError, match=r"missing: `\['out'\].*strict=False"):
        new("every").with_state({**old, "version": 2})
