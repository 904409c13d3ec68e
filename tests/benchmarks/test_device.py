"""`python -m benchmarks device`: its whole way, on the CPU, at tiny sizes."""

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import documentation, processes, results, worker
from benchmarks.device import about, command, measure, plan, session, tables
from benchmarks.device.plan import Case
from benchmarks.peers.environment import REPOSITORY

# One case of each kind, and one arm that is there in no library.
TINY = Case("steps", "paper tiny", 4, "float32", "float32", 1)
LAYERS = Case("steps", "layers", 32, "current", "naive bfloat16", 0, (16, 32, 16))
FEW = {
    "steps": [
        *(LAYERS, TINY, dataclasses.replace(TINY, arm="of nobody")),
        dataclasses.replace(TINY, arm="MPX float16", side="peers"),
    ],
    "workloads": [
        Case("workloads", "tiny ffn", arm="FP8 by hand", base="naive bfloat16")
    ],
    "products": [
        Case("products", "layers", 32, "delayed", "naive bfloat16", 0, (32, 32))
    ],
}


@pytest.fixture
def few(monkeypatch):
    """Few cases, and a machine that may be busy."""
    monkeypatch.setattr(plan, "cases", lambda part, sizes: FEW.get(part, []))
    monkeypatch.setattr(plan, "SECONDS", dict.fromkeys(plan.PARTS, 3000.0))


def make(out, seconds=3000.0, **options):
    options |= {"console": Console(quiet=True), "commit": "abc", "platform": "cpu"}
    options |= {"command": "python -m benchmarks device --tiny", "sizes": plan.TINY}
    return session.Session(out=out, until=time.monotonic() + seconds, **options)


def work_here(side, request, peers, **options):
    """What a worker answers, without the start of one."""
    yield {"versions": worker.versions()}
    yield from map(json.loads, map(json.dumps, measure.measure(request)))


@pytest.mark.slow
@pytest.mark.third_party
@pytest.mark.usefixtures("few")
def test_a_run_on_a_device_measures_everything_and_shows_it(tmp_path, monkeypatch):
    """All parts; an arm that fails and peers that lack do not lose the rest."""
    monkeypatch.setattr(processes, "ask", work_here)
    one = make(tmp_path)
    found = one.run(plan.PARTS)
    assert results.read("device-cpu", tmp_path) == found
    assert {r["part"] for r in found.records} == {"about", *plan.PARTS}
    by_arm = {r.get("arm"): r for r in found.records if r["part"] == "steps"}
    assert by_arm["of nobody"]["error"].startswith("KeyError: 'of nobody'")
    assert by_arm["MPX float16"]["skipped"] == session.NO_PEERS
    for record in found.records:
        assert record["commit"] == "abc"
        if "seconds" in record:
            assert len(record["seconds"]) == len(record["base_seconds"]) >= 2
            assert record["memory"] > 0 and math.isfinite(record["size"])
    assert one.left(found, plan.PARTS) == 1  # the peers'

    page = documentation.render("<!-- table device -->\n<!-- end -->", tmp_path)
    for table in tables.tables(found):
        assert table.rows and table.title in page
    assert "Not measured" not in page and "; commit abc." in page
    assert "*of nobody*: KeyError: 'of nobody'." in page
    assert "65 tokens" not in page and "5 tokens" in page

    # A further call has nothing left to do, but to look at the device.
    before = [r for r in found.records if r["part"] != "about"]
    again = make(tmp_path).run(plan.PARTS)
    assert [r for r in again.records if r["part"] != "about"] == before


