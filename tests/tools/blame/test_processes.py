"""Two processes name the same operation, on the device that did it."""

import pytest

import mpx

from ...helpers import in_two_processes


@pytest.mark.slow
def test_two_processes_name_what_one_device_did():
    found = in_two_processes("-m", "tests.tools.blame.two_processes", devices=4)
    verdict, inside = mpx.reports.Verdict.DATA.value, ["scan, iteration 0 of 3"]
    for as_one, by_hand in found:
        assert as_one == ["div", "plant", inside, [], [6], verdict]
        assert by_hand == ["div", "plant", inside, [6], [6], verdict]
