"""Programs of others that need no further package, and what `make clients` wrote."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import slow_but

from . import exports, goals, page, runner
from .gradients import QUANTIZERS, plain
from .measure import Compiled, make_all, measure, rounded_by
from .programs import PACKAGES, QUICK, programs_of
from .record import Built

# One of each kind of package; the others are what `make clients` is for, too.
QUICK_ONES = ("nnx_gru", "optax_step_inside")
OTHERS = ("haiku_lstm", "linen_resnet", "equinox_batch_norm", "optax_ctc")
FOUND = {n: c for module in QUICK for n, c in programs_of(module).items()}


def check(name: str, precision: str) -> None:
    """Fails unless a program is as good under mpx as the goals ask."""
    record = measure(FOUND[name], precisions=(precision,), seeds=2, costs=False)
    assert goals.runs(record), record["float32"]
    found = goals.cell(record, precision)
    assert found.colour == "green", found.why


@pytest.mark.third_party
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize(
    "name",
    slow_but(QUICK_ONES, (*QUICK_ONES, *OTHERS)),
)
def test_one_line_gives_the_gradient_of_a_program_of_others(name):
    check(name, "bfloat16")


@pytest.mark.third_party
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(
        [],
        [
            ("equinox_transformer", "delayed"),
            ("linen_resnet", "float16"),
            ("nnx_batch_norm", "float16"),
            ("haiku_lstm", "float16"),
        ],
    ),
)
def test_every_precision_runs_programs_of_others(name, precision):
    if FOUND[name].has(precision):
        check(name, precision)


def test_programs_have_names_of_their_own():
    names = [n for module in PACKAGES for n in programs_of(module)]
    assert len(names) == len(set(names)) >= 40


def made(**parts: Any) -> dict[str, Any]:
    """A record of a program, as `measure` makes it."""
    good = {"finite": True, "same outputs": True, "same gradients": True}
    record: dict[str, Any] = {"program": "p", "precisions": [], "faults": {}}
    record["sensitive"] = ""
    record["float32"] = {"finite": True}
    for name, part in parts.items():
        record[name.replace("_", " ")] = {**good, **part}
    return record


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"gradient": 0.021}, "2.1 times the naive cast's"),
        ({"gradient": 0.01, "finite": False}, "not finite"),
        ({"gradient": 0.01, "same outputs": False}, "other dtypes or shapes"),
        ({"gradient": 0.01, "same gradients": False}, "other dtypes or shapes"),
        ({"gradient": 0.01, "reasons": {"": 1}}, "without a reason"),
        ({"gradient": 1.5}, "times the naive"),
        ({"error": "TypeError: no"}, "TypeError: no"),
    ],
)
def test_a_cell_is_red_and_says_why(part, why):
    record = made(naive_bfloat16={"gradient": 0.01}, bfloat16=part)
    found = goals.cell(record, "bfloat16")
    assert found.colour == "red" and why in found.why


def test_a_fault_of_a_package_needs_evidence():
    broken = made(
        naive_bfloat16={"error": "TypeError"}, bfloat16={"error": "TypeError"}
    )
    assert goals.cell(broken, "bfloat16").colour == "red"
    broken["faults"] = {"bfloat16": "it asks for float32"}
    assert goals.cell(broken, "bfloat16").colour == "fault"
    broken["naive bfloat16"] = {"gradient": 0.01, "finite": True}
    assert goals.cell(broken, "bfloat16").colour == "red"


def test_a_fault_under_a_recipe_is_shown_by_rounding_by_hand():
    broken = made(
        naive_bfloat16={"gradient": 0.2},
        rounded_current={"gradient": float("nan"), "finite": False},
        current={"gradient": float("nan"), "finite": False},
    )
    broken["faults"] = {"current": "its matrix is not positive definite"}
    assert goals.cell(broken, "current").colour == "fault"
    broken["rounded current"] = {"gradient": 0.2, "finite": True}
    assert goals.cell(broken, "current").colour == "red"


@pytest.mark.parametrize("recipe", QUANTIZERS)
def test_rounding_by_hand_is_what_the_recipe_does_to_data_and_weights(recipe):
    x, count = (
        np.random.default_rng(0).standard_normal((3, 5), np.float32),
        np.arange(3),
    )

    @jax.jit
    def rounded(params, batch):
        found = rounded_by(Built(jnp.sum, params, batch), QUANTIZERS[recipe])
        return found.params, found.batch

    params, batch = rounded({"w": x, "scalar": x[0, 0]}, (count,))
    error = np.abs(params["w"] - x).max() / np.abs(x).max()
    assert 0 < error < (0.2 if recipe == "nvfp4" else 0.04)
    assert params["scalar"] == x[0, 0] and (batch[0] == count).all()


def test_an_error_above_that_of_a_cast_that_stayed_in_float32_needs_a_reason():
    naive = {"gradient": 0.01, "products": {"bfloat16": 1, "float32": 1, "mixed": 1}}
    record = made(naive_bfloat16=naive, bfloat16={"gradient": 0.03})
    assert goals.cell(record, "bfloat16").colour == "red"
    record["sensitive"] = "its solver has a tolerance"
    found = goals.cell(record, "bfloat16")
    assert found.colour == "green" and found.text == "3.0e-02 (3.00 f32)"
    record["naive bfloat16"]["products"]["bfloat16"] = 2
    found = goals.cell(record, "bfloat16")
    assert found.colour == "red" and "3.0 times the naive cast's" in found.why


@pytest.mark.parametrize(("error", "met"), [(0.02, True), (0.021, False)])
def test_a_region_of_float32_has_a_goal(error, met):
    naive = {"gradient": 0.01, "products": {"bfloat16": 2}}
    record = made(
        naive_bfloat16=naive,
        bfloat16={"gradient": 0.01},
        region_bfloat16={"gradient": error},
    )
    found = goals.judge({"programs": [record], "layouts": []})
    (goal,) = (g for g in found if "in a region" in g.text)
    assert goal.met == met and "p bfloat16" in goal.text


def scanned_layers() -> Built:
    """Layers of a plain tree that a scan cuts."""
    numbers = np.random.default_rng(0).standard_normal((3, 2, 32, 32), np.float32) / 6

    def loss(w, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w["in"]) @ w["out"].T, None)  # noqa: E731
        y, _ = jax.lax.scan(layer, x, w)
        return jnp.mean(y**2), y

    w = {"in": jnp.asarray(numbers[:, 0]), "out": jnp.asarray(numbers[:, 1])}
    return Built(loss, w, (jnp.ones((32, 32)),))


def test_exports_are_compared_bit_by_bit(monkeypatch):
    """Each quantized tensor is found if one bit of it is another one."""
    good = exports._compared(scanned_layers(), "current")
    assert good["same output"] and not good["wrong"]
    assert good["quantized"] == good["layers"] == 6
    files_of = exports._files

    def damaged(folder):
        files = files_of(folder)
        for key in [name for name in files if f"{name}_scale" in files]:
            files[key] = (files[key].view(np.uint8) ^ 1).view(files[key].dtype)
        return files

    monkeypatch.setattr(exports, "_files", damaged)
    bad = exports._compared(scanned_layers(), "current")
    assert bad["wrong"] == [f"{name}.{i}" for name in ("in", "out") for i in range(3)]


@pytest.mark.parametrize(("count", "wrong"), [(12, []), (11, []), (12, ["w"])])
def test_exports_have_a_goal(count, wrong):
    good = {"wrong": [], "same output": True}
    records = [{"program": f"p{i}", "current": good} for i in range(count)]
    records += [{"program": "q", "current": good | {"wrong": wrong}}] * bool(wrong)
    records += [{"program": "r", "current": {"error": "ValueError: computed"}}]
    goal = goals.judge({"programs": [], "layouts": [], "exports": records})[-1]
    assert goal.met == (count >= 12 and not wrong) and f"equal: {count}" in goal.text


def test_words_of_a_program_are_those_of_today():
    client = dataclasses.replace(FOUND["optax_ctc"], linear=False, note="new")
    old = {"program": "optax_ctc", "note": "old", "current": {}, "bfloat16": {}}
    (found,) = runner.with_words([old], {"optax_ctc": ("optax", client)})
    assert found["note"] == "new" and found["precisions"] == ["bfloat16", "float16"]
    assert "bfloat16" in found and "current" not in found


@pytest.mark.slow
def test_a_program_may_define_its_classes_inside():
    first, second = make_all(FOUND["equinox_transformer"], 2)
    assert jax.tree.structure(first.params) == jax.tree.structure(second.params)
    compiled = Compiled(plain(first), first)
    assert compiled(first).value != compiled(second).value


def test_a_process_that_dies_costs_one_program(monkeypatch):
    """The others of its module are measured by another process."""
    monkeypatch.setattr(runner, "_Worker", DyingWorker)
    records = list(runner.measure_module("m", ["a", "b", "c"], "programs", {}))
    assert [r["program"] for r in records] == ["a", "b", "c"]
    assert ["error" in r for r in records] == [False, True, False]
    assert "Aborted" in records[1]["error"]


class DyingWorker:
    """Measures everything but `b`, at which the process ends."""

    errors = ["Aborted (core dumped)"]

    def __init__(self, module, programs, task, options):
        self.programs = programs

    def __iter__(self):
        for name in self.programs:
            yield {"begin": name}
            if name == "b":
                return
            yield {"program": name, "record": {}}


def test_the_page_is_what_the_results_say():
    written = page.PAGE.read_text()
    assert written == page.render(runner.read()), "python -m rigs.clients --page"
