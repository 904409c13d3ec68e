"""Steps timed on a CPU: ratios, blanks and tables; that arms compute the same."""

import math
from types import SimpleNamespace

import jax
import pytest

from benchmarks import processes, results
from benchmarks.models import on_cpu
from benchmarks.models.weights import random_weights
from benchmarks.steps import to_bfloat16
from benchmarks.time import cpu

OURS, NEWEST = "jax 0.10.2", "jax 0.12.0.1"


def run(side, of, arm, ms, *, step="mlp", units=False, error=1e-3):
    of = {"units": units, "step": step, "side": side, "of": of, "arm": arm}
    return {**of, "error": error, "load": 0.5, "ms": ms}


def found_runs(*more, units=False):
    found = results.Results("cpu", "python -m benchmarks cpu", "measured on X")
    about = {"cpu": "2 cores of X", "flags": ["avx2"], "load": 0.25, "commit": "abc"}
    found.records = [{"units": units, **about, "command": found.command}, *more]
    return found


TORCH = ("torch", "torch 2")


def test_speeds_are_of_the_same_round():
    # Something else ran in the last two rounds, in float32's more than in the arm's:
    # the ratio of the medians would be 4.
    found = found_runs(
        run("ours", OURS, cpu.FLOAT32, [2.0, 8.0, 10.0]),
        run("ours", OURS, cpu.OURS, [1.0, 2.0, 5.0]),
        # Another environment, and its own float32.
        run("peers", OURS, cpu.FLOAT32, [3.0, 3.0, 3.0]),
        run("peers", OURS, "JMP bfloat16", [6.0, 6.0, 6.0]),
        run(*TORCH, cpu.AUTOCAST, [2.0, 2.0, 20.0]),
    )
    runs = cpu.runs_of(found, units=False)
    assert cpu.speeds(runs, "mlp", "ours", cpu.OURS) == (2.0, 2.0, 3.0)
    assert cpu.speeds(runs, "mlp", "peers", "JMP bfloat16") == (0.5, 0.5, 0.5)
    assert cpu.beside_pytorch(runs, "mlp", "ours") == 0.5
    assert all(map(math.isnan, cpu.speeds(runs, "mlp", "ours", cpu.NAIVE)))
    assert all(map(math.isnan, cpu.speeds(runs, "gpt", "ours", cpu.OURS)))
    assert math.isnan(cpu.beside_pytorch(runs, "mlp", "newest"))


def test_tables_have_blanks_where_nothing_was_measured():
    found = found_runs(
        run("newest", NEWEST, cpu.OURS, [1.0] * 3),
        run("newest", NEWEST, cpu.FLOAT32, [3.0] * 3, error=0.0),
        run("newest", NEWEST, "mpx delayed", [12_500.0], error=None),  # too slow
        run("ours", OURS, cpu.FLOAT32, [2.0] * 3, error=0.0),
        run("ours", OURS, cpu.FORM, [4.0] * 3),
        run("torch", "torch 2", "PyTorch float32", [2.0] * 3, error=0.0),
        run("torch", "torch 2", cpu.AUTOCAST, [2.0] * 3),
    )
    with_units, without, each = cpu.tables(found)
    title = cpu.STEPS["mlp"].title
    assert with_units.notes == ["Not measured: no machine with `amx_bf16` yet."]
    assert [row[0] for row in with_units.rows[:2]] == [title] * 2
    assert not any(cell for row in with_units.rows for cell in row[2:])
    rows = [dict(zip(without.heads, row, strict=True)) for row in without.rows]
    first = {"step": title, "jax": "0.10.2", "float32, ms": "2.0"}
    second = {"step": title, "jax": "0.12.0.1", "float32, ms": "3.0"}
    first |= {cpu.FORM: "0.50", cpu.AUTOCAST: "1.00"}
    second |= {cpu.OURS: "3.00", "mpx to PyTorch, time": "0.50"}
    filled = [{head: cell for head, cell in row.items() if cell} for row in rows]
    assert filled == [first, second]
    # In the order of environments and arms, not in that of the records.
    first, second, third = (f"{title}, {of}" for of in (OURS, NEWEST, "torch 2"))
    assert [row[:5] for row in each.rows] == [
        (first, cpu.FLOAT32, "2.0", "1.00", "1.00 to 1.00"),
        (first, cpu.FORM, "4.0", "0.50", "0.50 to 0.50"),
        (second, cpu.FLOAT32, "3.0", "1.00", "1.00 to 1.00"),
        (second, cpu.OURS, "1.0", "3.00", "3.00 to 3.00"),
        (second, "mpx delayed", "12500.0", "", ""),
        (third, "PyTorch float32", "2.0", "1.00", "1.00 to 1.00"),
        (third, cpu.AUTOCAST, "2.0", "1.00", "1.00 to 1.00"),
    ]
    assert each.rows[1][5:] == ("1.0e-03", "3", "0.5")


GOALS = [(False, 1.0, [True, True]), (False, 1.1, [False, True])]
GOALS += [(True, 0.36, [False, True, True]), (True, 0.3, [True, True, True])]


