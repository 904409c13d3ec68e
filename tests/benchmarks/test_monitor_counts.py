"""What watching a step costs: its goal, and that the committed counts are of today."""

import dataclasses

import pytest

from benchmarks import processes, results
from benchmarks.counts import monitor


@pytest.mark.parametrize(("more", "met"), [(1.59, True), (1.61, False)])
def test_goals_are_of_a_hundredth_of_what_is_moved_more(more, met):
    found = results.Results("monitor", "test", "compiled for X")
    for case in monitor.CASES:
        traffic = 1e9 * (1.0 if monitor.SAMPLES[case.watched] is None else more)
        found.records.append(
            {**dataclasses.asdict(case), "counts": {"traffic": traffic}}
        )
    assert all(goal.met is met for goal in monitor.goals(found))
    for table in monitor.tables(found):
        assert [row[0] for row in table.rows] == list(monitor.SAMPLES)


@pytest.mark.slow
def test_committed_counts_are_of_todays_programs():
    found = results.read("monitor")
    assert found is not None
    assert all(goal.met for goal in monitor.goals(found))
    names = [field.name for field in dataclasses.fields(monitor.Case)]
    programs = {
        monitor.Case(*(record[name] for name in names)): record["program"]
        for record in found.records
    }
    assert set(programs) == set(monitor.CASES)
    watched = [case for case in monitor.CASES if case.model == "base"]
    cases = [dataclasses.asdict(case) for case in watched]
    request = {"task": "lower", "steps": "monitor", "cases": cases}
    versions, *answers = processes.ask("ours", request, None)
    for package in ("jax", "equinox"):
        if versions["versions"][package] != found.versions["ours"][package]:
            pytest.skip("other versions lower to other text")
    assert [answer["program"] for answer in answers] == [
        programs[case] for case in watched
    ], "run `python -m benchmarks monitor docs --out benchmarks/results`"
