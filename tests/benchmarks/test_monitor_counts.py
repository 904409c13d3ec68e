"""What watching a step costs: its goal, and that the committed counts are of today."""

import dataclasses

import pytest

from benchmarks import results
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
