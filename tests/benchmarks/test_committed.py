"""What is committed: counted in the programs that the code lowers to today."""

import dataclasses

import pytest

from benchmarks import parts, processes, results
from benchmarks.counts import half, residuals
from benchmarks.counts.whole_steps import DELAYED, NAIVE, PORTABLE
from tests.helpers import slow_but

# Of a counted part: one of how many cases is lowered, and of which. What changes one of
# the others changes most of them.
CHOSEN = {
    "whole-steps whole_steps": (
        1,
        lambda c: (
            (c["whole"], c["weights"]) == ("Llama, scan", "masters")
            and c["arm"] in (NAIVE, DELAYED)
        ),
    ),
    "monitor monitor": (1, lambda c: c["model"] == "base"),
    "residuals residuals": (8, lambda c: True),
    "sweep sweep": (3, lambda c: c["devices"] == 1),
    "residuals default": (
        1,
        lambda c: c["arm"] == residuals.DEFAULT and "gpt scan" in c["model"],
    ),
    "workloads products": (3, lambda c: c["outputs"] == 512),
    "workloads half": (1, lambda c: c["arm"] == half.DEFAULT),
}
CASES = [(name, *chosen) for name, chosen in CHOSEN.items()]


def part_of(name):
    """The benchmark, and the module of its part."""
    benchmark, part = name.split()
    part = "residuals" if part == "default" else part
    known = {one.__name__.rpartition(".")[2]: one for one in parts.COUNTED[benchmark]}
    return benchmark, known[part]


@pytest.mark.parametrize(
    ("name", "every", "choose"),
    slow_but([], CASES),
    ids=CHOSEN,
)
def test_committed_counts_are_of_todays_programs(name, every, choose):
    benchmark, part = part_of(name)
    found, cases = results.read(benchmark), list(map(dataclasses.asdict, part.CASES))
    portable = (
        [dataclasses.asdict(case) for case in PORTABLE] if "whole" in name else []
    )
    names = list(cases[0])
    programs = {
        tuple(record[name] for name in names): record["program"]
        for record in found.records
        if "program" in record and record.keys() >= set(names)
    }
    wanted = {tuple(case.values()) for case in [*cases, *portable]}
    assert programs.keys() == wanted
    usable = [
        case
        for case in portable or cases
        if processes.side_of(case.get("arm", "")) == "ours"
    ]
    chosen = [case for case in usable if choose(case)][::every]
    assert chosen
    request = {"task": "lower", "steps": part.__name__.rpartition(".")[2]}
    request["cases"] = chosen
    versions, *answers = processes.ask("ours", request, None)
    for package in ("jax", "flax", "equinox", "optax"):
        if versions["versions"][package] != found.versions["ours"][package]:
            pytest.skip("other versions lower to other text")
    changed = [
        answer["case"]
        for answer in answers
        if answer["program"] != programs[tuple(answer["case"].values())]
    ]
    assert not changed, (
        f"{benchmark}.json is older than the code; run `python -m benchmarks "
        f"{benchmark} docs --out benchmarks/results`"
    )


# Goals that were missed when the results were committed, which the page says.
MISSED = {
    "sweep": 2,
    "residuals": 4,
    "workloads": 6,
    "whole-steps": 12,
    "few-bits": 1,
    "compile-time": 1,
}


@pytest.mark.parametrize("name", parts.PARTS)
def test_committed_results_meet_their_goals(name):
    missed = [goal for goal in parts.goals(results.read(name), name) if not goal.met]
    assert len(missed) <= MISSED.get(name, 0), missed