def run_until_killed(out, enough):
    """The command itself, killed without warning when its file says `enough`."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "device", "--platform", "cpu", "--tiny"]
        + ["--parts", "products", "--commit", "abc", "--out", str(out)],
        cwd=REPOSITORY,
        **quiet,
    )
    path, start = Path(out) / "device-cpu.json", time.monotonic()
    while process.poll() is None and time.monotonic() < start + 1000:
        if path.is_file() and enough(json.loads(path.read_text())):
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    return results.read("device-cpu", out)


@pytest.mark.exhaustive
@pytest.mark.third_party
def test_a_killed_run_keeps_what_is_done_and_goes_on_from_there(tmp_path, monkeypatch):
    """What is killed has a worker of its own."""
    seen = run_until_killed(tmp_path, lambda text: len(text["records"]) >= 2)
    assert len(seen.records) == 2
    first = seen.records[1]
    monkeypatch.setattr(processes, "ask", work_here)
    one = make(tmp_path)
    found = one.run(["products"])
    assert found.records[1] == first
    assert one.left(found, ["products"]) == 0
    arms = [r["arm"] for r in found.records if r["part"] == "products"]
    assert sorted(arms) == sorted(plan.TINY.recipes)


def answers(*lines):
    """A worker that answers this, and then ends as it should."""

    def ask(side, request, peers, **options):
        yield {"versions": {"jax": "1"}}
        yield {"device": "A100"}
        for line in lines:
            if isinstance(line, Exception):
                raise line
            yield line

    return ask


ABOUT_A100 = ({"started": 0}, {"case": 0, "record": {"memory_limit": 1}})


@pytest.mark.usefixtures("few")
def test_the_case_that_ends_a_worker_is_blamed_and_the_others_go_on(
    tmp_path, monkeypatch
):
    def answer(*lines):
        monkeypatch.setattr(processes, "ask", answers(*lines))

    answer(*ABOUT_A100)
    one, steps = make(tmp_path), FEW["steps"]
    found = one._begin()
    ended = processes.WorkerError("the worker ended with status -6")
    answer({"started": 0}, {"case": 0, "record": {}}, {"started": 1}, ended)
    assert one._work(found, steps[:3], one.until) == steps[:2]
    assert "status -6" in found.records[-1]["error"]
    assert "unfinished" not in found.records[-1]

    # Where time was over, it is tried again, after all others.
    answer({"started": 0}, ended)
    one._work(found, steps[2:3], time.monotonic())
    assert found.records[-1]["unfinished"]
    assert one._missing(found, "steps") == [*steps[3:], steps[2]]

    # Where none had begun, none of them can be measured, unless time was over.
    answer(ended)
    assert one._work(found, steps[3:4], time.monotonic()) == []
    assert one._work(found, steps[3:4], one.until) == steps[3:4]
    assert "status -6" in found.records[-1]["error"]


def test_results_of_other_versions_are_not_continued(tmp_path, monkeypatch):
    one = dataclasses.replace(make(tmp_path), platform="gpu")
    assert one.run(plan.PARTS) is None  # nothing is measured without a GPU
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(processes, "ask", answers(*ABOUT_A100))
    found = make(tmp_path)._begin()
    assert found.name == "device-a100" and found.device == "measured on A100"
    found.versions["ours"] = {"jax": "0"}
    found.write(tmp_path)
    match = r"device-a100.json was .*`--fresh` measures"
    with pytest.raises(RuntimeError, match=match):
        make(tmp_path)._begin()
    assert make(tmp_path, fresh=True)._begin().versions["ours"] == {"jax": "1"}


def test_a_worker_that_says_nothing_is_killed():
    code = "import time; print(1, flush=True); time.sleep(60)"
    pipe = {"text": True, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **pipe)
    patience = iter([60.0, 0.2])
    lines = processes.read_lines(process, lambda: next(patience))
    assert next(lines) == "1\n"
    with pytest.raises(processes.WorkerError, match="nothing came within 0 s; it was"):
        next(lines)
    assert process.poll() is not None


def test_what_the_device_has_no_units_for_is_skipped():
    device = SimpleNamespace(compute_capability="9.0")
    one = measure.Worker({}, device, plan.TINY, emulate=False)
    case = Case("steps", "layers", 32, "nvfp4", "naive bfloat16", 0, (16, 16))
    reason = "the device has no units for it: compute capability 9.0, needed 10.0"
    assert one.record(case)["skipped"] == reason
    missing = dataclasses.replace(case, arm="Qwix fp8")
    found = measure.importlib.util.find_spec("qwix")
    skipped = one.record(missing).get("skipped")
    assert skipped == "qwix is not installed" or found is not None


def test_every_arm_of_the_plan_exists():
    from benchmarks import our_arms
    from benchmarks.models import layers as linear_layers, whole_steps

    layers = {*linear_layers.ARMS}
    whole = {*our_arms.ARMS, *our_arms.BY_KERNEL, "bfloat16", *whole_steps.PEERS}
    for part in plan.PARTS:
        every = plan.cases(part, plan.FULL)
        assert len(set(every)) == len(every)
        assert all(Case.of(dataclasses.asdict(case)) == case for case in every)
        for case in every:
            known = layers if case.model == "layers" else our_arms.ARMS
            known = whole if case.part == "workloads" else known
            assert case.side == "peers" or {case.arm, case.base} <= set(known)
    assert sum(plan.SECONDS.values()) <= 1100 and max(plan.SECONDS.values()) <= 600


def test_goals_hold_for_the_device_that_they_were_said_of():
    found = results.Results("device-x", "test", "measured on NVIDIA H200")
    times = {"base_seconds": [1.7, 1.75], "seconds": [1.0, 1.0], "part": "steps"}
    for case in (
        {"arm": "delayed", "model": "layers", "base": "naive bfloat16"},
        {"arm": "autocast bfloat16", "model": "paper base", "base": "float32"},
        {"arm": "naive bfloat16", "model": "paper base", "base": "float32"},
    ):
        found.records.append(case | times)
    assert [goal.met for goal in tables.goals(found)] == [True, True]
    found.device = "measured on NVIDIA H100"
    assert not list(tables.goals(found))


def test_options_commit_and_notes(monkeypatch):
    options = command.parse(["--parts", "steps", "products", "--budget-s", "560"])
    assert options.parts == ["steps", "products"] and options.budget_s == 560
    assert command.parse([]).parts == plan.PARTS
    assert command.commit() != "unknown"
    monkeypatch.setenv("PATH", "")
    assert command.commit() == "unknown"
    record = {"arm": "a", "size": 2.0, "base_size": 1.0, "seconds": [1.0]}
    assert tables._notes([record]) == ["*a*: its result is 2.0, not 1.0."]
    assert tables._notes([{**record, "size": 1.01}]) == []
    assert tables._notes([{**record, "size": math.nan}])
    names = {1e-7: "float32", 4e-4: "TF32", 3e-3: "less than TF32"}
    assert {error: about.float32_products(error) for error in names} == names
