"""Workers: the arms of our environment, the peers' where it exists, and targets."""

import importlib.util
import math

import pytest

from benchmarks import our_arms, processes, results, steps
from benchmarks.counter import counter as targets
from benchmarks.models import plain
from benchmarks.peers import environment as peers
from benchmarks.time import host
from tests.helpers import slow_but

TINY = {"target": "v5e", "model": "tiny, mean", "blocks": 1, "batch": 4}


def ask(side, request, **options):
    return list(processes.ask(side, request, peers.existing(), **options))


is_alone = peers.existing() is None
needs_peers = pytest.mark.skipif(is_alone, reason="needs .venv-peers (`make bench`)")
is_missing = targets.why_missing(targets.TARGETS["v5e"]) is not None
is_missing = is_missing and getattr(peers.existing(), "libtpu", None) is None
needs_libtpu = pytest.mark.skipif(is_missing, reason="needs libtpu")


QUICK = ("mpx float16", "autocast bfloat16, half stream")


@pytest.mark.third_party
@pytest.mark.parametrize(
    "name", slow_but(QUICK, [*QUICK, "delayed", "naive bfloat16", "nvfp4"])
)
def test_every_arm_trains(name):
    step = plain.build(our_arms.ARMS[name], plain.Case(arm=name, **TINY), seed=0)
    compiled = step.jitted().lower(step.state, step.batch).compile()
    state, first = compiled(step.state, step.batch)
    for _ in range(20):
        state, last = compiled(state, step.batch)
    assert first.dtype == last.dtype == "float32"
    assert math.isclose(float(first), math.log(10), rel_tol=0.5)
    assert float(last) < float(first)


@pytest.mark.third_party
def test_the_baseline_uses_no_mpx():
    """The same model file without mpx gives the same float32 numbers."""
    arm, case = our_arms.ARMS["float32"], plain.Case(arm="float32", **TINY)
    assert not arm.uses_mpx
    losses = []
    for uses_mpx in (False, True):
        variant = steps.Arm("float32", arm.first_scaling, arm.make_step, uses_mpx)
        step = plain.build(variant, case, seed=0)
        losses.append(float(step.jitted()(step.state, step.batch)[1]))
    assert losses[0] == losses[1]


def lowering(*arms, **changes):
    cases = [{**TINY, **changes, "arm": arm} for arm in arms]
    return {"task": "lower", "steps": "sweep", "cases": cases}


@pytest.mark.slow
def test_a_worker_lowers_without_a_device_and_says_why_it_fails():
    arms = ["float32", "mpx float16"]
    versions, *answers = ask("ours", lowering(*arms, target="h100"))
    assert {"jax", "equinox"} <= versions["versions"].keys()
    assert [answer["case"]["arm"] for answer in answers] == arms
    assert len({answer["program"] for answer in answers}) == 2
    with pytest.raises(processes.WorkerError, match="KeyError: 'new'"):
        ask("ours", lowering("new"))


@pytest.mark.exhaustive
def test_host_cost_is_of_all_rounds():
    arms = ("float32", "mpx bfloat16")
    cases = lowering(*arms)["cases"]
    request = {"task": "time.host", "side": "ours", "cases": cases, "rounds": 2}
    _, *runs = [answer.get("run") for answer in ask("ours", request)]
    assert tuple(run["arm"] for run in runs) == arms
    for run in runs:
        assert all(len(run[what]) == 2 and min(run[what]) > 0 for what in host.LIMITS)


@pytest.mark.slow
@needs_peers
def test_the_peers_worker_has_the_published_mpx():
    arms = ("float32", "MPX float16", "MPX bfloat16", "JMP float16")
    versions, *answers = ask("peers", lowering(*arms))
    assert versions["versions"]["mixed-precision-for-JAX"] == "0.1.8"
    assert versions["versions"]["jmp"] == "0.0.4"
    assert len({answer["program"] for answer in answers}) == len(arms)
    _, ours = ask("ours", lowering("float32"))
    assert ours["program"] == answers[0]["program"]


@pytest.mark.exhaustive
@needs_libtpu
def test_a_worker_compiles_for_a_tpu_and_skips_known_programs():
    request = lowering("float32") | {"task": "count", "target": "v5e"}
    versions, answer = ask("ours", request)
    assert answer["counts"]["memory"] > 0 and answer["counts"]["traffic"] > 0
    compiler = results.compiler(versions["versions"], "tpu")
    known = [(answer["program"], compiler)]
    _, again = ask("ours", {**request, "known": known})
    assert again == {"case": answer["case"], "program": answer["program"]}


def test_targets_say_what_is_missing(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"TPU v5e needs the compiler `libtpu`"):
        targets.compile_only_devices(targets.TARGETS["v5e"])
    with pytest.raises(RuntimeError, match=r'needs JAX.s CUDA plugin.*"jax\[cuda12\]"'):
        targets.compile_only_devices(targets.TARGETS["h100"])