@pytest.mark.parametrize(("units", "ms", "met"), GOALS)
def test_goals_are_those_of_the_kind_of_cpu(units, ms, met):
    found = found_runs(
        run("newest", NEWEST, cpu.FLOAT32, [1.0] * 3, units=units),
        run("newest", NEWEST, cpu.OURS, [ms] * 3, units=units),
        run("torch", "torch 2", cpu.AUTOCAST, [0.5] * 3, units=units),
    )
    assert [goal.met for goal in cpu.goals(found)] == met


def test_a_run_keeps_what_was_measured_elsewhere_and_of_other_steps(monkeypatch):
    def old(units, step="mlp"):
        return run("ours", OURS, cpu.OURS, [1.0], units=units, step=step)

    known = found_runs(old(True), old(False), old(False, "gpt"), units=True)
    monkeypatch.setattr(results, "read", lambda name: known)
    monkeypatch.setattr(cpu, "MADE", {"torch": processes.REPOSITORY / "missing"})
    here = {"units": False, "cpu": "this"}
    monkeypatch.setattr(cpu, "about", lambda command: here)
    found = found_runs()
    found.records.clear()
    options = SimpleNamespace(models=("mlp", "lstm"), quick=True)
    asked = cpu.requests(options, found)
    header, with_units, _, of_another_step = known.records
    assert found.records == [header, with_units, of_another_step, here]
    assert found.notes == ["Not run: torch; `make torch-venv` makes its environment."]
    assert [request["sides"] for request in asked] == [["ours", "newest", "peers"]] * 2
    assert asked[1]["names"].keys() == {"ours", "newest", "peers"}
    assert asked[1]["sizes"]["rounds"] == 3


def test_workers_take_turns():
    heard, closed = [], []

    def worker(name, count):
        try:
            for index in range(count):
                heard.append((name, index))
                yield {"turn": index}
        finally:
            closed.append(name)

    answers = processes.in_turns({"a": worker("a", 3), "b": worker("b", 1)})
    assert [side for side, _ in answers] == ["a", "b", "a", "a"]
    assert heard == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    stopped = processes.in_turns({"a": worker("a", 3), "b": worker("b", 1)})
    next(stopped)
    stopped.close()
    assert closed == ["b", "a", "a"]  # the last b had not begun


@pytest.mark.slow
def test_a_worker_waits_for_its_turn():
    request = {"task": "time.cpu", "side": "ours", "units": False, "step": "mlp"}
    request["names"] = {"ours": [cpu.FLOAT32]}
    request["sizes"] = {"model": "mlp", "rounds": 2, **SMALL}
    workers = {"ours": processes.ask("ours", request, None, turns=True)}
    (_, versions), *turns, (_, last) = processes.in_turns(workers)
    assert "versions" in versions
    assert [answer["turn"] for _, answer in turns] == ["built", 0, 1]
    assert len(last["run"]["ms"]) == 2 and last["run"]["arm"] == cpu.FLOAT32


def test_all_models_are_measured_in_all_environments():
    assert {step.model for step in cpu.STEPS.values()} == on_cpu.MODELS.keys()
    assert cpu.STEPS["gpt"].small().rounds >= 2  # of which there are quartiles
    found = found_runs()
    found.versions = {"ours": {"jax": "1"}, "newest": {"jax": "2", "optax": "3"}}
    assert found.versions_line() == "jax 1 and 2, optax 3"


SMALL = {"rows": 2, "width": 8, "layers": 1, "hidden": 16, "heads": 2, "tokens": 4}
SMALL |= {"patch": 4, "classes": 5}


@pytest.mark.third_party
@pytest.mark.parametrize("model", ["gpt", "resnet", "lstm"])
def test_flax_computes_what_a_naive_cast_does(model):
    sizes = SimpleNamespace(model=model, **SMALL)
    data = on_cpu.random_data(sizes, jax.random.key(0))
    tree = random_weights(on_cpu.MODELS[model](sizes), data, jax.random.key(1))

    @jax.jit
    def losses(tree, data):
        plain, by_flax = (on_cpu.loss_of(sizes, is_flax) for is_flax in (False, True))
        cast = jax.tree.map(to_bfloat16, (tree, data))
        return plain(tree, data), plain(*cast), by_flax(tree, data)

    full, naive, flax = losses(tree, data)
    assert full.dtype == naive.dtype == flax.dtype == "float32"
    assert full != flax
    assert [float(flax), float(naive)] == pytest.approx([float(full)] * 2, rel=1e-2)


@pytest.mark.third_party
def test_the_error_is_that_of_the_gradients():
    sizes = SimpleNamespace(model="mlp", **SMALL)
    names = [cpu.FLOAT32, cpu.FLOAT32, cpu.OURS]
    exact, same, half = on_cpu.built(sizes, names)
    assert exact[2] == same[2] == 0
    assert 1e-4 < half[2] < 2e-2
    half[1]()  # a step
